"""The CUDA runtime's C interface by ctypes, and small wrong and right programs on it, for the tests of the stand-in's runtime.

cuda = Runtime()                            # the library that torch has loaded, or one by path
a, b = cuda.stream(), cuda.stream()
cuda.copy(device, host, 64, a)              # wrong: nothing orders the two
cuda.copy(other, device, 64, b)
cuda.violations()                           # ["unordered access: the read by ..."]
"""

from __future__ import annotations

import ctypes
import random
from ctypes import byref, c_int, c_longlong, c_size_t, c_void_p
from typing import Self

NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Runtime:
    """Calls of libcudart.so.13, each of which raises on an error unless it is asked for the error."""

    def __init__(self, path: str = "libcudart.so.13") -> None:
        self.library = ctypes.CDLL(path)
        self.library.standin_violations.restype = c_size_t
        self.library.standin_count.restype = ctypes.c_long

    def error(self, name: str, *arguments: object) -> int:
        code = int(getattr(self.library, name)(*arguments))
        self.library.cudaGetLastError()
        return code

    def call(self, name: str, *arguments: object) -> None:
        code = self.error(name, *arguments)
        assert code == 0, f"{name} answers {code}"

    def _made(self, name: str, *arguments: object) -> int:
        made = c_void_p()
        self.call(name, byref(made), *arguments)
        assert made.value
        return made.value

    def malloc(self, nbytes: int) -> int:
        return self._made("cudaMalloc", c_size_t(nbytes))

    def pinned(self, nbytes: int) -> int:
        return self._made("cudaHostAlloc", c_size_t(nbytes), 0)

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self._made("cudaStreamCreateWithFlags", flags)

    def event(self) -> int:
        return self._made("cudaEventCreateWithFlags", 2)  # no timing

    def copy(self, dst: int, src: int, nbytes: int, stream: int | None) -> None:
        self.call("cudaMemcpyAsync", c_void_p(dst), c_void_p(src), c_size_t(nbytes), 4, c_void_p(stream))

    def fill(self, p: int, value: int, nbytes: int, stream: int | None) -> None:
        self.call("cudaMemsetAsync", c_void_p(p), value, c_size_t(nbytes), c_void_p(stream))

    def record(self, event: int, stream: int | None) -> None:
        self.call("cudaEventRecord", c_void_p(event), c_void_p(stream))

    def wait(self, stream: int | None, event: int) -> None:
        self.call("cudaStreamWaitEvent", c_void_p(stream), c_void_p(event), 0)

    def order(self, before: int | None, after: int | None) -> None:
        """Make later work of `after` wait for the work that `before` holds now."""
        event = self.event()
        self.record(event, before)
        self.wait(after, event)

    def synchronize(self, stream: int | None = None) -> None:
        if stream is None:
            self.call("cudaDeviceSynchronize")
        else:
            self.call("cudaStreamSynchronize", c_void_p(stream))

    def access(self, stream: int | None, p: int, nbytes: int, *, writes: bool, what: str = "an operator") -> None:
        self.library.standin_access(c_void_p(stream), c_void_p(p), c_size_t(nbytes), int(writes), what.encode())

    def host_access(self, p: int, nbytes: int, *, writes: bool, what: str = "the test") -> None:
        self.library.standin_host_access(c_void_p(p), c_size_t(nbytes), int(writes), what.encode())

    def count(self, name: str) -> int:
        return int(self.library.standin_count(name.encode()))

    def violations(self) -> list[str]:
        """Lines since they were last asked for."""
        room = 1 << 20
        text = ctypes.create_string_buffer(room)
        length = self.library.standin_violations(text, c_size_t(room))
        assert length < room
        return text.value.decode().splitlines()


class Graph:
    """Capture the work of a stream, and of streams that join it, into a graph: `with Graph(cuda, stream) as graph: ...`."""

    def __init__(self, cuda: Runtime, stream: int, mode: int = GLOBAL) -> None:
        self.cuda, self.stream, self.mode = cuda, stream, mode
        self.end_error = 0
        self.executable = c_void_p()

    def __enter__(self) -> Self:
        self.cuda.call("cudaStreamBeginCapture", c_void_p(self.stream), self.mode)
        return self

    def __exit__(self, *_: object) -> None:
        graph = c_void_p()
        self.end_error = self.cuda.error("cudaStreamEndCapture", c_void_p(self.stream), byref(graph))
        if self.end_error == 0:
            self.cuda.call("cudaGraphInstantiateWithFlags", byref(self.executable), graph, c_longlong(0))
            self.cuda.call("cudaGraphDestroy", graph)

    def launch(self, stream: int) -> None:
        self.cuda.call("cudaGraphLaunch", self.executable, c_void_p(stream))

    def destroy(self) -> None:
        self.cuda.call("cudaGraphExecDestroy", self.executable)


