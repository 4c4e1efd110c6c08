"""The queue of storages that the caching allocator may reclaim (`device/reclaim.cpp`): by itself, over a driver that the
test plays, and under torch's own allocator on CUDA, by random programs.

No block may be handed out before the copy that reads it is done: on the stand-in the copy would bring the next owner's bytes,
and the runtime names the two accesses.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator, Sequence
from random import Random
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from chameleon_mm.device.cuda import CudaDevice
from chameleon_mm.device.holders import REFERENCES_AT_REST
from chameleon_mm.units import KIB, MIB, allocated_size
from tests._native import BUILDS, helper
from tests.cuda_stand_in import control

pytestmark = pytest.mark.usefixtures("no_gc")

HOST = -1
"""Index of the device that CPU memory has."""

STREAM, OTHER = 7, 8
NOT_READY = 600
EVERYTHING = 1 << 40


class Driver:
    """Driver whose events are numbers. It logs its calls."""

    def __init__(self, module: ModuleType) -> None:
        self.complete: set[int] = set()
        self.waits: list[tuple[int, int]] = []
        self.capturing = 0
        self.refuses = False
        pointer, status = ctypes.c_void_p, ctypes.c_int
        self._functions = [
            ctypes.CFUNCTYPE(status, pointer)(lambda event: 0 if event in self.complete else NOT_READY),
            ctypes.CFUNCTYPE(status, pointer, pointer, ctypes.c_uint)(self._wait),
            ctypes.CFUNCTYPE(status, pointer, ctypes.POINTER(status))(self._is_capturing),
            ctypes.CFUNCTYPE(status, ctypes.POINTER(status))(lambda mode: 0),
            ctypes.CFUNCTYPE(status, pointer, pointer)(lambda free, total: 0),
            ctypes.CFUNCTYPE(status)(lambda: 0),
        ]
        module.use_driver(*(ctypes.cast(function, pointer).value for function in self._functions))

    def _wait(self, stream: int, event: int, flags: int) -> int:
        if self.refuses:
            return 1
        self.waits.append((stream, event))
        return 0

    def _is_capturing(self, stream: int, status: Any) -> int:
        status[0] = self.capturing
        return 0


class Queue:
    """The helper's queue of CPU memory, over a driver of the test's."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.driver = Driver(module)
        self.hook = module.Hook(HOST)
        self.kept: list[tuple[Tensor, torch.UntypedStorage]] = []

    def hold(self, event: int, *, nbytes: int = KIB, stream: int = STREAM) -> Any:
        t = torch.zeros(nbytes, dtype=torch.uint8)
        return self.hold_storage(t, event, stream)

    def hold_storage(self, t: Tensor, event: int = 1, stream: int = STREAM) -> Any:
        """Hold the storage of `t` as the session does: with an alias of it, and the storage's object."""
        self.kept.append((t.detach(), t.untyped_storage()))
        return self.hook.hold(t.untyped_storage(), None, event, stream, stream, 1, REFERENCES_AT_REST)

    def reclaim(self, *, reserved: int = 0, free: int = EVERYTHING) -> int:
        return int(self.module.reclaim(HOST, STREAM, reserved, free))


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    module = helper("reclaim", monkeypatch)
    if torch.version.cuda is not None:
        pytest.skip("the driver is CUDA's own here")
    queue = Queue(module)
    yield queue
    assert module.held() == 0


# --- the queue by itself


@pytest.mark.ci
def test_what_is_copied_goes_without_a_wait_and_the_rest_stays(queue: Queue) -> None:
    held = [queue.hold(event) for event in (1, 2, 3)]
    queue.hook.set_limits(EVERYTHING, 0, False)
    queue.driver.complete = {1, 3}
    # Copies end in the order in which they are held: the third is not asked for.
    assert (queue.reclaim(), queue.driver.waits) == (KIB, [])
    assert [one.reclaimed for one in held] == [True, False, False]
    assert (queue.hook.reclaimed, queue.hook.waits) == (1, 0)
    assert [one.withdraw() for one in held] == [False, True, True]
    assert [storage.nbytes() for _, storage in queue.kept] == [0, KIB, KIB]
    assert queue.reclaim() == 0


