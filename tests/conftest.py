"""Fixtures for every test.

    def test_x(sim):     one fresh simulated GPU
    def test_x(device):  the same behaviour twice: on a fresh simulated GPU, and on CUDA where there is one
    def test_x(no_gc):   nothing is freed by the collector's luck

Tests marked `gpu` are skipped, with that reason, where torch finds no CUDA GPU.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import settings
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from chameleon_mm.device import native, resolve_device
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.record.dispatch_state import remove
from chameleon_mm.swap.executor import Executor
from tests._native import BUILDS, helper, without
from tests.cuda_stand_in import control
from tests.observed import observe_all

# cuBLAS takes 65 MiB from torch's allocator on a Hopper GPU, more than most budgets of tests. With this it takes 128 KiB.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "128")
# Programs that tests start run on one thread, as the tests do: a thread for each core waits in a loop for a core that another
# test has, and a program of ten seconds takes a minute.
os.environ.setdefault("OMP_NUM_THREADS", "1")

observe_all()  # before a test module is imported, which may make a device

if control.is_loaded():
    collect_ignore_glob = ["test_frameworks_*.py"]
    """Tests of frameworks, which that environment does not have: see `cuda_stand_in/versions.py`. None of them needs a GPU."""


def pytest_addoption(parser: pytest.Parser) -> None:
    # One: the operators tested are small, and more threads only wait for each other. They may round otherwise, though.
    parser.addoption("--torch-threads", type=int, default=1, help="threads of torch's operators (default: 1)")
    parser.addoption("--native", action="store_true", help="build the C++ helpers first, and run everything with them")
    parser.addoption("--share", default="1/1", help="K/N: run one of N shares of the tests, drawn by their names")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(config.getoption("--torch-threads"))
    # A busy machine is not a failing test. Each run draws other examples.
    settings.register_profile("chameleon_mm", deadline=None, max_examples=50)
    settings.load_profile("chameleon_mm")
    # Messages that appear once per process must not appear in the middle of the first test.
    logger = logging.getLogger("chameleon_mm.device")
    logger.disabled = True
    if not torch.cuda.is_available():
        resolve_device(None)
    logger.disabled = False
    # Tests ignore the helpers that this machine's user has built or installed.
    native.PACKAGE = "chameleon_mm_native_of_a_test"
    if config.getoption("--native"):
        native.CACHE = BUILDS
        native.build_useful()
    else:
        native.CACHE = Path(tempfile.gettempdir(), "chameleon_mm has no build here")


def pytest_collection_finish() -> None:
    _collect_garbage()


def _collect_garbage() -> None:
    """Collect garbage, and set aside what stays if it is much, as after imports: later collections take milliseconds, not a
    third of a second, and most tests begin with one. Nothing that a test makes is set aside: its set-up calls this first."""
    gc.collect()
    if len(gc.get_objects()) > 30_000:
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, shares = (int(number) for number in config.getoption("--share").split("/"))
    items[:] = [item for item in items if crc32(item.nodeid.encode()) % shares == share % shares]
    if torch.cuda.is_available():
        return
    no_cuda = pytest.mark.skip(reason="needs a CUDA GPU; torch finds none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_cuda)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_mode_stays() -> Iterator[None]:
    """Fail a test that leaves one of our dispatch modes, such as a recorder or an open session's simulated device, and remove
    the mode: later tests would run their plain PyTorch programs under it."""
    yield
    stay = [mode for mode in _get_current_dispatch_mode_stack() if type(mode).__module__.startswith("chameleon_mm.")]
    for mode in stay:
        remove(mode)
    names = [type(mode).__name__ for mode in stay]
    key_is_on = torch._C._dispatch_tls_is_dispatch_key_included("Fake")
    assert not key_is_on, "expected the dispatch key of call notes to be off when the test ends, got it on"
    assert not names, f"expected no dispatch mode of ours on this thread's stack when the test ends, got {names}"


@pytest.fixture(autouse=True)
def _current_stream_stays() -> Iterator[None]:
    """Fail a test that leaves another stream current, and restore the default: only this thread's later tests would use it."""
    yield
    if torch.cuda.is_initialized() and (left := torch.cuda.current_stream()) != (default := torch.cuda.default_stream()):
        torch.cuda.set_stream(default)
        pytest.fail(f"expected the default stream to be current when the test ends, got {left}")


@pytest.fixture
def sim() -> SimDevice:
    """A fresh simulated H200."""
    return SimDevice()


@pytest.fixture(params=["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    """A device of each kind: fresh and simulated, then the first CUDA GPU."""
    if request.param == "sim":
        return SimDevice()
    from chameleon_mm.device.cuda import CudaDevice

    return CudaDevice()


@pytest.fixture(params=["watch", pytest.param("notes", marks=pytest.mark.slow)])
def each_watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Steps that recompute are watched in Python, then noted in C++: with each all is the same."""
    if request.param == "notes":
        helper("notes", monkeypatch)
        if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
            dynamo.counters["frames"].clear()  # of an earlier test
    without(["notes"] if request.param == "watch" else [], monkeypatch)
    return str(request.param)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without the lines that say that a budget is too small for a plan: the default rule then goes on, which is a case, too."""
    logger = logging.getLogger("chameleon_mm")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions search less for the fastest of the plans that fit, which takes a second for a small model's step: for tests of
    bits, budgets and known steps, where each plan is as good."""
    monkeypatch.setattr("chameleon_mm.follow.adaptation.DRAFTS", 30)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Disable garbage collection during the test: an object alive at its end is held by a reference."""
    was_enabled = gc.isenabled()
    _collect_garbage()  # the litter of earlier tests is not this test's
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the hooks that went the executor's way."""
    seen: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(Executor, name)

        def run(executor: Executor, argument: Any) -> Any:
            seen.append(name)
            return method(executor, argument)

        return run

    for name in ("save", "use"):
        monkeypatch.setattr(Executor, name, noted(name))
    return seen


@pytest.fixture
def flags_of_modes() -> Iterator[None]:
    """Restore the mode flags: torch has one set for all threads. If the modes of two threads are left in the order in which
    they were entered, a flag stays True, and dynamo compiles again in each step of any later test."""
    names = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]
    before = {name: getattr(_python_dispatch, name) for name in names}
    yield
    for name, flag in before.items():
        setattr(_python_dispatch, name, flag)
    with TorchDispatchMode():  # as it is left, it tells torch's C++ side
        pass


@pytest.fixture
def fresh_blocks() -> Iterator[None]:
    """Empty torch's caching allocator, whose blocks keep the streams that used them, and discard the stand-in's violations; and
    again at the end, where a mutant has been wrong on purpose."""
    _forget_blocks()
    yield
    _forget_blocks()


def _forget_blocks() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    control.violations()
