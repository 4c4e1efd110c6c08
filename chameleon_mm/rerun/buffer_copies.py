"""Snapshot of a model's buffers when a step begins: what they hold, and which tensors they are.

snapshot = BufferCopies(model)   # once
snapshot.take()                     # before every step
snapshot.restore()
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chameleon_mm.rerun.dense import dense_bytes


class BufferCopies:
    """Copies of a model's buffers, on the buffers' own device.

    All are copied for every step: batch norm writes its running statistics without moving their version counters, so nothing
    tells which have changed. They are small; in one call they cost little.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        """Tables of buffers, one of each module: as it is, and as it was."""
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """Buffers by id: each with its copy."""

    def take(self) -> None:
        """Copy what the buffers hold now. Raises `torch.OutOfMemoryError`."""
        self._tables = [(module._buffers, dict(module._buffers)) for module in self._model.modules()]
        buffers = {id(b): b for _, table in self._tables for b in table.values() if b is not None}
        known, self._copies = self._copies, {}
        again: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for key, buffer in buffers.items():
                pair = known.get(key)
                # Resized or made another kind in place: `clone` takes it as it is.
                if pair is not None and pair[0] is buffer and _same_kind(pair[1], buffer):
                    again.append(pair)
                else:
                    pair = buffer, buffer.detach().clone()
                self._copies[key] = pair
            if again:
                torch._foreach_copy_([copy for _, copy in again], [buffer for buffer, _ in again])

    def restore(self) -> None:
        """Put back which tensors the buffers were, and what they held."""
        for table, as_it_was in self._tables:
            table.clear()
            table.update(as_it_was)
        with torch.no_grad():
            for buffer, copy in self._copies.values():
                self._put_back(buffer, copy)

    @staticmethod
    def _put_back(buffer: Tensor, copy: Tensor) -> None:
        into, of = dense_bytes(buffer), dense_bytes(copy)
        if not _same_kind(copy, buffer):
            buffer.data = copy.clone()  # resized, or converted
        elif into is not None and of is not None:
            into.copy_(of)  # past its version counter: a graph from before the step may have saved it
        elif 0 not in buffer.stride():  # one that repeats its elements can be written by nobody
            buffer.copy_(copy)


def _same_kind(copy: Tensor, buffer: Tensor) -> bool:
    return (
        type(copy) is type(buffer)
        and copy.layout is torch.strided is buffer.layout
        and (copy.shape, copy.dtype, copy.device) == (buffer.shape, buffer.dtype, buffer.device)
        and (copy.stride() == buffer.stride() or dense_bytes(buffer) is None)
    )
