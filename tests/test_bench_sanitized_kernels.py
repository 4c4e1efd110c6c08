"""The program that compute-sanitizer watches: all of its cases are right, and one that goes wrong is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chameleon_mm.bench import _copy_kernel, _sanitized_kernels
from chameleon_mm.bench._sanitized_kernels import Case, batches, cases, check
from chameleon_mm.bench._sanitized_memory import Memory
from chameleon_mm.kernels import pack

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


@pytest.mark.slow  # half a minute; the kernels' own tests go through the same sizes
def test_every_case_is_right_under_the_interpreter(tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "chameleon_mm.bench._sanitized_kernels", "--place", "cpu", "--json", str(target)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(target.read_text(encoding="utf-8")) == {"cases": len(list(cases(CPU))), "wrong": []}


def test_each_kernel_has_cases_at_either_end_of_an_allocation() -> None:
    names = [case.name for case in cases(CPU)]
    assert len(set(names)) == len(names)
    for kind in ("copy", "checksum", "pack"):
        for edge in ("at the front", "at the end"):
            assert any(name.startswith(f"{kind}, ") and edge in name for name in names)
    assert "copy, 17 bytes, (3, 3) off a boundary, at the end, 3 programs" in names


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("shift", [0, 3])
def test_a_part_lies_at_an_edge_with_canaries_on_the_other_side(at_end: bool, shift: int) -> None:
    memory = Memory.random(100, CPU, at_end=at_end, shift=shift)
    assert (memory.part.data_ptr() - memory.whole.data_ptr()) % 16 == shift
    ends = (memory.begin == shift, memory.begin + 100 == memory.whole.numel())
    assert ends == (not at_end, at_end)
    assert memory.whole.numel() == 164 + shift
    assert memory.is_intact() and memory.canaries_live() and memory.holds(memory.expected())


@pytest.mark.parametrize("at_end", [False, True])
def test_a_touched_byte_is_noticed(at_end: bool) -> None:
    memory = Memory.random(100, CPU, at_end=at_end)
    beside = memory.begin - 1 if at_end else memory.begin + 100
    memory.whole[beside] += 1
    assert not memory.canaries_live() and not memory.holds(memory.expected()) and not memory.is_intact()
    memory.whole[beside] -= 1
    memory.part[-1] += 1
    assert memory.canaries_live()
    assert not memory.holds(memory.expected()) and not memory.is_intact()


def plain_copy(dst: Tensor, src: Tensor, *, num_programs: int) -> None:
    dst.copy_(src)


def copy_and_write_beside(dst: Tensor, src: Tensor, *, num_programs: int) -> None:
    dst.copy_(src)
    torch.as_strided(dst, (1,), (1,), dst.storage_offset() + dst.numel()).add_(1)


def copy_too_little(dst: Tensor, src: Tensor, *, num_programs: int) -> None:
    dst[:-1].copy_(src[:-1])


def move(dst: Tensor, src: Tensor, *, num_programs: int) -> None:
    dst.copy_(src)
    src.add_(1)


@pytest.mark.parametrize(
    ("stand_in", "right"), [(plain_copy, True), (copy_and_write_beside, False), (copy_too_little, False), (move, False)]
)
def test_a_copy_that_is_wrong_is_noticed(stand_in: Callable[..., None], right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copy_kernel, "copy_bytes", stand_in)
    case = next(case for case in cases(CPU) if case.name.startswith("copy, 17 bytes") and "at the front" in case.name)
    assert case.is_right() is right


@pytest.mark.parametrize("kind", ["contiguous", "strided", "overlapping"])
@pytest.mark.parametrize("broken", ["", "pack", "unpack"])
def test_a_packing_that_is_wrong_is_noticed(kind: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(tensors: list[Tensor], out: Tensor, *, num_programs: int) -> None:
        pack.pack_reference(tensors, out)
        out[-1] += broken == "pack"

    def unpacked(buffer: Tensor, tensors: list[Tensor], *, num_programs: int) -> None:
        pack.unpack_reference(buffer, tensors)
        if broken == "unpack":
            last = next(t for t in reversed(tensors) if t.numel())
            Tensor.view(torch.as_strided(last, (1,), (1,)), torch.uint8)[0] += 1

    monkeypatch.setattr(pack, "pack", packed)
    monkeypatch.setattr(pack, "unpack", unpacked)
    case = next(case for case in cases(CPU) if case.name.startswith(f"pack, {kind}"))
    goes_both_ways = kind != "overlapping"  # nothing is unpacked where elements share bytes
    assert case.is_right() is (not broken or (broken == "unpack" and not goes_both_ways))


def test_layouts_share_bytes_where_their_name_says_so() -> None:
    for kind, layouts in batches((0, 17, 100)).items():
        assert {_sanitized_kernels._overlaps(layout) for layout in layouts} == {kind == "overlapping"}


def test_what_a_case_raises_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise ZeroDivisionError("no such kernel")

    made = [Case("first", lambda: True), Case("broken", broken), Case("wrong", lambda: False), Case("last", lambda: True)]
    monkeypatch.setattr(_sanitized_kernels, "cases", lambda place: iter(made))
    assert check(CPU) == {"cases": 4, "wrong": ["broken: ZeroDivisionError: no such kernel", "wrong"]}
