"""Eager's error for a saved tensor that was written to, in the words of the torch that is running.

    origin = Origin(t)                                      # at save: which output of which op it is
    raise RuntimeError(inplace_message((t.type(), t.shape), origin, version, expected))      # at use

Eager names the op by what the tensor is when it is used, unless the op saved its own result; and the words of its hint and
the spelling of an op's name differ between torch versions, so they are read from an error that torch is made to raise. Of a
tensor that nobody holds any more, the op is named that it came from when it was saved.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor


class Origin:
    """Which output of which op a saved tensor is. Holds neither the tensor nor the node: that would close a cycle."""

    __slots__ = ("_name", "_node_number", "_output_nr", "_ref")

    def __init__(self, t: Tensor) -> None:
        self._ref = weakref.ref(t)
        node = t.grad_fn
        self._name = "" if node is None else node.name()
        self._node_number = -1 if node is None else node._sequence_nr()
        self._output_nr = t.output_nr

    def words(self, *, short_names: bool) -> str:
        name, output_nr = self._name, self._output_nr
        # None outside of a backward, whatever its stub says.
        number_of_user = getattr(torch._C._current_autograd_node(), "_sequence_nr", None)
        own_result = number_of_user is not None and number_of_user() == self._node_number
        t = self._ref()
        if t is not None and not own_result:
            node = t.grad_fn
            name, output_nr = ("" if node is None else node.name()), t.output_nr
        if not name:
            return ""
        stem, backward, number = name.rpartition("Backward")
        spelled = stem if short_names and backward and number.isdecimal() else name
        return f", which is output {output_nr} of {spelled},"


def inplace_message(what: tuple[str, torch.Size], origin: Origin, version: int, expected: int) -> str:
    """The whole message for a tensor of this (type, shape), found at `version` where `expected` was saved."""
    eager = _eagers_own()
    hint = eager[eager.index(" Hint:") :] if " Hint:" in eager else ""
    return (
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what[0]} {list(what[1])}]{origin.words(short_names='ExpBackward' not in eager)} is at version {version}; "
        f"expected version {expected} instead.{hint}"
    )


def _eagers_own() -> str:
    """torch's own message for a write over exp's saved result. Raised on a thread of its own: hooks and modes are per
    thread."""
    said: list[str] = []

    def provoke() -> None:
        with torch.enable_grad():
            out = torch.ones(1, requires_grad=True).exp()
            out.add_(1)
            try:
                out.backward()
            except RuntimeError as error:
                said.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    return said[0] if said else ""
