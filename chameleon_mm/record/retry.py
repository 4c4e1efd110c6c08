"""Run an operator again that found no memory: first without a reclaim, then as often as memory can be reclaimed.

    out = retry.run(call)
        run -> OutOfMemoryError -> exit the except block -> reset the generators -> run again
            -> reclaim_some(nbytes, storages of the call)? -> reset the generators -> run again -> ...  -> raise

The block is exited first, because a traceback holds the tensors of its frames. A retry without a reclaim can succeed: the
allocator does not check blocks again that events held when it failed (pytorch#189504), and these may be free by now.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from chameleon_mm.device import Device
from chameleon_mm.device.operators import OpCall
from chameleon_mm.units import parse_size

ReclaimSome = Callable[[int, Sequence[torch.UntypedStorage]], bool]
"""Function that reclaims device memory, if possible at least `nbytes` (0: unknown), but none of the given storages. It returns
True if it reclaimed any; False ends the retries."""

_TRIED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)? (?:[KMGT]iB|B|bytes))")

_ROUNDED_OFF = 1.01
"""Factor for the rounding in the message to three digits: the request may be half a percent larger."""


class RandomState:
    """States of `generators` and of torch's default generators: the host's, and the device's if it has one."""

    __slots__ = ("_device", "_device_state", "_host_state", "_others")

    def __init__(self, device: Device, generators: Iterable[Generator] = ()) -> None:
        self._device = device.torch_device
        self._others = [(generator, generator.get_state()) for generator in generators]
        self._host_state = torch.get_rng_state()
        self._device_state: Tensor | None = None
        if self._device.type != "cpu":
            self._device_state = torch.get_device_module(self._device).get_rng_state(self._device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the states of the default generators, in torch's format: "host" and, if the device has one, "device"."""
        device = {} if self._device_state is None else {"device": self._device_state}
        return {"host": self._host_state, **device}

    def restore(self) -> None:
        torch.set_rng_state(self._host_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, self._device)
        for generator, state in self._others:
            generator.set_state(state)


class OomRetry:
    """Runs operators on `device`, and runs them again if they found no memory and may run twice.

    An operator runs only once if it writes its arguments (by schema or by name), if it is a collective, or in a graph's
    capture. With several ranks, only torch's own operators may run twice: others may be unknown collectives. Otherwise the
    error propagates. Random operators draw the same numbers again. Thread-safe if `reclaim_some` is.
    """

    def __init__(self, device: Device, reclaim_some: ReclaimSome) -> None:
        self.retries = 0
        self._device = device
        self._reclaim_some = reclaim_some

    def run(self, call: OpCall) -> Any:
        """Run `call.run()`. Raises `torch.OutOfMemoryError` if no more can be reclaimed, or the operator must not run twice."""
        facts = call.facts
        if not (facts.repeatable and (facts.is_torchs_own or is_alone())) or self._device.capturing():
            return call.run()
        given = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Generator))
        drawn = RandomState(self._device, given) if facts.random else None
        failure = self._attempt(call)
        try:
            while failure is not None:
                self.retries += 1
                if drawn is not None:
                    drawn.restore()
                failure = self._attempt(call)
                if failure is not None:
                    storages = [t.untyped_storage() for t in call.inputs.values()]
                    if not self._reclaim_some(tried_bytes(failure), storages):
                        raise failure
            return call.out
        finally:
            del failure  # once raised, it holds this frame and the call's tensors: avoid a reference cycle

    @staticmethod
    def _attempt(call: OpCall) -> torch.OutOfMemoryError | None:
        """Run the call. Returns None, or the failure without frames, which would hold tensors."""
        try:
            call.run()
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)
            failure.__context__ = None
            return failure
        return None


def is_alone() -> bool:
    """True unless there are several ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def tried_bytes(failure: torch.OutOfMemoryError) -> int:
    """Return the requested bytes from the message, rounded up; 0 if the message lacks them."""
    match = _TRIED.search(str(failure))
    if match is None:
        return 0
    number, unit = match[1].split()
    return ceil(float(number) * (1 if unit in ("B", "bytes") else parse_size(f"1{unit}")) * _ROUNDED_OFF)
