"""Operators whose gradient torch computes by another formula while any dispatch mode is on, one that rounds otherwise.

    if has_other_formula(call): ...        # the mode has to be gone before that backward begins

Autograd then does without writes in place and without shapes that hang on data (`isTensorSubclassLike` in torch's
FunctionsManual.cpp). `tests/test_op_db.py` finds them: all of torch's operator samples, under a mode that does nothing.
"""

from __future__ import annotations

from torch import Tensor

from chameleon_mm.device.op_call import OpCall

_OF_ANY_INPUT = frozenset({"prod", "cumprod", "ormqr", "linalg_matrix_exp", "linalg_eig", "_linalg_eigh"})
"""Operators whose gradient with respect to anything is another; of the last three the gradient's own gradient."""

_OF_ONE_INPUT = {"masked_fill": 2}
"""Index of the only argument whose gradient is another, by operator."""


def has_other_formula(call: OpCall) -> bool:
    """Whether a gradient of the call's is computed otherwise under a dispatch mode."""
    name = call.facts.name.removesuffix("_")
    if name in _OF_ANY_INPUT:
        return any(t.requires_grad for t in call.inputs.values())
    if name in _OF_ONE_INPUT:
        argument = _OF_ONE_INPUT[name]
        value = call.args[argument] if argument < len(call.args) else call.kwargs.get("value")
        return isinstance(value, Tensor) and value.requires_grad
    return False
