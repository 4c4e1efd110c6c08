"""The C++ helpers: how they are built, that nothing needs them, and that the hooks do with them what they do without."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chameleon_mm as cm
from chameleon_mm import cli, native
from chameleon_mm.device import Device, resolve_device
from chameleon_mm.errors import NativeBuildError
from chameleon_mm.profiler.light import FIXED_STORAGE
from chameleon_mm.profiler.step_record import EARLIER_STEP
from chameleon_mm.saved.classify import ProtectedStorages
from chameleon_mm.saved.handles import NO_HOOK
from tests._fakes import Unwatched
from tests._native import BUILDS, helper, only
from tests.test_hooks import Twice, error_of_a_write


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of builds that has none."""
    monkeypatch.setattr(native.building, "CACHE", tmp_path / "builds")
    return tmp_path / "builds"


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The helper for what stays, built."""
    module = helper("stays", monkeypatch)
    only(["stays"], monkeypatch)
    return module


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def plain_device(request: pytest.FixtureRequest) -> Device:
    """A device on which no dispatch mode runs: CUDA's, or the simulator's without its mode."""
    return Unwatched() if request.param == "cpu" else resolve_device("cuda")


# --- building


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_a_sentence_and_all_works(empty: Path) -> None:
    with pytest.raises(NativeBuildError, match=r"expected a C\+\+ compiler, got none named 'no-such'.*install g\+\+"):
        native.build("stays", compiler="no-such")
    assert native.load("stays") is None
    assert native.status("stays") == (False, "not built for this torch (`chameleon-mm native` builds it)")
    assert not empty.exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [("echo 'x.cpp:1:2: error: no such type' >&2; exit 1", "1:2: error: no such type"), ("exit 0", "no word of why")],
)
def test_a_compiler_that_fails_leaves_nothing(lines: str, words: str, empty: Path, tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match=f"could not compile the helper 'stays' for torch .*{words}; all works without"):
        native.build("stays", compiler=script(tmp_path / "compiler", lines))
    assert list(empty.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named(empty: Path, tmp_path: Path) -> None:
    empty.write_text("a file where the folder would be")
    with pytest.raises(NativeBuildError, match=r"expected to write the helper 'stays' to .*make that folder writable"):
        native.build("stays", compiler=script(tmp_path / "compiler", "exit 0"))


def test_a_torch_without_headers_is_named(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.building, "_HEADER", Path("no-such.h"))
    with pytest.raises(NativeBuildError, match=r"expected the header no-such\.h, got none in"):
        native.build("stays", compiler="sh")


def test_an_unknown_helper_is_refused() -> None:
    for ask in (native.build, native.load, native.status):
        with pytest.raises(ValueError, match="native: expected one of stays, planned, reclaim, memory, notes, got 'stay'"):
            ask("stay")


def test_a_build_is_made_once_for_each_torch(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = script(tmp_path / "compiler", f'echo once >> {tmp_path}/log; while [ "$1" != -o ]; do shift; done; echo > "$2"')
    first = native.build("stays", compiler=copies)
    assert native.build("stays", compiler="no-such") == first
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert native.status("stays").words.startswith("not built for this torch")
    assert native.build("stays", compiler=copies) != first
    assert (tmp_path / "log").read_text() == "once\nonce\n"
    assert len(native.builds()) == 2


def test_a_build_that_does_not_load_is_absent(empty: Path, tmp_path: Path) -> None:
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    native.build("stays", compiler=copies)
    assert native.load("stays") is None
    assert native.status("stays").words.startswith("does not load: ")
    expected = gradients(program_of_many, torch.device("cpu"))
    device = Unwatched()
    with cm.save_on_cpu(device=device):
        assert equal(gradients(program_of_many, device.torch_device), expected)


def test_a_build_that_does_not_load_is_built_anew(empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    native.build("stays", compiler=copies)
    assert cli.main(["native", "--compiler", "no-such"]) == 1
    assert "expected a C++ compiler" in capsys.readouterr().err
    with pytest.raises(NativeBuildError, match="expected a program that runs"):
        (tmp_path / "no-program").write_text("neither a script nor a binary")
        (tmp_path / "no-program").chmod(0o755)
        native.build("stays", compiler=str(tmp_path / "no-program"), again=True)


def test_the_command_builds_and_removes(empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    assert cli.main(["native", "--compiler", "no-such"]) == 1
    assert "expected a C++ compiler" in capsys.readouterr().err
    assert cli.main(["native", "--compiler", copies]) == 0
    assert "stays: does not load" in capsys.readouterr().out
    (empty / "building-1234").mkdir()  # of one that was killed
    assert cli.main(["native", "--remove"]) == 0
    assert "removed 2 builds" in capsys.readouterr().out
    assert list(empty.iterdir()) == []


# --- the hooks, against plain PyTorch and against those in Python

Program = Callable[[torch.device], list[Tensor]]


def program_of_many(at: torch.device) -> list[Tensor]:
    """A loss's parameters and inputs; what it saves has every reason to stay there is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(at)
    x = torch.randn(6, 8, device=at, requires_grad=True)
    scale = torch.linspace(1, 2, 4, device=at)
    y = model(x)
    z = y.exp() * scale + y.relu().sin() + (y @ list(model.parameters())[6].detach().view(4, 16)[:, :4].t()).softmax(-1)
    empty = torch.zeros(0, device=at, requires_grad=True).sin().sin().sum()
    (z.square().mean() + empty + next(model.parameters()).t().sin().mean()).backward()
    return [x, *model.parameters()]


