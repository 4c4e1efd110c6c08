"""Stand-in's CUDA runtime: wrong programs are named, right ones are not, and both run the same way every time.

Each program runs in the modes late and early, in a process of its own where the mode, the number of devices or the allocator's
settings are read as the library loads. Programs without torch speak to the runtime by ctypes (`_stand_in_calls.py`).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes import byref, c_size_t, c_void_p
from pathlib import Path

import pytest

from tests._programs import on_a_thread
from tests.cuda_stand_in import control

from ._stand_in_calls import GLOBAL, RELAXED, THREAD_LOCAL, Graph, Runtime, random_program
from ._stand_in_programs import PROGRAMS

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not control.is_loaded(), reason="a test of the stand-in's own runtime, which is not loaded here"),
]


@pytest.fixture
def cuda() -> Iterator[Runtime]:
    runtime = Runtime()
    runtime.synchronize()
    runtime.violations()
    yield runtime
    runtime.synchronize()
    runtime.violations()


def in_a_process(expression: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs an expression over the programs' names in a fresh process, which prints its value as JSON."""
    script = f"import json\nfrom tests._stand_in_programs import *\nprint(json.dumps({expression}))"
    everything = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=everything, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=["late", "early", "threads"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[list[str]]]:
    done = in_a_process("run_programs()", CUDA_STAND_IN_MODE=request.param)
    assert done.returncode == 0, done.stderr
    result: dict[str, list[list[str]]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_a_wrong_program_is_named_with_both_sides_and_the_right_one_is_not(
    outcomes: dict[str, list[list[str]]], program: str
) -> None:
    wanted, wrong, right = outcomes[program]
    assert len(wrong) == 1, wrong
    for words in wanted:
        assert words in wrong[0]
    assert right == []


# -------------------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("seed", range(8))
def test_the_detector_agrees_with_the_definition_of_happens_before(cuda: Runtime, seed: int) -> None:
    found, expected, _ = random_program(cuda, seed)
    assert found == expected
    assert any(found) and not all(found)


def path_of_runtime() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.endswith("libcudart.so.13"))


