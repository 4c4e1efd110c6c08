"""The build of the stand-in's libraries: what is missing or unknown is one sentence. No CUDA and no torch are needed here.

    build(torch_dir, headers, out)      # BuildError: "The stand-in is compiled, and g++ is not on this machine: ..."

A torch of a few lines of C stands in for the installed one: a library that imports symbols of a CUDA runtime by version.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .cuda_stand_in.build import BuildError, build, main, wanted_symbols

needs_a_compiler = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("gcc", "g++", "nm", "readelf")), reason="needs gcc, g++ and binutils"
)


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    for name in ("cuda_runtime_api.h", "cuda.h", "driver_types.h"):
        (folder / name).write_text("")
    return folder


def torch_that_imports(runtime: str, symbol: str, folder: Path) -> Path:
    """A folder whose lib/libtorch_cuda.so calls `symbol` of `runtime`."""
    torch_dir = folder / "torch"
    (torch_dir / "lib").mkdir(parents=True)
    called, caller, versions = folder / "called.c", folder / "caller.c", folder / "versions.map"
    called.write_text(f"int {symbol}() {{ return 0; }}\n")
    caller.write_text(f"int {symbol}();\nint call() {{ return {symbol}(); }}\n")
    versions.write_text(f"{runtime} {{ global: *; }};\n")
    gcc = ["gcc", "-shared", "-fPIC"]
    library = folder / runtime
    subprocess.run([*gcc, called, "-o", library, f"-Wl,-soname,{runtime}", f"-Wl,--version-script={versions}"], check=True)
    subprocess.run([*gcc, caller, library, "-o", torch_dir / "lib" / "libtorch_cuda.so"], check=True)
    return torch_dir


def test_a_machine_without_a_compiler(tmp_path: Path, headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BuildError, match=r"^The stand-in is compiled, and g\+\+ is not on this machine: install g\+\+ and binutils\.$"
    ):
        build(tmp_path, headers, tmp_path / "out")


@needs_a_compiler
def test_headers_that_are_not_there(tmp_path: Path, headers: Path) -> None:
    (headers / "cuda.h").unlink()
    with pytest.raises(BuildError, match=r"include holds no cuda\.h: it comes with the wheel nvidia-cuda-runtime\.$"):
        build(tmp_path, headers, tmp_path / "out")


@needs_a_compiler
def test_the_cpu_build_of_torch(tmp_path: Path, headers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(headers), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"{tmp_path} is no CUDA build of torch: it has no lib/libtorch_cuda.so.\n"


@needs_a_compiler
def test_a_torch_of_another_cuda_release(tmp_path: Path, headers: Path) -> None:
    torch_dir = torch_that_imports("libcudart.so.12", "cudaMalloc", tmp_path)
    with pytest.raises(
        BuildError, match=r"^This torch imports libcudart\.so\.12, and the stand-in is libcudart\.so\.13 alone\.$"
    ):
        build(torch_dir, headers, tmp_path / "out")


@needs_a_compiler
def test_the_symbols_that_a_torch_imports_are_found_by_library_and_version(tmp_path: Path) -> None:
    torch_dir = torch_that_imports("libcudart.so.13", "cudaUnheardOf", tmp_path)
    assert wanted_symbols(torch_dir) == {"libcudart.so.13": {"cudaUnheardOf@libcudart.so.13"}}


@needs_a_compiler
def test_what_the_compiler_refuses_is_said_with_the_file(tmp_path: Path, headers: Path) -> None:
    """These headers are empty."""
    torch_dir = torch_that_imports("libcudart.so.13", "cudaMalloc", tmp_path)
    with pytest.raises(BuildError, match=r"^g\+\+ failed on \w+\.cpp: .*error"):
        build(torch_dir, headers, tmp_path / "out")