def gradients(program: Program, at: torch.device) -> list[Tensor]:
    return [t.grad.cpu().clone() for t in program(at) if t.grad is not None]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@contextmanager
def hooks_in_python() -> Iterator[Counter[str]]:
    """Counts the calls of the hooks that are written in Python, on this thread."""
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("executor/autograd_hooks.py"):
            seen[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def steps(device: Device, program: Program, **given: Any) -> tuple[list[list[Tensor]], Any]:
    with cm.SwapSession(device=device, **given) as session:
        got = []
        for _ in range(6):
            with session.step():
                got.append(gradients(program, device.torch_device))
    return got, session.report()


@pytest.mark.parametrize("min_bytes", [1 << 20, 256], ids=["all stays", "some moves"])
def test_gradients_and_reports_are_those_without_it(min_bytes: int, plain_device: Device, stays: ModuleType) -> None:
    expected = gradients(program_of_many, plain_device.torch_device)  # in plain PyTorch
    reports = []
    for with_helper in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not with_helper:
                patch.setattr(native.building, "CACHE", BUILDS / "none")
            got, report = steps(plain_device, program_of_many, min_bytes=min_bytes)
            with cm.save_on_cpu(device=plain_device, min_bytes=min_bytes):
                got += [gradients(program_of_many, plain_device.torch_device) for _ in range(2)]
        assert all(equal(each, expected) for each in got)
        reports.append((report.kept_by_reason, report.steps_by_phase, report.bytes_swapped_out))
    assert reports[0] == reports[1]
    assert reports[0][0].keys() >= {"parameter", "leaf", "small", "empty"}
    assert (reports[0][2] > 0) == (min_bytes < 1 << 20)


def chain(at: torch.device) -> list[Tensor]:
    x = torch.ones(16, device=at, requires_grad=True)
    y = x
    for _ in range(20):
        y = y.sin()
    y.sum().backward()
    return [x]


def test_it_does_what_the_python_would(plain_device: Device, stays: ModuleType) -> None:
    at = plain_device.torch_device
    in_python = []
    with cm.SwapSession(device=plain_device) as session:
        for _ in range(6):
            with session.step(), hooks_in_python() as seen:
                chain(at)
            in_python.append(seen["save"])
    assert in_python[0] == 20  # a step that is recorded
    assert in_python[3:] == [0, 0, 0]
    assert not seen
    assert session.report().steps_by_phase["planned"] >= 3
    assert session.report().kept_by_reason == {"leaf": 6, "small": 6 * 19}
    counts = session._executor.hook_counts
    assert (counts.steps, counts.steps_without_saves, counts.steps_without_uses) == (6, 0, 0)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize(
    "operator", [torch.exp, torch.Tensor.relu, lambda x: x.clone().tanh_(), lambda x: x.sin().view(4, 4).exp(), Twice.apply]
)
def test_no_node_keeps_itself(operator: Callable[[Tensor], Tensor], plain_device: Device, stays: ModuleType) -> None:
    with cm.save_on_cpu(device=plain_device):
        y = operator(torch.ones(16, device=plain_device.torch_device, requires_grad=True).cos())
        gone = weakref.ref(y.untyped_storage())
        del y
    assert gone() is None


def test_it_knows_functions_in_python(stays: ModuleType) -> None:
    x = torch.ones(3, requires_grad=True)
    assert stays.is_python_functions(Twice.apply(x))  # type: ignore[no-untyped-call]  # torch annotates no `apply`
    assert not stays.is_python_functions(x.sin())
    assert not stays.is_python_functions(x)


def test_a_write_to_what_stays_is_eagers_error(plain_device: Device, stays: ModuleType) -> None:
    expected = error_of_a_write(plain_device)
    with cm.SwapSession(device=plain_device) as session:
        for _ in range(4):
            with session.step():
                chain(plain_device.torch_device)
        with session.step():
            got = error_of_a_write(plain_device)
    assert got == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_is_no_plain_tensor_is_left_to_python(stays: ModuleType) -> None:
    def program(at: torch.device) -> list[Tensor]:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
        sparse = torch.eye(4).to_sparse().requires_grad_()
        x, w = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        torch.nested.to_padded_tensor(nested.sin(), 0.0).sum().backward()
        torch.sparse.mm(sparse, w[:, None]).sin().sum().backward()
        torch.vmap(lambda row: (row * w).sin())(x).sum().backward()
        with torch.inference_mode():
            (x.detach() * w).sum()
        return [x, w]

    expected = gradients(program, torch.device("cpu"))
    got, _ = steps(Unwatched(), program)
    assert all(equal(each, expected) for each in got)


def test_threads_that_train_at_once(plain_device: Device, stays: ModuleType) -> None:
    """Each thread has hooks of its own on one session's executor."""
    expected = gradients(program_of_many, plain_device.torch_device)
    hooks = [cm.save_on_cpu(device=plain_device) for _ in range(2)]
    wrong: list[int] = []

    def train(number: int) -> None:
        with hooks[number % 2]._hooks:
            wrong.extend(number for _ in range(30) if not equal(gradients(chain, plain_device.torch_device), chained))

    chained = gradients(chain, plain_device.torch_device)
    before, threads = sys.getswitchinterval(), [threading.Thread(target=train, args=(number,)) for number in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
    assert equal(gradients(program_of_many, plain_device.torch_device), expected)


def test_a_models_buffer_is_persistent(plain_device: Device, stays: ModuleType) -> None:
    model, scale = nn.Module(), torch.linspace(1, 2, 16, device=plain_device.torch_device)
    model.register_buffer("scale", scale)

    def program(at: torch.device) -> list[Tensor]:
        x = torch.ones(16, device=at, requires_grad=True)
        (x.sin() * scale).sum().backward()
        return [x]

    expected = gradients(program, plain_device.torch_device)
    got, report = steps(plain_device, program, model=model)
    assert all(equal(each, expected) for each in got)
    assert report.kept_by_reason == {"leaf": 6, "persistent": 6}


def test_an_interrupt_in_what_a_hook_asks_of_python_is_raised(stays: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scale = nn.Module(), torch.linspace(1, 2, 16)
    model.register_buffer("scale", scale)

    def interrupt(self: object, storage: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProtectedStorages, "__contains__", interrupt)
    with cm.SwapSession(device=Unwatched(), model=model), pytest.raises(KeyboardInterrupt):
        torch.ones(16, requires_grad=True).sin() * scale


def test_dynamo_compiles_nothing_that_it_calls(plain_device: Device, stays: ModuleType) -> None:
    compiled: list[str] = []

    def program(x: Tensor, scale: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autograd.profiler.record_function("a break of the graph inside of a block"):
                torch._dynamo.graph_break()
                x = (x.sin() * scale).exp()
        return x

    torch._dynamo.reset()
    model, scale = nn.Module(), torch.linspace(1, 2, 64, device=plain_device.torch_device)
    model.register_buffer("scale", scale)
    x = torch.ones(64, device=plain_device.torch_device, requires_grad=True)
    note = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: compiled.append(code.co_filename))
    try:
        with cm.save_on_cpu(device=plain_device):
            torch.compile(program, backend="eager")(x, scale).sum().backward()
        with cm.SwapSession(device=plain_device, model=model):
            torch.compile(program, backend="eager")(x, scale).sum().backward()
    finally:
        note.remove()
    assert [name for name in compiled if "chameleon_mm" in name] == []


def test_its_constants_are_pythons() -> None:
    source = native.building.source_of("stays").read_text()
    assert f"NO_HOOK = {NO_HOOK}, FIXED_STORAGE = {FIXED_STORAGE}, EARLIER_STEP = {EARLIER_STEP};" in source


def test_a_session_in_a_forked_child_has_it_too(stays: ModuleType) -> None:
    def hooks_of_a_step() -> Counter[str]:
        with cm.SwapSession(device=Unwatched()) as session:
            for _ in range(5):
                with session.step(), hooks_in_python() as seen:
                    chain(torch.device("cpu"))
        assert session.report().steps_by_phase == {"recorded": 1, "planned": 4}
        return seen

    assert not hooks_of_a_step()
    child = os.fork()
    if child == 0:
        try:
            os._exit(3 if hooks_of_a_step() else 0)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_size_is_too_large_to_be_compared(stays: ModuleType) -> None:
    with cm.save_on_cpu(device=Unwatched(), min_bytes=1 << 64):
        assert equal(gradients(chain, torch.device("cpu")), gradients(chain, torch.device("cpu")))


def test_hooks_are_made_by_the_function_alone(stays: ModuleType) -> None:
    save = cm.save_on_cpu(device=Unwatched())._hooks.pack_hook
    with pytest.raises(TypeError, match="cannot create"):
        type(save.__self__)()  # type: ignore[attr-defined]  # a method of the helper's


def test_a_session_that_is_over_goes(plain_device: Device, stays: ModuleType) -> None:
    session = cm.SwapSession(device=plain_device)
    with session, session.step():
        chain(plain_device.torch_device)
    gone = weakref.ref(session._executor)
    del session
    gc.collect()
    # Autograd's thread for the GPU lets go of a backward, and of the hooks that it ran under, a moment after it has told that
    # the backward is over.
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert gone() is None


def test_parts_that_it_does_not_know_are_refused(stays: ModuleType) -> None:
    with pytest.raises(TypeError, match="native hooks: expected 25 parts, got 1"):
        stays.hooks(1)
    with pytest.raises(TypeError, match="expected a class of handles"):
        stays.hooks(*range(25))