def without_torch(expression: str, mode: str, **more: str) -> str:
    """Return the output of a process that loads the runtime alone, without torch: an expression over `calls` and `cuda`."""
    script = (
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('calls', {str(ROOT / 'tests' / '_stand_in_calls.py')!r})\n"
        "calls = sys.modules['calls'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(calls)\n"
        f"cuda = calls.Runtime({path_of_runtime()!r})\n"
        f"print(json.dumps({expression}))"
    )
    environment = os.environ | {"CUDA_STAND_IN_MODE": mode} | more
    return subprocess.run(
        [sys.executable, "-S", "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_a_stream_that_was_destroyed_leaves_its_history(cuda: Runtime) -> None:
    """Its place in the clocks goes to the next new stream, which counts as ordered after it; others do not."""
    memory, gone, other = cuda.malloc(64), cuda.stream(), cuda.stream()
    cuda.access(other, memory + 32, 1, writes=True)
    cuda.access(gone, memory, 32, writes=False)
    cuda.call("cudaStreamDestroy", c_void_p(gone))
    cuda.access(cuda.stream(), memory, 16, writes=True)
    assert cuda.violations() == []
    cuda.access(other, memory + 16, 16, writes=True)
    assert len(cuda.violations()) == 1


def test_cuda_free_waits_for_the_one_stream_that_used_the_memory(cuda: Runtime) -> None:
    """Torch's empty_cache relies on it: the stream's work with a free block is done when cudaFree returns."""
    device, host, stream = cuda.malloc(64), cuda.pinned(64), cuda.stream()
    ctypes.memset(host, 0, 64)
    cuda.fill(device, 6, 64, stream)
    cuda.copy(host, device, 64, stream)
    cuda.call("cudaFree", c_void_p(device))
    assert ctypes.string_at(host, 64) == bytes([6]) * 64
    assert cuda.violations() == []


def test_memory_whose_only_stream_was_destroyed_may_be_freed(cuda: Runtime) -> None:
    memory, stream = cuda.malloc(64), cuda.stream()
    cuda.access(stream, memory, 64, writes=True)
    cuda.call("cudaStreamDestroy", c_void_p(stream))
    cuda.call("cudaFree", c_void_p(memory))
    assert cuda.violations() == []


@pytest.mark.parametrize(("mode", "bytes_read"), [("late", [5, 255]), ("early", [7, 255])])
def test_a_missing_wait_is_a_wrong_number(mode: str, bytes_read: list[int]) -> None:
    """Late: the copy to wait for has not run. Both: an operator's output is hidden until work is ordered after it."""
    assert json.loads(without_torch("calls.read_too_soon(cuda)", mode)) == bytes_read


# ----------------------------------------------------------------------------------------------------------------------- graphs


def test_a_graph_copies_again_at_each_launch_what_its_memory_holds_then(cuda: Runtime) -> None:
    a, b = cuda.stream(), cuda.stream()
    device, host, back = cuda.malloc(64), cuda.pinned(64), cuda.pinned(64)
    ctypes.memset(back, 0, 64)
    with Graph(cuda, a) as graph:
        cuda.copy(device, host, 64, a)
        cuda.order(a, b)
        cuda.copy(back, device, 64, b)
        cuda.order(b, a)
    assert ctypes.string_at(back, 64) == bytes(64)
    for value in (3, 4):
        ctypes.memset(host, value, 64)
        graph.launch(a)
        cuda.synchronize(a)
        assert ctypes.string_at(back, 64) == bytes([value]) * 64
    graph.destroy()
    assert cuda.violations() == []


def test_calls_of_a_graph_run_in_their_place_and_go_with_it(cuda: Runtime) -> None:
    device, stream, log = cuda.malloc(1), cuda.stream(), []
    kind = ctypes.CFUNCTYPE(None, c_void_p)
    run, drop = kind(lambda data: log.append(("run", data))), kind(lambda data: log.append(("drop", data)))
    with Graph(cuda, stream) as graph:
        assert cuda.library.standin_capturing(c_void_p(stream)) == 1
        for data in (1, 2):
            cuda.library.standin_capture_call(c_void_p(stream), run, drop, c_void_p(data), b"an operator")
        cuda.access(stream, device, 1, writes=True)
    assert cuda.library.standin_capturing(c_void_p(stream)) == 0
    assert log == []
    graph.launch(stream)
    assert log == [("run", 1), ("run", 2)]
    graph.destroy()
    assert sorted(log[2:]) == [("drop", 1), ("drop", 2)]


@pytest.mark.parametrize(("mode", "error", "end"), [(GLOBAL, 900, 901), (THREAD_LOCAL, 0, 0), (RELAXED, 0, 0)])
def test_what_another_thread_may_do_during_a_capture(cuda: Runtime, mode: int, error: int, end: int) -> None:
    stream, host, device, errors = cuda.stream(), cuda.pinned(64), cuda.malloc(64), []
    with Graph(cuda, stream, mode) as graph:
        cuda.copy(device, host, 64, stream)
        on_a_thread(lambda: errors.append(cuda.error("cudaMalloc", byref(c_void_p()), c_size_t(64))))
    assert (errors, graph.end_error) == ([error], end)


def test_a_capture_answers_with_the_errors_of_the_real_runtime(cuda: Runtime) -> None:
    a, b, inside, outside = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    device, host = cuda.malloc(64), cuda.pinned(64)
    cuda.record(outside, b)
    with Graph(cuda, a) as graph:
        assert cuda.error("cudaStreamSynchronize", c_void_p(a)) == 900
    assert graph.end_error == 901
    with Graph(cuda, a) as graph:
        assert cuda.error("cudaStreamWaitEvent", c_void_p(a), c_void_p(outside), 0) == 905
    assert graph.end_error == 901
    with Graph(cuda, a) as graph:
        cuda.record(inside, a)
        assert cuda.error("cudaEventSynchronize", c_void_p(inside)) == 907
        cuda.wait(b, inside)
        cuda.copy(device, host, 64, b)
    assert graph.end_error == 904
    assert cuda.error("cudaStreamEndCapture", c_void_p(a), byref(c_void_p())) == 401


# ------------------------------------------------------------------------------------------------------- devices and allocators


@pytest.mark.parametrize("mode", ["late", "early"])
def test_two_devices_have_memories_of_their_own_and_copies_between_them(mode: str) -> None:
    done = in_a_process("between_two_devices()", CUDA_STAND_IN_DEVICES="2", CUDA_STAND_IN_MODE=mode)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [2, "cuda:1", list(range(10)), True, []]


def test_cuda_malloc_async_is_refused_with_what_to_use_instead() -> None:
    done = in_a_process("torch.empty(1, device='cuda').tolist()", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert done.returncode == 1
    assert "is not there: use PYTORCH_CUDA_ALLOC_CONF=backend:native" in done.stderr
    assert "operation not supported" in done.stderr
