"""CUDA graphs: what an operator does in a capture runs at each replay, and not before.

    record      the operator runs once on copies of the memory that it touches, so that its results have sizes and the operators
                after it meet sensible numbers; then a call joins the graph that runs it on the memory itself
    copy_       a copy that the runtime records, made on the copies as well
    Launches    seed and offset of the random numbers, taken when a replay is launched, used when it runs

The memory of results comes from the graph's private pool, so its addresses stay.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in import library
from tests.cuda_stand_in.memory import HostView, in_place, report
from tests.cuda_stand_in.random_state import PER_OPERATOR, Draws, generator_at


class Launches:
    """Source of a captured operator's random numbers: each launch of its graph appends seed and offset."""

    def __init__(self, draws: Draws) -> None:
        self.given = draws.given
        self.device = draws.device
        self.waiting: deque[tuple[int, int]] = deque()

    def launched(self) -> None:
        source = Draws(self.device, self.given).source()
        offset = source.get_offset()
        source.set_offset(offset + PER_OPERATOR)
        self.waiting.append((source.initial_seed(), offset))

    def generator(self) -> torch.Generator:
        return generator_at(*self.waiting.popleft())


class CapturedDraws:
    """Random numbers of the run during the capture, whose results no program sees. Records that some were drawn."""

    def __init__(self) -> None:
        self.asked = False

    def generator(self) -> torch.Generator:
        self.asked = True
        return generator_at(0, 0)


class Capture:
    """Capture in progress: copies of the memory that its operators touch, and the source of random numbers."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, int], torch.UntypedStorage] = {}
        self.launches: list[Launches] = []

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        key = storage.data_ptr(), storage.nbytes()
        found = self.copies.get(key)
        if found is None:
            found = self.copies[key] = torch.UntypedStorage(storage.nbytes())
            found.copy_(in_place(storage))
        return found

    def view(self) -> HostView:
        return HostView(self.copy_of)


_captures: dict[int, Capture] = {}
_calls: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


def active(tensor: Tensor) -> bool:
    """True if the tensor's device is being captured on this thread's current stream."""
    return bool(library.capturing(torch._C._cuda_getCurrentRawStream(tensor.device.index)))


def current(stream: int) -> Capture:
    return _captures.setdefault(library.capture_id(stream), Capture())


def record(kernel: Any, device: torch.device, stream: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Runs the kernel on copies, and adds it to the graph."""
    capture = current(stream)
    kernel.report(stream, args, kwargs)
    low_args, low_kwargs = kernel.lowered(args, kwargs, capture.view())
    captured_draws = CapturedDraws()
    out = kernel.run(low_args, low_kwargs, captured_draws)
    kernel.written_back(args, kwargs, low_args, low_kwargs, capture.view())
    made: list[Tensor] = []

    def raised(result: Tensor) -> Tensor:
        tensor = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
        capture.view().of(tensor).copy_(result)
        made.append(tensor)
        return tensor

    final = kernel.results(out, args, kwargs, raised)
    for tensor in made:
        report(stream, tensor, library.WRITE, kernel.what)
    launches = Launches(Draws(device, kwargs.get("generator")))
    if captured_draws.asked:
        capture.launches.append(launches)

    memory = HostView()
    real_args, real_kwargs = kernel.lowered(_fixed(args), {name: _fixed(a) for name, a in kwargs.items()}, memory)
    into = [memory.of(tensor) for tensor in made]

    def run() -> None:
        results: list[Tensor] = []
        kernel.results(kernel.run(real_args, real_kwargs, launches), real_args, real_kwargs, _kept_in(results))
        for destination, result in zip(into, results, strict=True):
            destination.copy_(result)

    number = next(_numbers)
    _calls[number] = run
    library.capture_call(stream, _RUN, _DROP, number, kernel.what)
    return final


def _kept_in(results: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(result: Tensor) -> Tensor:
        results.append(result)
        return result

    return keep


def _fixed(x: Any) -> Any:
    """Copy an argument's present value: a graph keeps a CPU scalar's value, not the tensor."""
    if isinstance(x, Tensor):
        return x if x.is_cuda else x.clone()
    return type(x)([_fixed(y) for y in x]) if isinstance(x, (list, tuple)) else x


def copy_(dst: Tensor, src: Tensor, non_blocking: bool, by_torch: Callable[[Tensor, Tensor, bool], Tensor]) -> Tensor:
    """Record a copy that the runtime adds to the graph. The copies of the memory follow, on the host's side, too."""
    capture = current(torch._C._cuda_getCurrentRawStream((dst if dst.is_cuda else src).device.index))
    by_torch(dst, src, non_blocking)
    low = [t if t.is_cuda else None for t in (dst, src)]
    to, source = (
        capture.view().of(t) if high is not None else _host_copy(capture, t) for high, t in zip(low, (dst, src), strict=True)
    )
    to.copy_(source)
    return dst


def _host_copy(capture: Capture, tensor: Tensor) -> Tensor:
    storage = capture.copy_of(tensor.untyped_storage())
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _run(number: int) -> None:
    # The replay runs on the thread that forces it, without that thread's modes and autograd.
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        _calls[number]()


def _drop(number: int) -> None:
    _calls.pop(number, None)


_RUN, _DROP = library.CALL(_run), library.CALL(_drop)
"""Callbacks of the runtime. They live as long as the process: a graph may outlive everything else."""


def install() -> None:
    """Lets torch's graphs say when a capture ends and a replay is launched."""
    from torch.cuda.graphs import CUDAGraph

    end, replay = CUDAGraph.capture_end, CUDAGraph.replay

    def capture_end(self: Any) -> None:
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        capture = _captures.pop(library.capture_id(stream), None) if library.capturing(stream) else None
        self._stand_in_launches = [] if capture is None else capture.launches
        end(self)

    def replay_(self: Any) -> None:
        for launches in self._stand_in_launches:
            launches.launched()
        replay(self)

    CUDAGraph.capture_end, CUDAGraph.replay = capture_end, replay_  # type: ignore[method-assign]  # that is what it does
