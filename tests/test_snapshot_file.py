"""Snapshots on disk: plain PyTorch goes on from the file, and no file is ever a half of one.

The reference is plain PyTorch on the same device, with nothing of ours around it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device
from tests._snapshots import RUNS, Training, equal, plainly, session_of, steps

pytestmark = pytest.mark.usefixtures("no_gc")

_ROOT = Path(__file__).resolve().parents[1]


def names(folder: Path) -> list[str]:
    """Names of the files in a folder."""
    return sorted(file.name for file in folder.iterdir())


def resumed(path: Path, name: str, at: torch.device) -> Training:
    """The training of a file, as any program of PyTorch's takes it up: nothing of ours is called."""
    saved = torch.load(path, weights_only=True)
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
def test_plain_pytorch_goes_on_from_the_file(kind: str, name: str, device: Device, tmp_path: Path) -> None:
    at = device.torch_device
    expected = plainly(name, at, range(5))
    with device.compute():
        training = Training(name, at)
        session = session_of(training, device, kind)
        with session.pool, session:
            steps(session, training, range(3))
            write = session.snapshot().write(tmp_path / "run.pt")
            steps(session, training, (7, 8))  # meanwhile
            assert write.wait() == tmp_path / "run.pt"
            assert write.done
    assert names(tmp_path) == ["run.pt"]
    again = resumed(tmp_path / "run.pt", name, at)
    for number in (3, 4):
        again.step(number)
    assert equal(again.outcome(), expected)


_KILLED = """
import os, sys, time
import torch
import chameleon_mm as cm
from chameleon_mm.snapshots import background_write
from tests._snapshots import Training, session_of, steps
from tests.observed import observe_all

observe_all()
path, where, threads = sys.argv[1:]
torch.set_num_threads(int(threads))  # which decides how sums are rounded
save, fsync = torch.save, os.fsync

def stop():
    print("now", flush=True)
    time.sleep(600)

def half_saved(contents, file):
    save(contents, file)
    with open(file, "r+b") as part:
        part.truncate(part.seek(0, 2) // 2)
    stop()

device = cm.SimDevice()
with device.compute():
    training = Training("AdamW, foreach", device.torch_device)
    with session_of(training, device, "parameters") as session:
        steps(session, training, range(3))
        session.snapshot().write(path).wait()
        steps(session, training, range(3, 5))
        if where == "in the middle of the file":
            torch.save = half_saved
        else:
            os.fsync = lambda descriptor: stop()
        session.snapshot().write(path).wait()
"""


@pytest.mark.parametrize("where", ["in the middle of the file", "before it is on the disk"])
def test_a_process_that_is_killed_in_a_write_leaves_the_file_before(where: str, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    command = [sys.executable, "-c", _KILLED, str(path), where, str(torch.get_num_threads())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(_ROOT)}) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "now\n"
        finally:
            child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".run.pt.part", "run.pt"]
    again = resumed(path, "AdamW, foreach", torch.device("cpu"))
    for number in (3, 4):
        again.step(number)
    assert equal(again.outcome(), plainly("AdamW, foreach", torch.device("cpu"), range(5)))
    write = written(path)  # the one after it takes the place of what was left, and needs nobody to clean up
    assert names(tmp_path) == ["run.pt"]
    assert write.path == path


def written(path: Path) -> cm.SnapshotWrite:
    """A small file, by a session of its own."""
    device = cm.SimDevice()
    with device.compute(), cm.SwapSession("1GiB", device=device, model=torch.nn.Linear(2, 2)) as session:
        write = session.snapshot().write(path)
        write.wait()
    return write


class Held:
    """`torch.save` that waits for the test before it begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.begun, self.go, self.error = threading.Event(), threading.Event(), error
        self._save = torch.save
        monkeypatch.setattr(torch, "save", self)

    def __call__(self, contents: Any, file: Any) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if self.error is not None:
            Path(file).write_bytes(b"half")
            raise self.error
        self._save(contents, file)


def test_memory_that_is_written_goes_back_when_the_write_ends(
    sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with sim.compute():
        training = Training("SGD", sim.torch_device)
        session = session_of(training, sim, "neither")
        with session.pool, session:
            snapshot = session.snapshot()
            weights = {name: value.clone() for name, value in training.model.state_dict().items()}
            write = snapshot.write(tmp_path / "run.pt")
            assert held.begun.wait(60)
            snapshot.release()
            assert snapshot.released
            assert session.pool.stats().requested_bytes == snapshot.nbytes
            with pytest.raises(TimeoutError, match=r"expected it to end within 0\.01 s; it is still going on|wait longer"):
                write.wait(0.01)
            assert not write.done
            assert "going on" in repr(write)
            steps(session, training, range(2))
            other = session.snapshot()  # it gets other memory
            second = other.write(tmp_path / "run.pt")  # the same file: one write after the other
            held.go.set()
            write.wait()
            assert (
                all(torch.equal(value, weights[name]) for name, value in torch.load(write.path)["model"].items()) or second.done
            )
            second.wait()
            other.release()
            assert session.pool.stats().live_bytes == 0
    latest = torch.load(second.path, weights_only=True)["model"]
    assert all(torch.equal(value, latest[name]) for name, value in training.model.state_dict().items())
    assert not torch.equal(latest["0.weight"], weights["0.weight"])


def test_a_write_that_fails_raises_at_its_wait_and_leaves_the_file_before(
    sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.pt"
    written(path)
    before = path.read_bytes()
    held = Held(monkeypatch, OSError(28, "No space left on device"))
    held.go.set()
    with sim.compute():
        training = Training("SGD", sim.torch_device)
        session = session_of(training, sim, "neither")
        with session.pool, session:
            snapshot = session.snapshot()
            write = snapshot.write(path)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left on device"):
                    write.wait()
            assert "failed" in repr(write)
            assert f"a snapshot was not written to {path}: [Errno 28]" in caplog.text
            assert path.read_bytes() == before
            assert names(tmp_path) == ["run.pt"]
            monkeypatch.undo()
            snapshot.write(path).wait()
            snapshot.release()
            assert session.pool.stats().live_bytes == 0
    assert path.read_bytes() != before


def test_two_writers_of_one_file_do_not_mix(sim: cm.SimDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions: the writes of one follow each other."""
    path = tmp_path / "run.pt"
    with sim.compute():
        training = Training("SGD", sim.torch_device)
        with session_of(training, sim, "neither") as session:
            held = Held(monkeypatch)
            first = session.snapshot().write(path)
            assert held.begun.wait(60)
            with pytest.raises(BlockingIOError, match="expected a file that nobody else writes"):
                written(path)
            held.go.set()
            saved = torch.load(first.wait(), weights_only=True)
    assert all(isinstance(value, Tensor) for value in saved["model"].values())
    assert names(tmp_path) == ["run.pt"]