@pytest.mark.parametrize(
    ("reserved", "free", "limit", "growth", "gone"),
    [
        (0, EVERYTHING, 10 * KIB, 10 * KIB, 0),  # it fits
        (KIB, EVERYTHING, 10 * KIB, 10 * KIB, 1),  # the limit is passed by 1 KiB
        (1, EVERYTHING, 10 * KIB, 10 * KIB, 1),
        (KIB + 1, EVERYTHING, 10 * KIB, 10 * KIB, 2),
        (20 * KIB, EVERYTHING, 10 * KIB, KIB, 1),  # it was passed before: no more than the growth
        (0, 3 * KIB, 10 * KIB, 5 * KIB, 2),  # the device has less than the limit
        (0, 0, 10 * KIB, 10 * KIB, 4),  # all that there is
    ],
)
def test_what_is_not_copied_goes_oldest_first_behind_a_wait_as_far_as_memory_is_short(
    queue: Queue, reserved: int, free: int, limit: int, growth: int, gone: int
) -> None:
    held = [queue.hold(event) for event in (1, 2, 3, 4)]
    queue.hook.set_limits(limit, growth, False)
    assert queue.reclaim(reserved=reserved, free=free) == gone * KIB
    assert queue.driver.waits == [(STREAM, event) for event in (1, 2, 3, 4)[:gone]]
    assert [one.reclaimed for one in held] == [i < gone for i in range(4)]
    for one in held:
        one.withdraw()


def test_what_somebody_else_holds_stays(queue: Queue) -> None:
    t, other = torch.ones(KIB, dtype=torch.uint8), torch.ones(KIB, dtype=torch.uint8)
    storage = other.untyped_storage()
    by_tensor, by_object = queue.hold_storage(t), queue.hold_storage(other)
    queue.driver.complete = {1}
    assert queue.reclaim() == 0
    del other
    assert queue.reclaim() == 0
    del storage
    assert (queue.reclaim(), by_object.reclaimed) == (KIB, True)
    view = t[5:]
    del t
    assert queue.reclaim() == 0
    assert int(view.sum()) == KIB - 5
    del view
    assert (queue.reclaim(), by_tensor.withdraw(), by_object.withdraw()) == (KIB, False, False)


def test_memory_of_another_stream_or_another_allocator_stays(queue: Queue) -> None:
    other = queue.hold(1, stream=OTHER)
    queue.driver.complete = {1}
    assert queue.reclaim() == 0
    assert other.withdraw()
    assert queue.hold_storage(torch.frombuffer(bytearray(KIB), dtype=torch.uint8)) is None


def test_nothing_goes_during_a_capture_or_behind_a_wait_that_is_refused(queue: Queue) -> None:
    held = queue.hold(1)
    queue.hook.set_limits(0, KIB, False)
    queue.driver.capturing = 1
    assert queue.reclaim() == 0
    queue.driver.capturing, queue.driver.refuses = 0, True
    assert (queue.reclaim(), queue.driver.waits) == (0, [])
    assert held.withdraw()


def test_where_a_free_may_need_the_gil_only_a_thread_that_has_it_reclaims(queue: Queue) -> None:
    held = queue.hold(1)
    queue.driver.complete = {1}
    queue.hook.set_limits(EVERYTHING, 0, True)
    assert queue.reclaim() == 0  # asks without the GIL
    queue.hook.set_limits(EVERYTHING, 0, False)
    assert (queue.reclaim(), held.withdraw()) == (KIB, False)


