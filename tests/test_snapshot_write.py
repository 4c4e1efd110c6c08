"""Snapshots on disk: plain PyTorch continues from the checkpoint, and no checkpoint is ever incomplete.

The reference is plain PyTorch on the same device, with nothing of ours around it.
"""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

import chameleon_mm as cm
from chameleon_mm.device import Device
from chameleon_mm.state import checkpoint_folder
from tests._fakes import refusing
from tests._programs import at_once, same
from tests._run_scripts import environment, python
from tests._snapshots import RUNS, Training, opened, plainly, read, session_of, steps

pytestmark = pytest.mark.usefixtures("no_gc")


def names(folder: Path) -> list[str]:
    """Names of the files in a folder."""
    return sorted(file.name for file in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def resumed(path: Path, name: str, at: torch.device) -> Training:
    """The training of a checkpoint, as any program of PyTorch's takes it up: nothing of ours is called."""
    saved = read(path)
    training = Training(name, at)
    training.model.load_state_dict(saved["model"])
    if saved["optimizer"] is not None:
        training.optimizer.load_state_dict(saved["optimizer"])
    for parameter_name, gradient in saved["gradients"].items():
        training.model.get_parameter(parameter_name).grad = gradient.to(at)
    for buffer_name, value in saved["not_in_state_dict"].items():
        training.model.get_buffer(buffer_name).copy_(value)
    torch.set_rng_state(saved["random"]["host"])
    if at.type == "cuda":
        torch.cuda.set_rng_state(saved["random"]["device"], at)
    return training


@pytest.mark.parametrize(("kind", "name"), RUNS)
def test_plain_pytorch_goes_on_from_the_checkpoint(kind: str, name: str, device: Device, tmp_path: Path) -> None:
    at = device.torch_device
    expected = plainly(name, at, range(5))
    with device.compute():
        training = Training(name, at)
        session = session_of(training, device, kind)
        with session.pool, session:
            steps(session, training, range(3))
            write = session.snapshot().write(tmp_path / "run")
            steps(session, training, (7, 8))  # meanwhile
            assert write.wait() == tmp_path / "run"
            assert write.done
    assert names(tmp_path) == ["run"]
    again = resumed(tmp_path / "run", name, at)
    for number in (3, 4):
        again.step(number)
    assert same(again.outcome(), expected)


class Turned(nn.Module):
    """Weights, some of which lie in memory by channels last, and one of which has two names."""

    def __init__(self, at: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, device=at)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.one = nn.Linear(8, 8, device=at)
        self.other = nn.Linear(8, 8, device=at)
        self.other.weight = self.one.weight
        self.frozen = nn.Parameter(torch.ones(4, device=at), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.other(self.one(self.conv(x).mean((2, 3))).relu())
        return y


def turned_step(model: nn.Module, optimizer: torch.optim.Optimizer, at: torch.device, number: int) -> None:
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number)).to(at, memory_format=torch.channels_last)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def turned_training(at: torch.device) -> tuple[Turned, torch.optim.Optimizer]:
    model = Turned(at)
    groups: list[dict[str, Any]] = [
        {"params": [*model.conv.parameters()], "lr": 1e-2},
        {"params": [*model.one.parameters(), model.other.bias]},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-3, fused=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's load says so without a process group
def test_torchs_own_load_reads_it_into_tensors_with_strides_of_their_own(device: Device, tmp_path: Path) -> None:
    at = device.torch_device
    plain, optimizer = turned_training(at)
    for number in range(4):
        turned_step(plain, optimizer, at, number)
    with device.compute():
        model, optimizer = turned_training(at)
        with cm.SwapSession("1GiB", device=device, model=model, optimizer=optimizer) as session:
            for number in range(2):
                with session.step():
                    turned_step(model, optimizer, at, number)
            path = session.snapshot().write(tmp_path / "run").wait()
    model, optimizer = turned_training(at)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load(state, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert model.get_parameter("conv.weight").is_contiguous(memory_format=torch.channels_last)
    for number in (2, 3):
        turned_step(model, optimizer, at, number)
    expected, got = plain.state_dict(), model.state_dict()
    assert all(torch.equal(value, got[name]) for name, value in expected.items())


def test_parameters_that_the_model_has_not_stand_under_their_numbers(sim: cm.SimDevice, tmp_path: Path) -> None:
    with sim.compute():
        model, extra = nn.Linear(4, 4), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW(model.parameters())
        with cm.SwapSession("1GiB", device=sim, model=model, optimizer=optimizer) as session:
            optimizer.add_param_group({"params": [extra]})
            with session.step():
                (model(torch.ones(2, 4)).sum() + extra.square().sum()).backward()
                optimizer.step()
            saved = read(session.snapshot().write(tmp_path / "run").wait())["optimizer"]
        expected = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [["weight", "bias"], ["parameter 2"]]
    again = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    again.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    again.load_state_dict(saved)
    assert again.state_dict()["param_groups"] == expected["param_groups"]
    got = again.state_dict()["state"]
    assert all(torch.equal(got[i][key], value) for i in range(3) for key, value in expected["state"][i].items())


# --- a process that is killed

_KILLED = """
import os, shutil, sys, time
from pathlib import Path
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
import chameleon_mm as cm
from chameleon_mm.state import checkpoint_folder
from tests._snapshots import Training, session_of, steps
from tests.observed import observe_all

observe_all()
path, where, threads = sys.argv[1:]
torch.set_num_threads(int(threads))  # which decides how sums are rounded
write_data, rename = FileSystemWriter.write_data, Path.rename

def stop(*_, **__):
    print("now", flush=True)
    time.sleep(600)

def half_written(writer, plan, planner):
    written = write_data(writer, plan, planner)
    with next(Path(writer.path).glob("*.distcp")).open("r+b") as part:
        part.truncate(part.seek(0, 2) // 2)
    stop()

def renamed_away(old, new):
    rename(old, new)
    if old.name == "run":
        stop()

device = cm.SimDevice()
with device.compute():
    training = Training("AdamW, foreach", device.torch_device)
    with session_of(training, device, "parameters") as session:
        steps(session, training, range(3))
        session.snapshot().write(path).wait()
        steps(session, training, range(3, 5))
        if "two renames" in where:
            checkpoint_folder.exchange = lambda one, other: False
        if where == "in the middle of a file":
            FileSystemWriter.write_data = half_written
        elif where == "before it is on the disk":
            os.fsync = stop
        elif where == "before it has the name":
            checkpoint_folder._put_in_place = stop
        elif where == "between two renames":
            Path.rename = renamed_away
        else:
            shutil.rmtree = stop
        session.snapshot().write(path).wait()
"""

BEFORE, AFTER = 3, 5
"""Steps in the earlier checkpoint, and in the new one."""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("where", "left", "readable", "done"),
    [
        ("in the middle of a file", [".run.lock", ".run.part", "run"], "run", BEFORE),
        ("before it is on the disk", [".run.lock", ".run.part", "run"], "run", BEFORE),
        ("before it has the name", [".run.lock", ".run.part", "run"], "run", BEFORE),
        ("before the earlier one is gone", [".run.lock", ".run.part", "run"], "run", AFTER),
        ("between two renames", [".run.earlier", ".run.lock", ".run.part"], ".run.earlier", BEFORE),
        ("before the earlier one is gone, after two renames", [".run.earlier", ".run.lock", "run"], "run", AFTER),
    ],
)
def test_a_process_that_is_killed_in_a_write_leaves_a_whole_checkpoint(
    where: str, left: list[str], readable: str, done: int, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-c", _KILLED, str(path), where, str(torch.get_num_threads())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "now\n"
        finally:
            child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert names(tmp_path) == left
    again = resumed(tmp_path / readable, "AdamW, foreach", torch.device("cpu"))
    for number in range(done, 6):
        again.step(number)
    assert same(again.outcome(), plainly("AdamW, foreach", torch.device("cpu"), range(6)))
    write = written(path)  # the next write replaces the leftovers, which need no clean-up
    assert names(tmp_path) == ["run"]
    assert write.path == path
    assert list(read(path)["model"]) == ["weight", "bias"]


def test_a_write_that_fails_after_one_that_was_killed_leaves_the_earlier_one_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between two renames."""
    path = written(tmp_path / "run").path
    before = contents(path)
    path.rename(tmp_path / ".run.earlier")
    Held(monkeypatch, OSError(errno.ENOSPC, "No space left on device")).go.set()
    with pytest.raises(OSError, match="No space left"):
        written(path)
    assert names(tmp_path) == ["run"]
    assert contents(path) == before


@pytest.mark.ci
def test_a_process_ends_once_its_writes_have(tmp_path: Path) -> None:
    program = """
import sys
import torch
import chameleon_mm as cm
from tests.observed import observe_all

observe_all()
device = cm.SimDevice()
with device.compute(), cm.SwapSession("1GiB", device=device, model=torch.nn.Linear(512, 512)) as session:
    session.snapshot().write(sys.argv[1])
"""
    ended = python(["-c", program, str(tmp_path / "run")], tmp_path)
    assert ended.code == 0
    assert "Error" not in ended.err
    assert read(tmp_path / "run")["model"]["weight"].shape == (512, 512)


def written(path: Path) -> cm.SnapshotWrite:
    """A small checkpoint, by a session of its own."""
    device = cm.SimDevice()
    with device.compute(), cm.SwapSession("1GiB", device=device, model=nn.Linear(2, 2)) as session:
        write = session.snapshot().write(path)
        write.wait()
    return write


# --- writes that wait, fail, meet


class Held:
    """Writing of files that waits for the test before it begins, and then fails with `error`, halfway."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        write_data = FileSystemWriter.write_data

        def held(writer: FileSystemWriter, *arguments: Any) -> Any:
            self.begun.set()
            assert self.go.wait(60)
            if error is not None:
                Path(writer.path, "__0_0.distcp").write_bytes(b"half")
                raise error
            return write_data(writer, *arguments)

        monkeypatch.setattr(FileSystemWriter, "write_data", held)


def test_memory_that_is_written_goes_back_when_the_write_ends(
    sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with sim.compute():
        training, session = opened("SGD", sim, "neither")
        with session.pool, session:
            snapshot = session.snapshot()
            weights = {name: value.clone() for name, value in training.model.state_dict().items()}
            write = snapshot.write(tmp_path / "run")
            assert held.begun.wait(60)
            snapshot.release()
            assert snapshot.released
            assert session.pool.stats().requested_bytes == snapshot.nbytes
            with pytest.raises(TimeoutError, match=r"expected it to end within 0\.01 s, it is still going on; wait longer"):
                write.wait(0.01)
            assert not write.done
            steps(session, training, range(2))
            other = session.snapshot()  # it gets other memory
            second = other.write(tmp_path / "run")  # the same name: one write after the other
            third = other.write(tmp_path / "another")
            held.go.set()
            for one in (write, second, third):
                one.wait()
            other.release()
            assert session.pool.stats().live_bytes == 0
    assert names(tmp_path) == ["another", "run"]
    latest = read(second.path)["model"]
    assert all(torch.equal(value, latest[name]) for name, value in training.model.state_dict().items())
    assert not torch.equal(latest["0.weight"], weights["0.weight"])


def test_a_write_that_fails_raises_at_its_wait_and_leaves_the_checkpoint_before(
    sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    written(path)
    before = contents(path)
    Held(monkeypatch, OSError(errno.ENOSPC, "No space left on device")).go.set()
    with sim.compute():
        _training, session = opened("SGD", sim, "neither")
        with session.pool, session:
            snapshot = session.snapshot()
            write = snapshot.write(path)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left on device") as failure:
                    write.wait()
            assert failure.value.errno == errno.ENOSPC
            assert "\n" not in str(failure.value)
            assert f"a snapshot was not written to {path}: [Errno 28]" in caplog.text
            assert contents(path) == before
            assert names(tmp_path) == ["run"]
            monkeypatch.undo()
            snapshot.write(path).wait()
            snapshot.release()
            assert session.pool.stats().live_bytes == 0
    assert contents(path) != before


def test_a_file_that_the_system_refuses_to_let_grow_is_one_line(sim: cm.SimDevice, tmp_path: Path) -> None:
    """A full disk does the same: torch's archive raises its own error over the system's."""
    path = written(tmp_path / "run").path
    before = contents(path)
    most, limits = 100_000, resource.getrlimit(resource.RLIMIT_FSIZE)
    with sim.compute(), cm.SwapSession("1GiB", device=sim, model=nn.Linear(512, 512)) as session:
        snapshot = session.snapshot()
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            with pytest.raises(
                OSError, match=f"{path}: expected room and rights for a checkpoint, got 'File too large'"
            ) as failure:
                snapshot.write(path).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failure.value.errno == errno.EFBIG
    assert "\n" not in str(failure.value)
    assert names(tmp_path) == ["run"]
    assert contents(path) == before


def test_a_folder_that_may_not_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = refusing(PermissionError, errno.EACCES, "Permission denied")
    monkeypatch.setattr("chameleon_mm.state.checkpoint_folder.tempfile.TemporaryFile", refused)
    with pytest.raises(PermissionError, match=r"expected a folder that may be written, got .*; choose another") as failure:
        written(tmp_path / "run")
    assert "\n" not in str(failure.value)
    assert not names(tmp_path)


def test_what_is_no_checkpoint_is_not_replaced(sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.distcp").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("file", "got .*, a file; choose"),
        ("folder", "with mine.distcp in it"),
        ("none/run", "make .*none first"),
    ):
        with pytest.raises(ValueError, match=message):
            written(tmp_path / name)
    assert written(tmp_path / "empty").wait() == tmp_path / "empty"
    path = written(tmp_path / "run").path
    held = Held(monkeypatch)
    with sim.compute(), cm.SwapSession("1GiB", device=sim, model=nn.Linear(2, 2)) as session:
        write = session.snapshot().write(path)
        assert held.begun.wait(60)
        (path / "scheduler.pt").write_text("mine")  # meanwhile
        held.go.set()
        with pytest.raises(ValueError, match=r"with scheduler.pt in it"):
            write.wait()
    assert (path / "scheduler.pt").read_text() == "mine"
    assert read(path)["model"]
    assert names(tmp_path) == ["empty", "file", "folder", "run"]


def test_a_link_to_a_checkpoint_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "latest").symlink_to("there/run")
    for _ in range(2):
        assert written(tmp_path / "latest").path == tmp_path / "latest"
        assert (tmp_path / "latest").is_symlink()
        assert names(tmp_path / "there") == ["run"]
        assert read(tmp_path / "latest")["model"]


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("exchanges", [True, False])
def test_two_writers_of_one_checkpoint_do_not_mix(
    exchanges: bool, locks: bool, sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions: the writes of one follow each other."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", refusing(OSError, errno.ENOLCK, "No locks available"))
    if not exchanges:
        monkeypatch.setattr(checkpoint_folder, "exchange", lambda one, other: False)
    path = written(tmp_path / "run").path
    before = contents(path)
    with sim.compute():
        training = Training("SGD", sim.torch_device)
        with session_of(training, sim, "neither") as session:
            held = Held(monkeypatch)
            first = session.snapshot().write(path)
            assert held.begun.wait(60)
            with pytest.raises(BlockingIOError, match="expected a checkpoint that nobody else writes"):
                written(path)
            assert contents(path) == before
            held.go.set()
            saved = read(first.wait())
    assert all(torch.equal(value, saved["model"][name]) for name, value in training.model.state_dict().items())
    assert names(tmp_path) == ["run"]


def test_a_planted_lock_or_leftover_is_not_followed(tmp_path: Path) -> None:
    """`wait` raises `OSError`. The targets of the links are unchanged, and so is the earlier checkpoint."""
    path = written(tmp_path / "run").path
    before = contents(path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    for name, target in ((".run.lock", "made"), (".run.lock", "mine/x"), (".run.part", "mine")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(OSError, match="symbolic link"):
            written(path)
        (tmp_path / name).unlink()
        assert names(tmp_path) == ["mine", "run"]
    assert (contents(path), contents(tmp_path / "mine")) == (before, {"x": b"mine"})


def test_many_writers_of_one_checkpoint_leave_one_of_theirs(tmp_path: Path) -> None:
    """Threads, each with a folder of its own: those that meet another are refused, and the others run one after another."""
    path = tmp_path / "run"
    ended: list[int | None] = []

    def write(number: int) -> None:
        try:
            with checkpoint_folder.new_folder(path) as part:
                (part / ".metadata").write_text(f"{number}")
                (part / "a.distcp").write_text(f"{number}")
            ended.append(number)
        except BlockingIOError:
            ended.append(None)

    for _ in range(40):
        at_once(partial(write, number) for number in range(4))
        assert names(tmp_path) == ["run"]
        assert len(set(contents(path).values())) == 1
    assert len(ended) == 160
    assert any(number is not None for number in ended)
