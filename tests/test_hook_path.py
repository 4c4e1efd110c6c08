"""Files and calls of ours that a hook of a planned step crosses, the device's own aside: none of them may creep up.

.venv/bin/python -m tests.test_hook_path        # a line for each hook of a planned step, then the longest path
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import chameleon_mm as cm
from chameleon_mm.device import Device

PACKAGE = str(Path(cm.__file__).resolve().parent)
DEVICE = str(Path(PACKAGE) / "device")


class HookPath(NamedTuple):
    """Calls of one hook, by file and function."""

    kind: str
    calls: Counter[tuple[str, str]]

    @property
    def num_files(self) -> int:
        return len({file for file, _ in self.calls})

    @property
    def num_calls(self) -> int:
        return self.calls.total()


def counted(kind: str, hook: Callable[[Any], Any], paths: list[HookPath]) -> Callable[[Any], Any]:
    """`hook`, which appends what it called to `paths`."""

    def run(argument: Any) -> Any:
        calls: Counter[tuple[str, str]] = Counter()

        def note(frame: FrameType, event: str, _: object) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(PACKAGE) and not file.startswith(DEVICE) and not of_device(frame):
                calls[file.removeprefix(PACKAGE + "/"), frame.f_code.co_qualname] += 1

        sys.setprofile(note)
        try:
            return hook(argument)
        finally:
            sys.setprofile(None)
            paths.append(HookPath(kind, calls))

    return run


def of_device(frame: FrameType) -> bool:
    """Whether the device called it."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(DEVICE)


def planned_hooks(device: Device) -> list[HookPath]:
    """The hooks of one step of six blocks that follows a plan by which most activations move, and none is recomputed."""
    torch.manual_seed(0)
    with device.compute(), torch.device(device.torch_device.type):
        blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
        model, x = nn.Sequential(*blocks), torch.randn(512, 256)
    paths: list[HookPath] = []
    with cm.SwapSession(device.allocated_bytes() + (22 << 20), "1GiB", device, recompute=False) as session:
        own = session._save, session._use
        watched = counted("save", own[0], paths), counted("use", own[1], paths)
        for step in range(7):
            hooks = torch.autograd.graph.saved_tensors_hooks(*(watched if step == 6 else own))
            with session.step(), hooks:
                model(x).sum().backward()
            model.zero_grad()
    assert session.report().steps_by_phase == {"recorded": 1, "planned": 6}
    return paths


def test_a_hook_of_a_planned_step_crosses_no_more_than_it_did() -> None:
    paths = planned_hooks(cm.SimDevice())
    for kind, most_calls, median_calls, most_files in (("save", 41, 22, 24), ("use", 27, 16, 19)):
        of_kind = [path for path in paths if path.kind == kind]
        assert len(of_kind) == 29
        assert max(path.num_calls for path in of_kind) <= most_calls
        assert median(path.num_calls for path in of_kind) <= median_calls
        assert max(path.num_files for path in of_kind) <= most_files


if __name__ == "__main__":
    found = planned_hooks(cm.SimDevice())
    lines = [f"{path.kind:4}  {path.num_files:3} files  {path.num_calls:4} calls" for path in found]
    longest = max(found, key=lambda path: path.num_calls)
    lines += [f"{count:4}  {file}  {function}" for (file, function), count in sorted(longest.calls.items())]
    sys.stdout.write("\n".join(lines) + "\n")