def test_a_withdrawn_storage_has_the_same_bytes(queue: Queue) -> None:
    t = torch.arange(KIB, dtype=torch.uint8)
    at = t.data_ptr()
    held = queue.hold_storage(t)
    assert held.withdraw()
    assert t.data_ptr() == at
    assert torch.equal(t, torch.arange(KIB, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="withdraw: expected a storage that is held, got one that was withdrawn"):
        held.withdraw()


def test_what_is_dropped_without_being_withdrawn_leaves_the_queue(queue: Queue) -> None:
    held = queue.hold(1)
    assert queue.module.held() == 1
    del held
    assert queue.module.held() == 0


def test_wrong_arguments_are_refused(queue: Queue) -> None:
    with pytest.raises(TypeError, match=r"hold: expected a torch\.UntypedStorage"):
        queue.hook.hold(torch.zeros(1), None, 1, STREAM, STREAM, 1, 1)
    with pytest.raises(ValueError, match="Hook: expected a device's index, got 1000"):
        queue.module.Hook(1000)


# --- under the caching allocator

SIZES = (200 * KIB, 600 * KIB, 1000 * KIB)
"""Two or three lie in a segment of the allocator, so that it often finds no block."""

STEPS = 24


class Lent(NamedTuple):
    """Lent storage, and the expected content of its host copy."""

    held: Any
    alias: Tensor
    storage: torch.UntypedStorage
    host: Tensor
    value: int
    address: int
    nbytes: int


class Program:
    """Random allocations, frees and loans on one device, compared with a model of the allocated blocks."""

    def __init__(self, module: ModuleType, device: CudaDevice, hosts: Sequence[Tensor], zeros: Tensor, seed: int) -> None:
        self.random = Random(seed)
        self.hook = module.Hook(device.index)
        self.d2h = torch.cuda.Stream()
        self.live: list[tuple[Tensor, int]] = []
        self.lent: list[Lent] = []
        self.zeros = zeros
        self.before = torch.cuda.memory_allocated()
        self.hosts = hosts
        self.num_hosts = 0

    def run(self, steps: int) -> None:
        self.hook.set_limits(*self.random.choice([(0, 1 << 30), (1 << 30, 0), (6 * MIB, 512 * KIB)]), False)
        for _ in range(steps):
            do = self.random.choice([*[self.allocate] * 3, *[self.lend] * 3, self.free, self.withdraw])
            do()
            self.check_bytes()
        while self.lent:
            self.withdraw()
        self.live.clear()
        self.check_bytes()

    def allocate(self) -> None:
        value = self.random.randrange(1, 255)
        nbytes = self.random.choice(SIZES) + self.random.randrange(64)
        t = self.zeros[:nbytes] + value  # an operator's result: only an in-place write may overtake a copy
        self.live.append((t, value))

    def free(self) -> None:
        if self.live:
            self.live.pop(self.random.randrange(len(self.live)))

    def lend(self) -> None:
        if not self.live or self.num_hosts == len(self.hosts):
            return
        t, value = self.live[-1] if self.random.random() < 0.2 else self.live.pop(self.random.randrange(len(self.live)))
        host = self.hosts[self.num_hosts][: t.numel()]
        self.num_hosts += 1
        compute = torch.cuda.current_stream()
        self.d2h.wait_stream(compute)
        with torch.cuda.stream(self.d2h):
            host.copy_(t, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.d2h)
        held = self.hook.hold(
            t.untyped_storage(), done, done.cuda_event, compute.cuda_stream, compute.stream_id, 1, REFERENCES_AT_REST
        )
        self.lent.append(Lent(held, t.detach(), t.untyped_storage(), host, value, t.data_ptr(), t.numel()))

    def withdraw(self) -> None:
        if not self.lent:
            return
        lent = self.lent.pop(self.random.randrange(len(self.lent)))
        is_there = lent.held.withdraw()
        self.d2h.synchronize()
        assert int(lent.host.min()) == int(lent.host.max()) == lent.value
        assert lent.storage.nbytes() == (lent.nbytes if is_there else 0)
        if is_there:
            assert int(lent.alias.min()) == int(lent.alias.max()) == lent.value

    def check_bytes(self) -> None:
        """Compare the allocated bytes with the model: live tensors, and loans not reclaimed."""
        sizes = {t.data_ptr(): t.numel() for t, _ in self.live}
        sizes |= {lent.address: lent.nbytes for lent in self.lent if not lent.held.reclaimed}
        assert torch.cuda.memory_allocated() - self.before == sum(map(allocated_size, sizes.values()))


def is_late() -> bool:
    """True if copies run on the stand-in only when something forces them."""
    return control.is_loaded() and control.mode() == "late"


def run_programs(module: ModuleType, seeds: range) -> tuple[int, int]:
    """Run random programs. Return the numbers of storages that the allocator reclaimed, in all and after a wait."""
    device, reclaimed, waits = CudaDevice(), 0, 0
    hosts = torch.empty(STEPS * MIB, dtype=torch.uint8, pin_memory=True).split(MIB)
    zeros = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    for seed in seeds:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # so that the allocator finds nothing, and asks
        program = Program(module, device, hosts, zeros, seed)
        program.run(STEPS)
        reclaimed, waits = reclaimed + program.hook.reclaimed, waits + program.hook.waits
    return reclaimed, waits


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 10_000), marks=[pytest.mark.thorough, pytest.mark.slow])]
)
@pytest.mark.timeout(3000)
def test_random_programs_never_get_a_block_before_its_copy_is_done(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    reclaimed, waits = run_programs(helper("reclaim", monkeypatch), seeds)
    assert reclaimed > len(seeds)
    assert waits > len(seeds) // 20 or not is_late()


@pytest.mark.gpu
@pytest.mark.skipif(not control.is_loaded(), reason="on a GPU the copies may happen to be done in time")
def test_without_the_wait_in_malloc_the_programs_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = helper("reclaim", monkeypatch)
    runtime = ctypes.CDLL("libcudart.so.13")
    names = (
        "EventQuery",
        "StreamWaitEvent",
        "StreamIsCapturing",
        "ThreadExchangeStreamCaptureMode",
        "MemGetInfo",
        "GetLastError",
    )
    calls = [ctypes.cast(getattr(runtime, f"cuda{name}"), ctypes.c_void_p).value for name in names]
    no_wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)(lambda stream, event, flags: 0)
    module.use_driver(calls[0], ctypes.cast(no_wait, ctypes.c_void_p).value, *calls[2:])
    wrong_numbers = False
    try:
        run_programs(module, range(20))
    except AssertionError:
        wrong_numbers = True
    finally:
        module.use_driver(*calls)
        torch.cuda.synchronize()
    assert any("unordered access" in one for one in control.violations()) or wrong_numbers


