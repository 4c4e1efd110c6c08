"""The copy kernel: exact under Triton's interpreter and on a GPU, 16 bytes wide and free of spills when compiled ahead of time.

Interpreter and compiler run in processes of their own: the interpreter is switched on by an environment variable that Triton
reads when the kernel is defined, and both would leave their mark on every other test of this process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097)
OFFSETS = ((0, 0), (3, 3), (0, 5), (9, 2))  # of source and destination from a 16-byte boundary
CANARY_BYTES = 64
CAPABILITIES = (80, 90, 100)

INTERPRETED = """
import json, sys
from chameleon_mm.kernels.copy import copy_bytes
from test_kernels_copy import copied_exactly
print(json.dumps([copied_exactly(*case, copy_bytes) for case in json.loads(sys.argv[1])]))
"""

COMPILED = """
import json, pathlib, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from chameleon_mm.kernels.copy import BLOCK_BYTES, NUM_WARPS, UNIT_BYTES, copy_kernel
types = {"dst": "*u8", "src": "*u8", "head": "i32", "nbytes": "i64", "WIDE": "constexpr", "BLOCK": "constexpr"}
aligned = [["tt.divisibility", UNIT_BYTES]]
report = {}
for capability in json.loads(sys.argv[1]):
    source = ASTSource(copy_kernel, types, {"WIDE": True, "BLOCK": BLOCK_BYTES}, {(0,): aligned, (1,): aligned})
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = pathlib.Path(sys.argv[2], f"{capability}.cubin")
    cubin.write_bytes(kernel.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    report[capability] = {"ptx": kernel.asm["ptx"], "usage": dict(re.findall(r"(REG|STACK|LOCAL):(\\d+)", usage))}
print(json.dumps(report))
"""


def copied_exactly(
    nbytes: int,
    src_offset: int,
    dst_offset: int,
    num_programs: int,
    copy: Callable[..., None],
    place_src: Callable[[Tensor], Tensor] = Tensor.clone,
    place_dst: Callable[[Tensor], Tensor] = Tensor.clone,
) -> bool:
    """Whether `copy` moved exactly the bytes asked for: none of the canaries around them, and none of the source."""
    source, before = torch.randint(0, 256, (2, nbytes + 2 * CANARY_BYTES), dtype=torch.uint8)
    src, dst = place_src(source), place_dst(before)
    s, d = -src.data_ptr() % 16 + src_offset, -dst.data_ptr() % 16 + dst_offset
    expected = before.clone()
    expected[d : d + nbytes] = source[s : s + nbytes]
    copy(dst[d : d + nbytes], src[s : s + nbytes], num_programs=num_programs, block_bytes=1024)
    return torch.equal(dst.cpu(), expected) and torch.equal(src.cpu(), source)


def in_process(script: str, argument: Any, tmp_path: Path, **variables: str) -> Any:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path), **variables}
    command = [sys.executable, "-c", script, json.dumps(argument), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cases() -> list[tuple[int, int, int, int]]:
    return [(n, src, dst, programs) for n in SIZES for src, dst in OFFSETS for programs in (1, 3)]


def test_interpreted_copies_are_exact(tmp_path: Path) -> None:
    exact = in_process(INTERPRETED, cases(), tmp_path, TRITON_INTERPRET="1")
    assert [case for case, is_exact in zip(cases(), exact, strict=True) if not is_exact] == []


def test_a_copy_that_touches_a_canary_is_noticed() -> None:
    def one_byte_more(dst: Tensor, src: Tensor, **_: int) -> None:
        dst.copy_(src)
        torch.as_strided(dst, (1,), (1,), dst.storage_offset() + dst.numel()).add_(1)

    def one_byte_less(dst: Tensor, src: Tensor, **_: int) -> None:
        dst[:-1] = src[:-1]
        dst[-1] = src[-1] + 1

    assert not copied_exactly(17, 0, 0, 1, one_byte_more)
    assert not copied_exactly(17, 0, 0, 1, one_byte_less)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    report: dict[str, dict[str, Any]] = in_process(COMPILED, CAPABILITIES, tmp_path_factory.mktemp("triton"))
    return report


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_accesses_are_sixteen_bytes_wide(compiled: dict[str, dict[str, Any]], capability: int) -> None:
    ptx = compiled[str(capability)]["ptx"]
    accesses = re.findall(r"\b(ld|st)\.global\S*", ptx)
    wide = re.findall(r"\b(ld|st)\.global\.v4\.b32\b", ptx)
    edges = re.findall(r"\b(ld|st)\.global\.b8\b", ptx)
    assert wide.count("ld") == wide.count("st") == 4  # 16 KiB by 256 threads
    assert edges.count("ld") == edges.count("st") == 2  # head and tail
    assert len(accesses) == len(wide) + len(edges)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernel_does_not_spill(compiled: dict[str, dict[str, Any]], capability: int) -> None:
    usage = compiled[str(capability)]["usage"]
    assert int(usage["REG"]) > 0  # a kernel was found in the binary
    assert usage["STACK"] == usage["LOCAL"] == "0"  # where the assembler would put what registers cannot hold


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("place_src", "place_dst"),
    [(Tensor.pin_memory, Tensor.cuda), (Tensor.cuda, Tensor.pin_memory), (Tensor.cuda, Tensor.cuda)],
    ids=["h2d", "d2h", "d2d"],
)
def test_copies_on_a_gpu_are_exact(place_src: Callable[[Tensor], Tensor], place_dst: Callable[[Tensor], Tensor]) -> None:
    from chameleon_mm.kernels.copy import copy_bytes

    def copy_and_wait(dst: Tensor, src: Tensor, **options: int) -> None:
        copy_bytes(dst, src, **options)
        torch.cuda.synchronize()

    wanted = [*cases(), (1 << 20, 5, 5, 8)]
    assert [case for case in wanted if not copied_exactly(*case, copy_and_wait, place_src, place_dst)] == []


@pytest.mark.parametrize(
    ("dst", "src", "options", "message"),
    [
        (torch.zeros(4), torch.zeros(4), {}, "flat, contiguous uint8"),
        (torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(4, dtype=torch.uint8), {}, "flat, contiguous uint8"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8), {}, "equal sizes, got 5 bytes into 4"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), {"num_programs": 0}, "num_programs >= 1"),
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8), {"block_bytes": 100}, "power of two"),
    ],
)
def test_bad_arguments_are_refused(dst: Tensor, src: Tensor, options: dict[str, int], message: str) -> None:
    from chameleon_mm.kernels.copy import copy_bytes

    with pytest.raises(ValueError, match=message):
        copy_bytes(dst, src, **{"num_programs": 1, **options})


def test_launch_metadata_carries_the_bytes_read_and_written() -> None:
    from types import SimpleNamespace

    from chameleon_mm.kernels.copy import copy_kernel

    told = copy_kernel.launch_metadata((4, 1, 1), SimpleNamespace(name="copy_kernel"), {"head": 3, "nbytes": 97})
    assert told == {"name": "copy_kernel_100B", "bytes": 200}


def test_reference_copies() -> None:
    from chameleon_mm.kernels.copy import copy_bytes_reference

    assert copied_exactly(17, 1, 2, 1, lambda dst, src, **_: copy_bytes_reference(dst, src))
