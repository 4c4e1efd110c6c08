"""Note [Snapshot], broken on purpose: copies out of order with compute, a host that does not wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import chameleon_mm as cm
from chameleon_mm.state.hosted import Home, HostedStorage
from chameleon_mm.state.tensor_copy import Copier
from tests._ordering import SLOW_LINK
from tests._programs import same
from tests._snapshots import Training, session_of, steps
from tests.observed import SimRaceError

pytestmark = [
    pytest.mark.usefixtures("no_gc"),
    # A mutant also breaks code that frees memory later, where an error can only be reported.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class _Beside:
    """Home that gives snapshots a compute stream other than the real one."""

    def __init__(self, home: Home, *, waits: bool) -> None:
        self._home, self._waits = home, waits
        self._stream = home.device.new_stream("beside")

    @contextmanager
    def entered(self) -> Iterator[Any]:
        with self._home.entered() as compute:
            if self._waits:
                self._stream.wait(compute.record())
            yield self._stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, name)


def train(kind: str, beside: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, a snapshot, a step, back to it. `beside`: copies on a stream of their own, "take" or "restore"."""
    device = cm.SimDevice(SLOW_LINK)
    with device.compute():
        training = Training("AdamW, foreach", device.torch_device)
        session = session_of(training, device, kind)
        with session:
            steps(session, training, range(2))
            method = {"take": "copy", "restore": "put_back"}.get((beside or "").partition(",")[0])
            if method is not None:
                original = getattr(Copier, method)

                def aside(copier: Copier, *arguments: Any) -> Any:
                    home = copier._home
                    copier._home = _Beside(home, waits="waits" in (beside or ""))  # type: ignore[assignment]  # its double
                    try:
                        return original(copier, *arguments)
                    finally:
                        copier._home = home

                monkeypatch.setattr(Copier, method, aside)
            session.snapshot()
            expected = training.outcome()  # which has the state come back
            steps(session, training, (2,))
            session.restore()
            assert same(training.outcome(), expected)
            steps(session, training, (2,))


@pytest.mark.parametrize("kind", ["optimizer", "parameters"])
def test_as_it_is_it_stays_green(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(kind, None, monkeypatch)


@pytest.mark.parametrize("beside", ["take", "take, waits", "restore", "restore, waits"])
def test_copies_beside_compute_race(beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for their stream before its next access. It does not matter if their stream waits for compute."""
    with pytest.raises(SimRaceError):
        train("optimizer", beside, monkeypatch)


@pytest.mark.parametrize("method", ["copy_to", "copy_from"])
def test_a_host_that_does_not_wait_for_copies_races(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host copy of what is away is whole once its copy out is done, and free to be written once its copy back is, too."""
    original = getattr(HostedStorage, method)

    def hurried(hosted: HostedStorage, *arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("chameleon_mm.device.sim.machine.SimEvent.synchronize", lambda event: None)
            original(hosted, *arguments)

    monkeypatch.setattr(HostedStorage, method, hurried)
    with pytest.raises(SimRaceError):
        train("optimizer", None, monkeypatch)


def test_memory_that_is_released_early_is_written_by_its_next_owner(sim: cm.SimDevice) -> None:
    """Note [Host block]: a snapshot hands the event of its last copy on with its blocks."""
    with sim.compute():
        model = torch.nn.Linear(256, 256)
        with cm.SwapSession("1GiB", "1MiB", sim, model=model) as session:
            snapshot = session.snapshot()
            blocks = [copy.block.buffer.data_ptr() for copy in snapshot._copies]
            snapshot.release()
            again = session.pool.allocate(256 * 256 * 4)
            assert again.buffer.data_ptr() in blocks
            assert again.pending_events or snapshot.last.query()
            again.release()
