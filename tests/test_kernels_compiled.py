"""Every kernel compiled ahead of time, without a GPU: the width of its accesses, its registers, and no spills.

The compiler runs in a process of its own: it would leave its mark on every other test of this one. So does the interpreter,
which runs the kernels' numerics.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CAPABILITIES = [80, 90, 100]

# Kernel -> (16-byte loads, 16-byte stores, most registers). 0 where a step's shorter side has less than 16 bytes a thread.
# 256 threads of 128 registers are two programs on a multiprocessor, of 80 three, of 64 four.
KERNELS: dict[str, tuple[int, int, int]] = {
    "pack": (4, 4, 64),
    "unpack": (4, 4, 64),
    "checksum": (0, 0, 128),
}

COMPILED = """
import json, pathlib, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from chameleon_mm.kernels import checksum, pack_kernels as pack

packed = {"table": "*i64", "staging": "*u8", "rows": "i64", "items": "i64", "nbytes": "i64"}
kernels = {
    "pack": (pack.pack_kernel, packed, {"BLOCK": pack.BLOCK_BYTES}),
    "unpack": (pack.unpack_kernel, packed, {"BLOCK": pack.BLOCK_BYTES}),
    "checksum": (
        checksum.checksum_kernel,
        {"src": "*u8", "out": "*i64", "nbytes": "i64"},
        {"BLOCK": checksum.BLOCK_WORDS, "STEP": checksum.STEP, "FIRST": checksum.FIRST, "SECOND": checksum.SECOND},
    ),
}

report = {}
for name, (kernel, types, constants) in kernels.items():
    sizes = [p for p in kernel.params if not p.is_constexpr and not types[p.name].startswith("*")]
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants, aligned)
    options = {"num_warps": 8, "enable_fp_fusion": False}
    binary = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    cubin = pathlib.Path(sys.argv[2], name + ".cubin")
    cubin.write_bytes(binary.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    report[name] = {
        "ptx": binary.asm["ptx"],
        "usage": {what: int(n) for what, n in re.findall(r"(REG|STACK|LOCAL):(\\d+)", usage)},
        "sizes": {p.name: [p.do_not_specialize, p.annotation_type] for p in sizes},
    }
print(json.dumps(report))
"""


@pytest.fixture(scope="module", params=CAPABILITIES)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("triton")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", COMPILED, str(request.param), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return report


@pytest.mark.slow
def test_every_kernel_is_in_the_table(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled.keys() == KERNELS.keys()
    defined = [
        name
        for path in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    entries = {re.findall(r"\.entry (\w+)", kernel["ptx"])[0] for kernel in compiled.values()}
    assert entries == set(defined)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_was_compiled_to(compiled: dict[str, dict[str, Any]], name: str) -> None:
    ptx, usage, sizes = (compiled[name][key] for key in ("ptx", "usage", "sizes"))
    loads, stores, registers = KERNELS[name]
    wide = re.findall(r"\b(ld|st)\.global\.(?:v4\.b32|v2\.b64)\b", ptx)
    assert (wide.count("ld"), wide.count("st")) == (loads, stores), "accesses of the aligned path are sixteen bytes wide"
    assert name == "checksum" or re.findall(r"\b(?:ld|st)\.shared\S*", ptx) == [], "packing needs no shared memory"
    assert 0 < usage["REG"] <= registers
    assert usage["STACK"] == usage["LOCAL"] == 0  # the place for values that registers cannot hold
    assert sizes
    # Neither by their value (1, a multiple of 16), nor by whether they fit 32 bits: the annotation settles that.
    assert set(map(tuple, sizes.values())) <= {(True, "i64"), (True, "i32")}, "sizes do not recompile"


# --- under Triton's interpreter

# It is switched on by an environment variable that Triton reads when a kernel is defined, and would leave its mark on every
# other test of this process. The tests themselves have the parameter "interpreter"; on a machine with a GPU the same ones run
# there too.


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is what runs this process")
def test_kernels_are_exact_under_the_interpreter() -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels_exact.py",
        "-k", "interpreter", "-m", "not slow",
    ]  # fmt: skip
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 0
    assert "skipped" not in done.stdout
