"""Compares two runs bit for bit, and finds where they part if they are not the same.

step by step: loss, gradient norm      # the earliest difference is the one that explains the rest
then: final weights by name, random state
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from chameleon_mm.demo.program import Numbers


def first_difference(reference: Numbers, other: Numbers) -> str | None:
    """One line that names the first value in which `other` differs from `reference` by a bit; None if none does.

    Bits are compared, not numbers: two NaNs of the same bits are equal, 0.0 and -0.0 are not.
    """
    return next(_differences(reference, other), None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two CPU tensors have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _differences(reference: Numbers, other: Numbers) -> Iterator[str]:
    if len(reference.losses) != len(other.losses):
        yield f"number of steps: {len(reference.losses)} against {len(other.losses)}"
    norms = zip(reference.grad_norms, other.grad_norms, strict=False)
    for step, (kind, *losses) in enumerate(zip(reference.kinds, reference.losses, other.losses, strict=False), start=1):
        # Only a training step has a gradient; a run that ended early may lack its last one.
        pairs = {"loss": losses, "gradient norm": next(norms, ()) if kind.training else ()}
        for what, pair in pairs.items():
            if pair and not same_bits(*pair):
                yield f"{what} of step {step}: {_value(pair[0])} against {_value(pair[1])}"
    for name in sorted(reference.weights.keys() | other.weights.keys()):
        a, b = reference.weights.get(name), other.weights.get(name)
        if a is None or b is None:
            yield f"weight {name}: only in the {'second' if a is None else 'first'} run"
        elif not same_bits(a, b):
            yield f"weight {name}: {_where(a, b)}"
    for index, name in enumerate(("CPU", "device")):
        states = reference.random_states[index : index + 1], other.random_states[index : index + 1]
        if len(states[0]) != len(states[1]) or not all(map(same_bits, *states)):
            yield f"random state of the {name}'s generator after the last step"


def _bits(tensor: Tensor) -> Tensor:
    # reshape before view: a 0-dim tensor cannot be viewed in a narrower dtype.
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _value(scalar: Tensor) -> str:
    return f"{scalar.item():.9g} (bits {bytes(_bits(scalar).tolist())[::-1].hex()})"


def _where(a: Tensor, b: Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    differs = (_bits(a).view(-1, a.element_size()) != _bits(b).view(-1, b.element_size())).any(dim=1)
    first = int(differs.nonzero()[0])
    return (
        f"{int(differs.sum())} of {a.numel()} values differ, the first at flat index {first}: "
        f"{_value(a.reshape(-1)[first])} against {_value(b.reshape(-1)[first])}"
    )
