"""Flash and memory-efficient attention: by the CPU's fused kernel, and by the definition where that does not fit.

    flash       query, key, value (B, H, L, E), heads of key and value may be fewer; no mask
    efficient   with a mask, whose gradient may be asked for; value's E may differ; the sum's logarithm is padded to 32 rows

What autograd saves has the shapes, dtypes and devices of the GPU's operators: logsumexp as float32, flash's generator state as
two uint64 on the device, efficient's as two int64 scalars on the host. Dropout goes by the definition; its mask is drawn again
in backward, from the state that forward gave.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.cuda_stand_in.random_state import Draws, generator_at

aten = torch.ops.aten

State = tuple[int, int]
"""Seed and offset of the generator that draws a dropout mask."""
ROWS = 32
"""Efficient attention pads the rows of its logsumexp to a multiple of this."""


def _fits(query: Tensor, value: Tensor, dropout_p: float) -> bool:
    return dropout_p == 0 and query.size(-1) == value.size(-1) and min(query.shape) > 0 and value.numel() > 0


def scale_of(query: Tensor, scale: float | None) -> float:
    return float(query.size(-1) ** -0.5 if scale is None else scale)


def _repeated(query: Tensor, other: Tensor) -> Tensor:
    """A key or value with as many heads as the query has."""
    groups = query.size(1) // max(other.size(1), 1)
    return other if groups == 1 else other.repeat_interleave(groups, 1)


def _per_head(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of a key or value of fewer heads."""
    if gradient.size(1) == like.size(1):
        return gradient
    grouped: Tensor = gradient.unflatten(1, (like.size(1), -1))
    return grouped.sum(2)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = (query @ key.transpose(-2, -1)) * scale
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return scores


def _kept(scores: Tensor, dropout_p: float, state: State) -> Tensor:
    """Return the factor that dropout gives each weight: 0 or 1 / (1 - p)."""
    mask = torch.empty_like(scores).bernoulli_(1 - dropout_p, generator=generator_at(*state))
    return mask / (1 - dropout_p) if dropout_p < 1 else mask


def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax, and the logarithm of its sum; a row that may see nothing weighs nothing."""
    logsumexp = scores.logsumexp(-1)
    return (scores - logsumexp.unsqueeze(-1)).exp().nan_to_num(0.0), logsumexp


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, p: float, is_causal: bool, scale: float, state: State
) -> tuple[Tensor, Tensor]:
    """Output (B, H, L, E), dense as (B, L, H, E), and logsumexp (B, H, L)."""
    key, value = _repeated(query, key), _repeated(query, value)
    if _fits(query, value, p):
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    else:
        scores = _scores(_wide(query), _wide(key), bias, is_causal, scale)
        weights, logsumexp = _weights(scores)
        if p:
            weights = weights * _kept(scores, p, state)
        out = (weights @ _wide(value)).to(query.dtype)
    return out.transpose(1, 2).contiguous().transpose(1, 2), logsumexp.float().contiguous()


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    p: float,
    is_causal: bool,
    scale: float,
    state: State,
    *,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    every_key, every_value = _repeated(query, key), _repeated(query, value)
    if _fits(query, value, p) and not of_bias:
        logsumexp = logsumexp.to(_wide(query).dtype)
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, every_key, every_value, out, logsumexp, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return of_query, _per_head(of_key, key), _per_head(of_value, value), None
    wide_grad, wide_query, wide_key = _wide(grad), _wide(query), _wide(every_key)
    scores = _scores(wide_query, wide_key, bias, is_causal, scale)
    weights, _ = _weights(scores)
    kept = _kept(scores, p, state) if p else None
    of_value = (weights if kept is None else weights * kept).transpose(-2, -1) @ wide_grad
    of_weights = wide_grad @ _wide(every_value).transpose(-2, -1)
    if kept is not None:
        of_weights = of_weights * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query = (of_scores @ wide_key * scale).to(query.dtype)
    of_key = (of_scores.transpose(-2, -1) @ wide_query * scale).to(key.dtype)
    summed = of_scores.sum_to_size(bias.shape).to(bias.dtype) if of_bias and bias is not None else None
    return of_query, _per_head(of_key, key), _per_head(of_value.to(value.dtype), value), summed


def drawn(draws: Draws, p: float) -> State:
    """State from which the dropout mask of one call is drawn, forward and backward."""
    return (draws.generator().initial_seed(), 0) if p else (0, 0)


def flash(
    op: Any,
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    if return_debug_mask:
        raise NotImplementedError("CUDA stand-in: flash attention gives no debug mask")
    state = drawn(draws, dropout_p)
    out, logsumexp = forward(query, key, value, None, dropout_p, is_causal, scale_of(query, scale), state)
    generator_state = torch.tensor(state, dtype=torch.int64).view(torch.uint64)
    unused, debug_mask = torch.empty((), dtype=torch.uint64), query.new_empty(0)
    return out, logsumexp, None, None, query.size(2), key.size(2), generator_state, unused, debug_mask


def flash_backward(
    op: Any, draws: Draws, grad: Tensor | None, *given: Any, scale: float | None = None
) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing was asked of the output
        return None, None, None
    query, key, value, out, logsumexp, _, _, _, _, p, is_causal, generator_state, _ = given
    seed, offset = generator_state.view(torch.int64).tolist() if p else (0, 0)
    scale = scale_of(query, scale)
    return backward(grad, query, key, value, None, out, logsumexp, p, is_causal, scale, (seed, offset), of_bias=False)[:3]


def efficient(
    op: Any,
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *given: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:
    from tests.cuda_stand_in.compute import OnHost

    compute_logsumexp, p = given[0], given[1] if len(given) > 1 else 0.0
    is_causal = len(given) > 2 and given[2]
    state = drawn(draws, p)
    out, logsumexp = forward(query, key, value, bias, p, is_causal, scale_of(query, scale), state)
    rows = query.size(2)
    padded = -(-rows // ROWS) * ROWS
    logsumexp = (
        pad(logsumexp, (0, padded - rows), value=math.inf) if compute_logsumexp else logsumexp.new_empty(*out.shape[:2], 0)
    )
    return out, logsumexp, OnHost(torch.tensor(state[0])), OnHost(torch.tensor(state[1]))


def efficient_backward(
    op: Any, draws: Draws, grad: Tensor | None, *given: Any, scale: float | None = None
) -> tuple[Tensor | None, ...]:
    if grad is None:  # as above
        return None, None, None, None
    query, key, value, bias, out, logsumexp, seed, offset, p, asked, *is_causal = given
    state = (int(seed), int(offset)) if p else (0, 0)
    logsumexp = logsumexp[..., : query.size(2)].contiguous()
    scale = scale_of(query, scale)
    return backward(grad, query, key, value, bias, out, logsumexp, p, any(is_causal), scale, state, of_bias=asked[3])


def table() -> dict[Any, Any]:
    """Formula of each operator."""
    return {
        aten._scaled_dot_product_flash_attention.default: flash,
        aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        aten._scaled_dot_product_efficient_attention.default: efficient,
        aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    }
