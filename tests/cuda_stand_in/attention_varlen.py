"""Attention over sequences of different lengths that lie one behind the other, as nested tensors ask for it.

    flash       query (T, H, E) with cum_q = [0, n1, n1 + n2, ...], logsumexp (H, T); or (B, L, H, E), logsumexp (B, H, L)
    efficient   query (1, T, H, E) with cum_q, logsumexp (N, H, L padded to 32 rows); or (B, L, H, E)

Each sequence goes by the formulas of `attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.cuda_stand_in import attention
from tests.cuda_stand_in.random_state import Draws

aten = torch.ops.aten


def _refuse(**options: Any) -> None:
    given = [name for name, value in options.items() if value is not None and value != -1]
    if given:
        raise NotImplementedError(f"CUDA stand-in: attention over sequences takes no {', '.join(given)}")


def _pieces(tensors: Sequence[Tensor], ends: Sequence[Tensor | None]) -> list[list[Tensor]]:
    """Of each sequence its part of each tensor, as (1, H, L, E) or, for whole batches, (B, H, L, E)."""
    if ends[0] is None:
        return [[t.transpose(1, 2) for t in tensors]]
    of_each = []
    for t, cum in zip(tensors, ends, strict=True):
        assert cum is not None
        at = cum.tolist()
        of_each.append([t[a:b].transpose(0, 1).unsqueeze(0) for a, b in pairwise(at)])
    return [list(parts) for parts in zip(*of_each, strict=True)]


def _joined(parts: Sequence[Tensor], whole: bool) -> Tensor:
    """(B, L, H, E) of a whole batch, or (T, H, E) of sequences."""
    if whole:
        return parts[0].transpose(1, 2).contiguous()
    return torch.cat([p.squeeze(0).transpose(0, 1) for p in parts])


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    p: float,
    is_causal: bool,
    scale: Any,
    seed: int,
) -> tuple[Tensor, list[Tensor]]:
    """Output in the layout of the query, and logsumexp (B, H, L) of each sequence."""
    outs, sums = [], []
    for i, (query, key, value) in enumerate(_pieces((q, k, v), (cum_q, cum_k, cum_k))):
        _check_causal(is_causal, query, key)
        out, logsumexp = attention.forward(query, key, value, None, p, is_causal, attention.scale_of(query, scale), (seed, i))
        outs.append(out)
        sums.append(logsumexp)
    return _joined(outs, cum_q is None), sums


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Sequence[Tensor], cum_q: Tensor | None,
    cum_k: Tensor | None, p: float, is_causal: bool, scale: Any, seed: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = []
    pieces = _pieces((grad, q, k, v, out), (cum_q, cum_q, cum_k, cum_k, cum_q))
    for i, ((of_out, query, key, value, part), logsumexp) in enumerate(zip(pieces, sums, strict=True)):
        scaled = attention.scale_of(query, scale)
        found.append(
            attention.backward(
                of_out, query, key, value, None, part, logsumexp.contiguous(), p, is_causal, scaled, (seed, i), False
            )[:3]
        )
    return tuple(_joined(parts, cum_q is None) for parts in zip(*found, strict=True))


def _check_causal(is_causal: bool, query: Tensor, key: Tensor) -> None:
    if is_causal and query.size(2) != key.size(2):
        raise NotImplementedError("CUDA stand-in: causal attention over sequences takes as many queries as keys")


def flash(
    op: Any, draws: Draws, q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k, alibi=alibi_slopes)
    seed, _ = attention.drawn(draws, dropout_p)
    out, sums = _forward(q, k, v, cum_q, cum_k, dropout_p, is_causal, scale, seed)
    logsumexp = sums[0] if cum_q is None else torch.cat([s.squeeze(0) for s in sums], -1)
    state = torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint64)
    return out, logsumexp, state, torch.empty((), dtype=torch.uint64), q.new_empty(0)


def flash_backward(
    op: Any, draws: Draws, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_q: Tensor | None,
    cum_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _refuse(window_size_left=window_size_left, window_size_right=window_size_right)
    sums = [logsumexp] if cum_q is None else [s.unsqueeze(0) for s in logsumexp.split(cum_q.diff().tolist(), -1)]
    seed = int(state.view(torch.int64)[0])
    return _backward(grad, q, k, v, out, sums, cum_q, cum_k, dropout_p, is_causal, scale, seed)


def _without_batch(tensors: Sequence[Tensor], cum_q: Tensor | None) -> list[Tensor]:
    return [t if cum_q is None else t.squeeze(0) for t in tensors]


def efficient(
    op: Any, draws: Draws, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, cum_q: Tensor | None, cum_k: Tensor | None,
    max_q: int | None, max_k: int | None, dropout_p: float, mask_type: int, compute_logsumexp: bool = False, *,
    scale: float | None = None, seqlen_k: Tensor | None = None, window_size: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    from tests.cuda_stand_in.compute import OnHost

    _refuse(bias=bias, seqlen_k=seqlen_k, window_size=window_size)
    seed, _ = attention.drawn(draws, dropout_p)
    q, k, v = _without_batch((q, k, v), cum_q)
    out, sums = _forward(q, k, v, cum_q, cum_k, dropout_p, mask_type != 0, scale, seed)
    rows = max(s.size(-1) for s in sums) if max_q is None else max_q
    padded = -(-rows // attention.ROWS) * attention.ROWS if compute_logsumexp else 0
    logsumexp = torch.cat([pad(s, (0, padded - s.size(-1)), value=math.inf) for s in sums])
    out = out if cum_q is None else out.unsqueeze(0)
    longest_k = k.size(1) if max_k is None else max_k
    return out, logsumexp, OnHost(torch.tensor(seed)), OnHost(torch.tensor(0)), rows, longest_k


def efficient_backward(
    op: Any, draws: Draws, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor,
    cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, logsumexp: Tensor, dropout_p: float, seed: Tensor,
    offset: Tensor, mask_type: int, bias_requires_grad: bool, *, scale: float | None = None, num_splits_key: int | None = None,
    window_size: int | None = None, shared_storage_dqdkdv: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    _refuse(bias=bias, window_size=window_size)
    lengths = [q.size(1)] if cum_q is None else cum_q.diff().tolist()
    sums = [logsumexp[..., : lengths[0]]] if cum_q is None else [logsumexp[i : i + 1, :, :n] for i, n in enumerate(lengths)]
    grad, q, k, v, out = _without_batch((grad, q, k, v, out), cum_q)
    found = _backward(grad, q, k, v, out, sums, cum_q, cum_k, dropout_p, mask_type != 0, scale, int(seed))
    return *(g if cum_q is None else g.unsqueeze(0) for g in found), None


def table() -> dict[Any, Any]:
    """Formula of each operator."""
    return {
        aten._flash_attention_forward.default: flash,
        aten._flash_attention_backward.default: flash_backward,
        aten._efficient_attention_forward.default: efficient,
        aten._efficient_attention_backward.default: efficient_backward,
    }
