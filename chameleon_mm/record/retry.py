"""Runs an operator again that found no memory: plainly, then as often as something can be reclaimed for it.

    out = retry.run(call)
        run -> OutOfMemoryError -> out of the except block -> generators as they were -> run again
            -> reclaim_some(nbytes, storages of the call)? -> generators as they were -> run again -> ...  -> raise

Out of the block first, because an exception's traceback holds the tensors of the frames it passed. A plain retry can succeed:
the allocator does not look again at what events held when it failed (pytorch#189504), and by then that is its own again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from chameleon_mm.device import Device
from chameleon_mm.device.operators import OpCall
from chameleon_mm.units import parse_size

ReclaimSome = Callable[[int, Sequence[torch.UntypedStorage]], bool]
"""Reclaims device memory, `nbytes` of it or more where it can (0: not known how much), from none of the storages given. Returns
whether it reclaimed anything: False ends the retries."""

_TRIED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)? (?:[KMGT]iB|B|bytes))")

_ROUNDED_OFF = 1.01
"""Factor for the rounding of the message, which gives three digits: what was asked for may be half a percent more."""


class RandomState:
    """The states of torch's default generators, the host's and the device's where it has its own, and of `generators`."""

    __slots__ = ("_device", "_device_state", "_host_state", "_others")

    def __init__(self, device: Device, generators: Iterable[Generator] = ()) -> None:
        self._device = device.torch_device
        self._others = [(generator, generator.get_state()) for generator in generators]
        self._host_state = torch.get_rng_state()
        self._device_state: Tensor | None = None
        if self._device.type != "cpu":
            self._device_state = torch.get_device_module(self._device).get_rng_state(self._device)

    def tensors(self) -> dict[str, Tensor]:
        """The states of the default generators, "host" and, where the device has its own, "device", as torch takes them."""
        device = {} if self._device_state is None else {"device": self._device_state}
        return {"host": self._host_state, **device}

    def restore(self) -> None:
        torch.set_rng_state(self._host_state)
        if self._device_state is not None:
            torch.get_device_module(self._device).set_rng_state(self._device_state, self._device)
        for generator, state in self._others:
            generator.set_state(state)


class OomRetry:
    """Runs operators on `device`; those that may run twice do so when memory was short.

    Never one whose schema or reputation says that it writes what it was given, nor a collective, nor in a graph's capture;
    and among several ranks none but torch's own, as others may be collectives that nobody knows. There the error goes on.
    Random ones draw the same numbers again. Thread-safe if `reclaim_some` is.
    """

    def __init__(self, device: Device, reclaim_some: ReclaimSome) -> None:
        self.retries = 0
        self._device = device
        self._reclaim_some = reclaim_some

    def run(self, call: OpCall) -> Any:
        """Run `call.run()`. Raises `torch.OutOfMemoryError` where nothing more can be reclaimed, or the operator may not run
        twice."""
        facts = call.facts
        if not (facts.repeatable and (facts.is_torchs_own or _is_alone())) or self._device.capturing():
            return call.run()
        drawn = RandomState(self._device, _generators(call)) if facts.random else None
        failure = self._attempt(call)
        if failure is None:
            return call.out
        try:
            while True:
                self.retries += 1
                if drawn is not None:
                    drawn.restore()
                failure = self._attempt(call)
                if failure is None:
                    return call.out
                storages = [t.untyped_storage() for t in call.inputs.values()]
                if not self._reclaim_some(tried_bytes(failure), storages):
                    raise failure
        finally:
            del failure  # raised, it holds this frame, and so the call's tensors: not to be held by it in turn

    @staticmethod
    def _attempt(call: OpCall) -> torch.OutOfMemoryError | None:
        """Run the call. Returns the failure, which holds no frame, so no tensor."""
        try:
            call.run()
        except torch.OutOfMemoryError as error:
            failure = error.with_traceback(None)
            failure.__context__ = None
            return failure
        return None


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _generators(call: OpCall) -> Iterator[torch.Generator]:
    return (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Generator))


def tried_bytes(failure: torch.OutOfMemoryError) -> int:
    """Bytes that were asked for, by the message, rounded up; 0 where it does not say."""
    match = _TRIED.search(str(failure))
    return 0 if match is None else ceil(_bytes_of(match[1]) * _ROUNDED_OFF)


def _bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * (1 if unit in ("B", "bytes") else parse_size(f"1{unit}"))
