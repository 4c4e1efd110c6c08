"""The C++ helpers: how they are built, and that nothing needs them."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import IO

import pytest
import torch

from chameleon_mm.device import native
from chameleon_mm.errors import NativeBuildError
from chameleon_mm.files import write_file
from chameleon_mm.tools import cli
from tests._native import helper


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of builds that has none, for one helper."""
    monkeypatch.setattr(native, "CACHE", tmp_path / "builds")
    monkeypatch.setattr(native, "useful", lambda: ["memory"])
    return tmp_path / "builds"


# --- building


def script(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_a_sentence_and_all_works(empty: Path) -> None:
    with pytest.raises(NativeBuildError, match=r"expected a C\+\+ compiler, got none named 'no-such'.*install g\+\+"):
        native.build("memory", compiler="no-such")
    assert native.load("memory") is None
    assert native.status("memory") == "not built for this torch (`chameleon-mm native` builds it)"
    assert not empty.exists()


@pytest.mark.parametrize(
    ("lines", "words"),
    [("echo 'x.cpp:1:2: error: no such type' >&2; exit 1", "1:2: error: no such type"), ("exit 0", "no word of why")],
)
def test_a_compiler_that_fails_leaves_nothing(lines: str, words: str, empty: Path, tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match=f"could not compile the helper 'memory' for torch .*{words}; all works without"):
        native.build("memory", compiler=script(tmp_path / "compiler", lines))
    assert [path.suffix for path in empty.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_written_to_is_named(empty: Path, tmp_path: Path) -> None:
    empty.write_text("a file where the folder would be")
    with pytest.raises(NativeBuildError, match=r"expected to write the helper 'memory' to .*make that folder writable"):
        native.build("memory", compiler=script(tmp_path / "compiler", "exit 0"))


def test_a_torch_without_headers_is_named(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_HEADER", Path("no-such.h"))
    with pytest.raises(NativeBuildError, match=r"expected the header no-such\.h, got none in"):
        native.build("memory", compiler="sh")


def test_an_unknown_helper_is_refused() -> None:
    for ask in (native.build, native.load, native.status):
        with pytest.raises(ValueError, match="native: expected one of reclaim, memory, notes, loop, got 'stay'"):
            ask("stay")


def test_a_build_is_made_once_for_each_torch(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = script(tmp_path / "compiler", f'echo once >> {tmp_path}/log; while [ "$1" != -o ]; do shift; done; echo > "$2"')
    first = native.build("memory", compiler=copies)
    assert native.build("memory", compiler="no-such") == first
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert native.status("memory").startswith("not built for this torch")
    assert native.build("memory", compiler=copies) != first
    assert (tmp_path / "log").read_text() == "once\nonce\n"
    assert len(list(empty.glob("*.so"))) == 2


def test_a_build_that_does_not_load_is_absent(empty: Path, tmp_path: Path) -> None:
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    native.build("memory", compiler=copies)
    assert native.load("memory") is None
    assert native.status("memory").startswith("does not load: ")


def test_of_two_processes_that_build_one_compiles(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "go")
    lines = f'echo once >> {tmp_path}/log; cat {tmp_path}/go; while [ "$1" != -o ]; do shift; done; echo > "$2"'
    compiler, waits, lock = script(tmp_path / "compiler", lines), Semaphore(0), fcntl.flock

    def flock(file: IO[str], how: int) -> None:
        waits.release()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with ThreadPoolExecutor() as threads:  # a lock is of an open file: threads wait as processes do
        built = [threads.submit(native.build, "memory", compiler=compiler, again=True) for _ in range(2)]
        assert waits.acquire(timeout=60) and waits.acquire(timeout=60)
        (tmp_path / "go").write_text("on")
        assert len({done.result() for done in built}) == 1
    assert (tmp_path / "log").read_text() == "once\n"


def test_another_patch_release_takes_a_build_whose_headers_are_the_same(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torchs = tmp_path / "torch"
    header, version = torchs / "include" / "c10.h", torchs / "include" / "torch" / "version.h"
    for path in (header, version, torchs / native._HEADER):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    monkeypatch.setattr(torch, "__file__", str(torchs / "__init__.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = f'echo "x: {header} {version} /usr/include/stdio.h" > "$2"'
    compiler = script(tmp_path / "c++", f'while [ "$1" != -MF ]; do shift; done; {rule}; echo >> {tmp_path}/log; echo > "$4"')
    built, minor = native.build("memory", into=tmp_path, compiler=compiler), ".".join(torch.__version__.split(".")[:2])
    assert built.parent == tmp_path / native.PACKAGE and f"-{native.release()}-" in built.name
    assert built.stat().st_mode & 0o444 == 0o444  # for all users

    monkeypatch.setattr(torch, "__version__", f"{minor}.99")
    version.write_text("after")
    assert "headers" not in native.status("memory")  # it fits, and is no library: the loader of the system says so
    assert native.build("memory", into=tmp_path, compiler="no-such") == built
    header.write_text("after")
    caplog.clear()
    native._said.clear()
    for _ in range(2):
        assert re.match(
            rf"does not load: it is for torch {minor}.*, whose headers differ from those of {minor}\.99",
            native.status("memory"),
        )
    assert len(caplog.records) == 1
    assert native.build("memory", into=tmp_path, compiler=compiler) == built
    assert "headers" not in native.status("memory")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert native.status("memory").startswith("not built for this torch")


@pytest.mark.slow
def test_a_build_of_the_user_is_taken_before_one_of_sys_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper("notes", monkeypatch)
    own, place = native.file_of("notes"), tmp_path / "chameleon_mm_native"
    place.mkdir(mode=0o777)
    shared = native.file_of("notes", place)
    shared.write_bytes(own.read_bytes())
    shared.chmod(0o666)  # trusted as all code of sys.path
    for caches, taken in (([own.parent], own), ([tmp_path, own.parent], shared)):  # one in use stays
        path = f"{tmp_path}:{Path(native.__file__).parents[2]}"
        done = subprocess.run(
            [sys.executable, "-c", FINDS, *caches],
            env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.splitlines() == [str(taken)] * len(caches), done.stderr


FINDS = """
import sys
from pathlib import Path
from chameleon_mm.device import native
for native.CACHE in map(Path, sys.argv[1:]):
    print(native.load("notes").__file__)
"""

LOADS = """
import sys
from pathlib import Path
from chameleon_mm.device import native
native.CACHE = Path(sys.argv[1])
print(native.load("notes"), native.status("notes"))
"""


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: os.truncate(path, 4096), "cut short or changed"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "cut short or changed"),
        (lambda path: os.truncate(path, 1 << 40), "67108864 bytes at most"),
        (lambda path: path.write_bytes(b"\x7fELF" + bytes(10_000)), "cut short or changed"),
        (lambda path: path.chmod(0o666), "only this user can change"),
        (fifo, "expected a regular file"),
        (lambda path: path.rename(path.with_name("moved")) and path.symlink_to("moved"), "symbolic link"),
        (lambda path: path.parent.chmod(0o777), "only this user can change"),
    ],
)
def test_a_build_that_was_harmed_ends_no_process(
    harm: Callable[[Path], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper("notes", monkeypatch)
    build = tmp_path / "builds" / native.file_of("notes").name
    write_file(build, native.file_of("notes").read_bytes(), private=True)
    harm(build)
    ran = subprocess.run([sys.executable, "-c", LOADS, str(build.parent)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert ran.stdout.startswith("None does not load: ") and words in ran.stdout
    build.parent.chmod(0o700)  # a folder that others can change is refused when it is written to as well
    monkeypatch.setattr(native, "CACHE", build.parent)
    native.build("notes", again=True, compiler=script(tmp_path / "c++", 'while [ "$1" != -o ]; do shift; done; echo > "$2"'))
    assert stat.S_ISREG(build.lstat().st_mode)
    assert native.status("notes").startswith("does not load: ") and words not in native.status("notes")


def test_a_build_that_does_not_load_is_built_anew(empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    native.build("memory", compiler=copies)
    assert cli.main(["native", "--compiler", "no-such"]) == 1
    assert "expected a C++ compiler" in capsys.readouterr().err
    with pytest.raises(NativeBuildError, match="expected a program that runs"):
        (tmp_path / "no-program").write_text("neither a script nor a binary")
        (tmp_path / "no-program").chmod(0o755)
        native.build("memory", compiler=str(tmp_path / "no-program"), again=True)


def test_the_command_builds(empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    assert cli.main(["native", "--compiler", "no-such"]) == 1
    assert "expected a C++ compiler" in capsys.readouterr().err
    assert cli.main(["native", "--compiler", copies]) == 0
    assert "memory: does not load" in capsys.readouterr().out
    assert [path.name for path in empty.glob("*.so")] == [native.file_of("memory").name]


def test_only_helpers_that_torch_can_use_are_built(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for cuda, version, useful in (("13.0", "2.13.1", native.HELPERS), ("13.0", "2.14.1", native.OF_CUDA), (None, "2.14.1", ())):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", version)
        assert set(native.useful()) == set(useful)
    assert cli.main(["native", "--compiler", "no-such"]) == 0
    assert "nothing to build: no helper is of use with torch 2.14-cpu" in capsys.readouterr().out


def test_the_command_builds_into_a_folder_of_sys_path(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    copies = script(tmp_path / "compiler", 'while [ "$1" != -o ]; do shift; done; echo garbage > "$2"')
    for hint in (True, False):
        assert cli.main(["native", "--compiler", copies, "--into", str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert "memory: does not load" in told  # it is looked for there
        assert (f"PYTHONPATH={tmp_path}" in told) is hint
    assert [path.name for path in (tmp_path / native.PACKAGE).glob("*.so")] == [native.file_of("memory", empty).name]
    assert not empty.exists()