THREADS = """
import sys, threading, time
import torch
from chameleon_mm.device import native
from chameleon_mm.device.holders import REFERENCES_AT_REST
from pathlib import Path
native.CACHE = Path(sys.argv[1])
module = native.load("reclaim")
if sys.argv[2] == "history":
    torch.cuda.memory._record_memory_history()
hook, d2h, compute = module.Hook(0), torch.cuda.Stream(), torch.cuda.current_stream()
hook.set_limits(0, 1 << 40, sys.argv[2] == "history")
stop = time.monotonic() + 3
switches = sys.setswitchinterval(1e-5)

def allocate():
    while time.monotonic() < stop:
        torch.empty(900_000, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()

def lend():
    held = []
    while time.monotonic() < stop:
        t = torch.empty(600_000, dtype=torch.uint8, device="cuda")
        done = torch.cuda.Event()
        done.record(d2h)
        storage = t.untyped_storage()
        lent = hook.hold(storage, done, done.cuda_event, compute.cuda_stream, compute.stream_id, 1, REFERENCES_AT_REST)
        held.append((lent, storage, t))
        del t, storage, lent
        if len(held) > 4:
            held.pop(0)[0].withdraw()
            del held[0]

threads = [threading.Thread(target=work) for work in (allocate, allocate, lend, lend)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
t = torch.empty(600_000, dtype=torch.uint8, device="cuda")
done = torch.cuda.Event()
done.record(d2h)
storage = t.untyped_storage()
left = hook.hold(storage, done, done.cuda_event, compute.cuda_stream, compute.stream_id, 1, REFERENCES_AT_REST)
print(hook.reclaimed > 0)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("history", ["history", "no history"])
def test_threads_that_allocate_lend_and_end_do_not_wait_for_each_other_for_ever(
    history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads miss in the pools all the time, two lend and withdraw; then the interpreter ends with one storage lent."""
    helper("reclaim", monkeypatch)
    command = [sys.executable, "-c", THREADS, str(BUILDS), history]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True" if history == "no history" else done.stdout.strip()), (
        done.stderr
    )
