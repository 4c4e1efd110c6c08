"""Arguments of a wrong type are refused in one line, before anything was started: expected, got, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

import chameleon_mm as cm

DEVICE = r"device: expected a Device, a name or None, got {}; pass \"cuda\""
POOL = r"pool: expected a PinnedPool or None, got {}; pass PinnedPool\(\"8GiB\"\)"
SHARED: list[tuple[dict[str, object], str]] = [
    ({"pool": 3}, POOL.format(r"3 \(int\)")),
    ({"pool": "8GiB"}, POOL.format(r"'8GiB' \(str\)")),
    ({"pool": cm.PinnedPool}, POOL.format("the class PinnedPool itself")),
    ({"device": 3}, DEVICE.format(r"3 \(int\)")),
    ({"device": cm.SimDevice}, DEVICE.format("the class SimDevice itself")),
    ({"thresholds": 4096}, r"thresholds: expected a chameleon_mm.transfer.Thresholds or None, got 4096 \(int\); leave it out"),
    ({"min_bytes": 1.5}, r"min_bytes: expected an int of bytes or text such as \"20GiB\", got 1.5 \(float\)"),
]
OF_SESSIONS: list[tuple[dict[str, object], str]] = [
    ({"model": 3}, r"model: expected a torch.nn.Module or None, got 3 \(int\); put several into an nn.ModuleList"),
    ({"model": [nn.Linear(1, 1)]}, "model: expected a torch.nn.Module or None, got an object of type list; put several"),
    ({"model": nn.Linear}, "model: expected a torch.nn.Module or None, got the class Linear itself"),
    ({"verify": "yes"}, r"verify: expected True or False, got 'yes' \(str\)"),
    ({"plans": np.float32(1)}, "plans: expected True or False, got an object of type float32"),
]


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        pytest.param(make, arguments, message, id=f"{make.__name__}-{number}-{'-'.join(arguments)}")
        for make, cases in ((cm.SwapSession, SHARED + OF_SESSIONS), (cm.save_on_cpu, SHARED))
        for number, (arguments, message) in enumerate(cases)
    ],
)
def test_a_wrong_type_is_refused_before_anything_is_started(
    make: Callable[..., object], arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("chameleon_mm.pinned.pool.Chunks", starts)
    monkeypatch.setattr("chameleon_mm.executor.Executor.__init__", starts)
    with pytest.raises(TypeError, match=message) as caught:
        make(**{"device": "sim", **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [5, "event", [], cm.SimDevice, object()], ids=lambda wrong: type(wrong).__name__)
def test_a_pool_refuses_what_is_no_event_and_no_stream_and_goes_on(wrong: Any) -> None:
    device = cm.SimDevice()
    with cm.PinnedPool("1MiB", device=device) as pool:
        block = pool.allocate(4096)
        with pytest.raises(TypeError, match=r"^release: expected an event, or None, got .*; pass after=stream.record\(\)$"):
            block.release(after=wrong)
        with pytest.raises(TypeError, match=r"^wait_on: expected a stream of the pool's device, got "):
            block.wait_on(wrong)
        with pytest.raises(TypeError, match=r"^allocate: expected a stream of the pool's device, or None, got "):
            pool.allocate(4096, stream=wrong)
        block.release(after=device.current_stream().record())
        assert pool.allocate(4096).nbytes == 4096
    assert pool.stats().live_bytes == 0
