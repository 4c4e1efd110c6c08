"""Samples of torch's own database of operators, and the outcome of each: outputs and all gradients as bits, or the error.

    for sample in samples_of(op, "cpu", dtype, at_most=5):
        plain = run(op, sample)                              # nothing of ours, no dispatch mode
        other = run(op, sample, within=device.compute)       # the same program within something
        assert other == plain

Inputs are activations, copies of leaves in the same layout: a leaf itself stays on the device. Between forward and backward
nobody but autograd holds an input or an output, so a use that was swapped finds nothing on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

pytest.importorskip("expecttest", reason="the operator database imports it; it comes with the extra `dev`")
from torch.testing._internal.common_methods_invocations import op_db

OPS: dict[str, Any] = {op.formatted_name: op for op in op_db}

LOOKED_AT = 100
"""Maximum number of samples made for one operator and dtype: pooling has thousands."""

_SAME_SIZE = {torch.bfloat16: torch.int16, torch.complex32: torch.int32}
"""For dtypes that NumPy lacks."""


class BareMode(TorchDispatchMode):
    """Dispatch mode that does nothing. A result that changes under it changes under any mode."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Bits:
    """Every property of a tensor that a program can observe: NaN payloads, the sign of zero, strides, conj and neg bits."""

    dtype: torch.dtype
    layout: torch.layout
    shape: torch.Size
    stride: tuple[int, ...]
    lazy: tuple[bool, bool]
    data: bytes = field(repr=False)

    @staticmethod
    def of(t: Tensor) -> Bits:
        dense = t.detach() if t.layout is torch.strided else t.detach().to_dense()
        raw = dense.resolve_conj().view(_SAME_SIZE[t.dtype]) if t.dtype in _SAME_SIZE else dense
        return Bits(t.dtype, t.layout, t.shape, dense.stride(), (t.is_conj(), t.is_neg()), raw.numpy(force=True).tobytes())


@dataclass(frozen=True)
class Outcome:
    """Outcome of a sample: the operator's outputs, its first and second gradients; or its error."""

    error: str = ""
    outputs: tuple[Bits | None, ...] = ()
    gradients: tuple[Bits | None, ...] = ()
    second_gradients: tuple[Bits | None, ...] = ()

    def without_data(self) -> Outcome:
        def bare(all_bits: tuple[Bits | None, ...]) -> tuple[Bits | None, ...]:
            return tuple(None if bits is None else replace(bits, data=b"") for bits in all_bits)

        return Outcome(self.error, bare(self.outputs), bare(self.gradients), bare(self.second_gradients))


def bits_of(tensors: Sequence[Tensor | None]) -> tuple[Bits | None, ...]:
    return tuple(None if t is None else Bits.of(t) for t in tensors)


def differentiable(op: Any, device_type: str, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return the members of `dtypes` for which torch has a gradient of the operator."""
    return [dtype for dtype in dtypes if op.supports_autograd and dtype in op.supported_backward_dtypes(device_type)]


def samples_of(op: Any, device_type: str, dtype: torch.dtype, at_most: int, *, requires_grad: bool = True) -> list[Any]:
    """Return the first, the last, and evenly spaced ones between, as neighbours are alike; of the first `LOOKED_AT`."""
    samples = list(islice(op.sample_inputs(device_type, dtype, requires_grad=requires_grad), LOOKED_AT))
    if len(samples) <= at_most:
        return samples
    return [samples[i * (len(samples) - 1) // max(at_most - 1, 1)] for i in range(at_most)]


def run(
    op: Any,
    sample: Any,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    twice: bool = False,
    before_backward: Callable[[], object] = lambda: None,
) -> Outcome:
    """Forward and backward of one sample within a context; `twice`: gradients of the gradients, too. Draws the same numbers."""
    _seed()
    leaves: list[Tensor] = []
    second: tuple[Bits | None, ...] = ()
    try:
        with within():
            roots, outputs = _forward(op, sample, leaves)
            if not roots:
                return Outcome(outputs=outputs)
            before_backward()
            directions = [torch.randn_like(root, requires_grad=twice) for root in roots]
            gradients: Sequence[Tensor | None] = torch.autograd.grad(
                roots, leaves, directions, allow_unused=True, create_graph=twice
            )
            first = bits_of(gradients)
            roots = [g.clone() for g in gradients if g is not None and g.requires_grad]
            del gradients
            if roots:
                before_backward()
                again = [torch.randn_like(root) for root in roots]
                second = bits_of(torch.autograd.grad(roots, [*leaves, *directions], again, allow_unused=True))
    except Exception as error:  # noqa: BLE001 - whatever it is, it has to be the same everywhere
        # Torch holds the graph being differentiated until the thread's next backward.
        outcome = Outcome(error=f"{type(error).__name__}: {error}")
    else:
        return Outcome("", outputs, first, second)
    torch.ones(1, requires_grad=True).mul(2).backward()
    return outcome


def _seed() -> None:
    """Call `torch.manual_seed` without the stack trace that it formats for each absent kind of device."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(0)


def _forward(op: Any, sample: Any, leaves: list[Tensor]) -> tuple[list[Tensor], tuple[Bits | None, ...]]:
    """Return the tensors from which backward starts, and the outputs as bits. No input or output is held afterwards."""
    args, kwargs = tree_map(
        lambda x: _activation(x, leaves) if isinstance(x, Tensor) else x, ((sample.input, *sample.args), sample.kwargs)
    )
    out = op.gradcheck_wrapper(op.get_op(), *args, **kwargs)
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    return [t.clone() for t in outputs if t.requires_grad], bits_of(outputs)  # a clone's node saves nothing


def _activation(t: Tensor, leaves: list[Tensor]) -> Tensor:
    """Return a copy of `t`, its storage and layout, as an operator's result; of a new leaf if `t` requires a gradient."""
    if t.layout is not torch.strided:  # stays on the device in any case
        leaf = t.detach().clone()
        if t.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf
    plain = t.detach().conj() if t.is_conj() else t.detach()
    leaf = plain.clone()
    items = plain.untyped_storage().nbytes() // plain.element_size()
    whole = leaf.stride() == plain.stride() and items == plain.numel()
    if not whole:
        leaf = plain.as_strided((items,), (1,), 0).clone()
    if t.requires_grad:
        leaves.append(leaf.requires_grad_())
    made = leaf.clone()
    if not whole:
        made = made.as_strided(plain.shape, plain.stride(), plain.storage_offset())
    return made.conj() if t.is_conj() else made