class Oracle:
    """The happens-before order by its definition: for each place, the set of operations that it is ordered after.

    A violation is a pair of conflicting accesses of which the later is not ordered after the earlier; of the earlier ones
    the last write of a byte counts and the reads since.
    """

    def __init__(self, streams: int, events: int, nbytes: int) -> None:
        self.stream: list[set[int]] = [set() for _ in range(streams)]
        self.event: list[set[int]] = [set() for _ in range(events)]
        self.host: set[int] = set()
        self.last_write: list[int | None] = [None] * nbytes
        self.reads: list[set[int]] = [set() for _ in range(nbytes)]
        self.operations = 0

    def access(self, stream: int, begin: int, end: int, *, writes: bool) -> int:
        """The number of earlier accesses that this one conflicts with."""
        before = self.stream[stream] | self.host
        conflicts: set[int] = set()
        for byte in range(begin, end):
            write = self.last_write[byte]
            earlier = ({write} if write is not None else set()) | (self.reads[byte] if writes else set())
            conflicts |= earlier - before
        operation, self.operations = self.operations, self.operations + 1
        self.stream[stream] = before | {operation}
        for byte in range(begin, end):
            if writes:
                self.last_write[byte], self.reads[byte] = operation, set()
            else:
                self.reads[byte] = {read for read in self.reads[byte] if read not in before} | {operation}
        return len(conflicts)


def random_program(cuda: Runtime, seed: int, steps: int = 150, nbytes: int = 48) -> tuple[list[int], list[int], list[str]]:
    """Runs one at random on three streams: (violations after each step, the oracle's count, all their texts)."""
    dice = random.Random(seed)
    streams, events = [cuda.stream() for _ in range(3)], [cuda.event() for _ in range(3)]
    memory, oracle = cuda.malloc(nbytes), Oracle(3, 3, nbytes)
    recorded: set[int] = set()
    found, expected, texts = [], [], []
    for _ in range(steps):
        s, e = dice.randrange(3), dice.randrange(3)
        kind = dice.choices(["access", "record", "wait", "host event", "host stream"], [10, 4, 4, 1, 0.5])[0]
        wanted = 0
        if kind == "access":
            begin = dice.randrange(nbytes)
            end, writes = dice.randrange(begin, nbytes) + 1, dice.random() < 0.4
            cuda.access(streams[s], memory + begin, end - begin, writes=writes)
            wanted = oracle.access(s, begin, end, writes=writes)
        elif kind == "record":
            cuda.record(events[e], streams[s])
            oracle.event[e] = oracle.stream[s] | oracle.host
            recorded.add(e)
        elif kind == "wait" and e in recorded:
            cuda.wait(streams[s], events[e])
            oracle.stream[s] |= oracle.event[e]
        elif kind == "host event" and e in recorded:
            cuda.call("cudaEventSynchronize", c_void_p(events[e]))
            oracle.host |= oracle.event[e]
        elif kind == "host stream":
            cuda.synchronize(streams[s])
            oracle.host |= oracle.stream[s]
        lines = cuda.violations()
        found.append(len(lines))
        expected.append(wanted)
        texts += lines
    cuda.synchronize()
    cuda.call("cudaFree", c_void_p(memory))
    for stream in streams:
        cuda.call("cudaStreamDestroy", c_void_p(stream))
    return found, expected, texts + cuda.violations()


def read_too_soon(cuda: Runtime) -> list[int]:
    """The bytes that a copy reads on a stream that waits neither for the copy nor for the operator that write them."""
    a, b = cuda.stream(), cuda.stream()
    device, host, result = cuda.malloc(1), cuda.pinned(1), cuda.pinned(2)
    cuda.fill(device, 5, 1, a)
    cuda.synchronize()
    ctypes.memset(host, 7, 1)
    cuda.copy(device, host, 1, a)
    cuda.copy(result, device, 1, b)
    cuda.synchronize(b)
    cuda.synchronize()
    ctypes.memset(device, 9, 1)
    cuda.library.standin_stream_wrote(c_void_p(a), c_void_p(device), c_size_t(1))
    cuda.copy(result + 1, device, 1, b)
    cuda.synchronize(b)
    return list(ctypes.string_at(result, 2))


def device_count(cuda: Runtime) -> int:
    count = c_int()
    cuda.call("cudaGetDeviceCount", byref(count))
    return count.value
