"""The build of the stand-in's libraries for one CUDA build of torch: a few seconds with g++.

    build(torch_dir, headers, out)

    wanted = symbols that torch's libraries import, by library            # readelf, nm
    libcuda.so.1, libcudart.so.13 = runtime/*.cpp + an answer "not there" for each wanted symbol that nobody wrote
    every other library = a stub whose symbols name themselves and fail

TORCH_DIR is the installed package's folder (.../site-packages/torch), HEADERS the folder of cuda_runtime_api.h and cuda.h, OUT
where torch looks for its libraries: .../site-packages/nvidia/cu13/lib, which its libraries name in their rpath.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
RUNTIME = "libcudart.so.13"
DRIVER = "libcuda.so.1"

# Libraries whose symbols carry no version: known by how their functions begin.
BY_PREFIX = {
    "nccl": "libnccl.so.2",
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nvshmem": "libnvshmem_host.so.3",
}

COMPILER = ["g++", "-O2", "-g1", "-std=c++17", "-fPIC", "-Wall", "-Werror"]

# Texts that PyTorch prints or compares are worded as in the real runtime. All others are the error's name.
ERROR_TEXTS = {
    "cudaSuccess": "no error",
    "cudaErrorInvalidValue": "invalid argument",
    "cudaErrorMemoryAllocation": "out of memory",
    "cudaErrorNotReady": "device not ready",
    "cudaErrorInvalidDevice": "invalid device ordinal",
    "cudaErrorNotSupported": "operation not supported",
    "cudaErrorNoDevice": "no CUDA-capable device is detected",
    "cudaErrorHostMemoryAlreadyRegistered": "part or all of the requested memory range is already mapped",
    "cudaErrorHostMemoryNotRegistered": "pointer does not correspond to a registered memory region",
    "cudaErrorNoKernelImageForDevice": "no kernel image is available for execution on the device",
    "cudaErrorStreamCaptureUnsupported": "operation not permitted when stream is capturing",
    "cudaErrorStreamCaptureInvalidated": "operation failed due to a previous error during capture",
    "cudaErrorStreamCaptureMerge": "operation would result in a merge of separate capture sequences",
    "cudaErrorStreamCaptureUnmatched": "capture was not ended in the same stream as it began",
    "cudaErrorStreamCaptureUnjoined": "capturing stream has unjoined work",
    "cudaErrorStreamCaptureIsolation": "dependency created on uncaptured work in another stream",
    "cudaErrorStreamCaptureImplicit": "operation would make the legacy stream depend on a capturing blocking stream",
    "cudaErrorCapturedEvent": "operation not permitted on an event last recorded in a capturing stream",
    "cudaErrorStreamCaptureWrongThread": "attempt to terminate a thread-local capture sequence from another thread",
}


class BuildError(RuntimeError):
    """Reason why the libraries cannot be built, in one sentence."""


def build(torch_dir: Path, headers: Path, out: Path) -> list[str]:
    """Builds every library that this torch needs into `out`. Returns the runtime's symbols that answer "not there"."""
    for tool in ("g++", "gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise BuildError(f"The stand-in is compiled, and {tool} is not on this machine: install g++ and binutils.")
    for header in ("cuda_runtime_api.h", "cuda.h", "driver_types.h"):
        if not (headers / header).is_file():
            raise BuildError(f"{headers} holds no {header}: it comes with the wheel nvidia-cuda-runtime.")
    wanted = wanted_symbols(torch_dir)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for library, symbols in sorted(wanted.items()):
            if library not in {RUNTIME, DRIVER}:
                _build_stub(library, symbols, work, out)
        return _build_runtime({_bare(symbol) for symbol in wanted[RUNTIME]}, headers, work, out)


def wanted_symbols(torch_dir: Path) -> dict[str, set[str]]:
    """Symbols that torch's libraries import from CUDA's, by library, as `name` or `name@version`."""
    libraries = [*sorted(torch_dir.glob("lib/*.so")), *sorted(torch_dir.glob("_C*.so"))]
    if not (torch_dir / "lib" / "libtorch_cuda.so").is_file():
        raise BuildError(f"{torch_dir} is no CUDA build of torch: it has no lib/libtorch_cuda.so.")
    wanted: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        for needed in re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv)[^\]]*)\]", _run("readelf", "-d", library)):
            _ = wanted[needed]  # a library of which no symbol is used must be there, too
        for line in _run("nm", "-D", "--undefined-only", library).splitlines():
            symbol = line.split()[-1]
            name, _, version = symbol.partition("@")
            if version.startswith(("libcu", "libnv")):
                wanted[version].add(symbol)
            elif version == "NVSHMEM":
                wanted["libnvshmem_host.so.3"].add(symbol)
            elif not version:
                for prefix, known in BY_PREFIX.items():
                    if name.startswith(prefix):
                        wanted[known].add(symbol)
    runtimes = sorted(name for name in wanted if name.startswith("libcudart"))
    if runtimes != [RUNTIME]:
        raise BuildError(f"This torch imports {', '.join(runtimes) or 'no CUDA runtime'}, and the stand-in is {RUNTIME} alone.")
    if not wanted[RUNTIME]:
        raise BuildError(f"This torch imports no symbol of {RUNTIME}, so it is not linked as the stand-in expects.")
    return wanted


def _bare(symbol: str) -> str:
    return symbol.partition("@")[0]


def _run(*command: str | Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        raise BuildError(f"{words[0]} failed on {Path(words[-1]).name}: {lines[0]}")
    return done.stdout


def _build_stub(library: str, symbols: set[str], work: Path, out: Path) -> None:
    """Builds a library whose functions pass their own name to one that reports it and answers 1, an error everywhere."""
    names = sorted({_bare(symbol) for symbol in symbols})
    lines = [".text"]
    for i, name in enumerate(names):
        lines += [f".globl {name}", f".type {name},@function", f"{name}: lea name{i}(%rip),%rdi", "jmp standin_stub"]
    lines += [".section .rodata", *(f'name{i}: .asciz "{name}"' for i, name in enumerate(names))]
    lines += ['.section .note.GNU-stack,"",@progbits']
    assembly, versions = work / "names.s", work / "versions.map"
    assembly.write_text("\n".join(lines) + "\n")
    tags = sorted({symbol.partition("@")[2] for symbol in symbols} - {""})
    versions.write_text(f"{tags[0] + ' ' if tags else ''}{{ global: *; }};\n")
    _run("gcc", "-shared", "-fPIC", "-O1", f'-DLIBRARY="{library}"', assembly, SOURCES / "stub.c", f"-Wl,-soname,{library}",
         f"-Wl,--version-script={versions}", "-o", out / library)  # fmt: skip


def _build_runtime(wanted: set[str], headers: Path, work: Path, out: Path) -> list[str]:
    """Builds libcuda.so.1 and libcudart.so.13; returns the wanted symbols that are not there."""
    (work / "errors.inc").write_text(_error_table(headers))
    sources = [source for source in sorted(SOURCES.glob("*.cpp")) if source.name != "driver.cpp"]
    text = "\n".join(source.read_text() for source in sources)
    defined = set(re.findall(r"^API [^;{=]*?\b(\w+)\(", text, flags=re.MULTILINE))
    not_there = sorted(wanted - defined)
    missing = work / "not_there.cpp"
    missing.write_text("#include <cstdio>\n" + "".join(
        f'extern "C" __attribute__((visibility("default"))) int {name}() {{\n'
        f'  fprintf(stderr, "CUDA stand-in: {name} is not there\\n");\n  return 801;\n}}\n' for name in not_there
    ))  # fmt: skip
    versions = work / "runtime.map"
    versions.write_text(f"{RUNTIME} {{ global: cuda*; __cuda*; standin_*; local: *; }};\n")
    compiler = [*COMPILER, f"-I{headers}", f"-I{SOURCES}", f"-I{work}"]
    objects = {source: work / f"{source.stem}.o" for source in [*sources, missing]}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a compiler's process
        list(pool.map(lambda source: _run(*compiler, "-fvisibility=hidden", "-c", "-o", objects[source], source), objects))
    # The two libraries need each other: a process that loads one has both, and finds the other by its name. A symbol that
    # neither has is an error here (-z defs), not at the first call.
    linked: list[str | Path] = ["-Wl,-z,defs", "-Wl,--no-as-needed", f"-L{out}", "-Wl,-rpath,$ORIGIN"]
    driver: list[str | Path] = [*compiler, "-shared", f"-Wl,-soname,{DRIVER}", "-o", out / DRIVER, SOURCES / "driver.cpp"]
    runtime: list[str | Path] = ["g++", "-shared", f"-Wl,-soname,{RUNTIME}", f"-Wl,--version-script={versions}"]
    _run(*driver)
    _run(*runtime, *objects.values(), *linked, f"-l:{DRIVER}", "-ldl", "-lpthread", "-o", out / RUNTIME)
    _run(*driver, *linked, f"-l:{RUNTIME}")
    return not_there


def _error_table(headers: Path) -> str:
    text = (headers / "driver_types.h").read_text()
    codes = dict(re.findall(r"^\s*(cuda(?:Success|Error\w+))\s*=\s*(\d+)", text, flags=re.MULTILINE))
    return "".join(f'{{{code}, "{name}", "{ERROR_TEXTS.get(name, name)}"}},\n' for name, code in codes.items())
