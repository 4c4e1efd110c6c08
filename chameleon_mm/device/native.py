"""Optional C++ helpers, installed or built for the present torch. Everything also works without them.

    build("memory")          # compile it, where no build fits: a quarter of a minute
    build_useful()           # ... all that this torch can use, at once: `chameleon-mm native`
    load("memory")           # the module, or None: not built for this torch, or not loadable; never compiles
    status("memory")         # the same, in words: `chameleon-mm doctor` prints it

A build is for one Python, torch, C++ ABI and source, which its file name contains. `load` searches in this order:

1. the user's cache, for this very torch. It is first because the user built it with this compiler for this torch;
2. folders `chameleon_mm_native` of `sys.path`, for a minor release of torch. `pip install 'chameleon-mm[native]'` and
   `build(name, into=...)` write there.

`memory`, `notes` and `loop` replace Python code, which is their reference. `reclaim` is called by torch's allocator. A session
uses the helpers that exist when it is made.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from chameleon_mm.errors import NativeBuildError
from chameleon_mm.files import cache_folder, make_private, read_file, write_file
from chameleon_mm.units import MIB

# --- Compile a C++ helper against the installed torch, with the user's compiler, into the user's cache
#
# A build ends with facts about its torch, their length, and the digest of everything before. The system's loader ignores these.
# A process that loads a build with missing last pages would end by SIGBUS, so the digest is compared first.
#
# Note [Patch releases]: torch keeps its C++ ABI within a minor release by custom, without a promise. A build for another patch
# release is loaded only if all headers of torch that it used have the same bytes here, except version.h.

HELPERS = ("reclaim", "memory", "notes", "loop")
"""Names of the helpers. Their sources are in this folder."""

OF_CUDA = ("reclaim", "memory", "loop")
"""Helpers that are useful only with torch's CUDA build."""

CACHE: Path | None = None
"""Folder of the user's builds; None: a folder in the user's cache."""

PACKAGE = "chameleon_mm_native"
"""Name of the folders of `sys.path` that contain builds: portions of a namespace package that no code imports."""

_COMPILE_LIMIT_S = 600
_BUILD_LIMIT_BYTES = 64 * MIB
_DIGEST_BYTES, _LENGTH_BYTES = hashlib.sha256().digest_size, 8
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
_HEADER = Path("include", "torch", "csrc", "autograd", "python_variable.h")


def folder() -> Path:
    """Return the folder of the builds. Raises as `cache_folder` does."""
    return CACHE or cache_folder() / "native"


def useful() -> list[str]:
    """Return the helpers that this torch can use. From 2.14 on, torch itself uses the dispatch key of `notes`."""
    has_key = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    return [name for name in HELPERS if (not has_key if name == "notes" else torch.version.cuda is not None)]


def release() -> str:
    """Return minor release and build of this torch, such as `2.13-cpu`. Folders of `sys.path` have one build of a helper for
    each."""
    made_for = next((kind for kind in ("cuda", "hip", "xpu") if getattr(torch.version, kind, None)), "cpu")
    return f"{'.'.join(torch.__version__.split('.')[:2])}-{made_for}"


def source_of(name: str) -> Path:
    """Return the path of the source of helper `name`. Raises `ValueError` for another name."""
    if name not in HELPERS:
        raise ValueError(f"native: expected one of {', '.join(HELPERS)}, got {name!r}")
    return Path(__file__).with_name(f"{name}.cpp")


def file_of(name: str, place: Path | None = None) -> Path:
    """Return the path of helper `name` for this Python, torch and source, even if it does not exist. `place`: None: the cache,
    for this very torch; else a folder, for the minor release. Raises as `folder` and `source_of` do."""
    key: tuple[str, ...] = (str(torch.version.debug), str(torch.compiled_with_cxx11_abi()), *_FLAGS, "with facts")
    which = f"{release()}-"
    if place is None:
        place, which, key = folder(), "", (sys.version, *_this_torch(), *key)
    digest = hashlib.sha256("\n".join((_digest_of(source_of(name)), *key)).encode()).hexdigest()[:16]
    return place / f"chameleon_mm_{name}-{which}{digest}{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


@cache
def _digest_of(source: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))).hexdigest()


def _this_torch() -> list[str]:
    return [str(torch.__version__), str(torch.version.git_version)]


def build(name: str, *, into: Path | None = None, compiler: str = "g++", again: bool = False) -> Path:
    """Return the build of the helper `name`, compiled now by `compiler` if there is none that fits, or `again`. Takes up to a
    minute. One process at a time compiles a helper; the others wait, and return its build.

    `into`: a folder that is, or will be, in `sys.path`. The build is then for the minor release of torch, and readable by all.

    Raises `NativeBuildError`: there is no such compiler, Python or torch has no headers, the folder cannot be written to, or
    the compiler refuses the source.
    """
    place = None if into is None else into / PACKAGE
    try:
        path = file_of(name, place)
        before = path.exists() and path.stat().st_mtime_ns
        if before and not again and _unfit(path) is None:
            return path
        command = [*_command(compiler), str(source_of(name))]
        if place is None:
            make_private(path.parent)  # fails before the slow compilation
        else:
            place.mkdir(parents=True, exist_ok=True)
        with _alone_with(path), tempfile.TemporaryDirectory() as made:
            if (path.exists() and path.stat().st_mtime_ns) != before:  # changed by another process, while this one waited
                return path
            fresh, used = Path(made) / path.name, Path(made) / "used"
            _compile([*command, "-MD", "-MF", str(used), "-o", str(fresh), *_libraries(name)], name, fresh)
            facts = json.dumps(_facts(used.read_text(encoding="utf-8") if used.exists() else "")).encode()
            whole = fresh.read_bytes() + facts + len(facts).to_bytes(_LENGTH_BYTES)
            write_file(path, whole + hashlib.sha256(whole).digest(), private=place is None)
    except (OSError, RuntimeError) as error:
        if isinstance(error, NativeBuildError):
            raise
        where = "the user's cache" if into is None else str(into)
        raise NativeBuildError(
            f"native: expected to write the helper {name!r} to {where}, got {error}; make that folder writable, or name "
            f"another (`chameleon-mm native --into DIR`)"
        ) from error
    return path


def build_useful(*, into: Path | None = None, compiler: str = "g++") -> dict[str, Path]:
    """Build the helpers that this torch can use, each on a core of its own, and anew if it does not load. Returns the builds by
    name. `into`, `compiler` and errors: as `build`."""
    harmed = {name: status(name).startswith("does not load") for name in useful()}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        builds = threads.map(lambda name: build(name, into=into, compiler=compiler, again=harmed[name]), harmed)
        return dict(zip(harmed, builds, strict=True))


@contextmanager
def _alone_with(path: Path) -> Iterator[None]:
    """Wait until no other process builds `path`."""
    import fcntl  # not on every system

    with path.with_name(f".{path.name}.lock").open("w", encoding="utf-8") as file:
        with suppress(OSError):  # a file system without locks: each process compiles, and the last file stays
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _facts(used: str) -> dict[str, object]:
    """Return facts about a build's torch: version, and headers among the files that the compiler `used` (a make rule)."""
    includes = Path(torch.__file__).parent / "include"
    found = {Path(path) for path in used.split() if path.startswith(str(includes)) and not path.endswith("/version.h")}
    headers = sorted(str(path.relative_to(includes)) for path in found)
    return {"torch": _this_torch(), "headers": headers, "digest": _digest_here(headers)}


def _digest_here(headers: list[str]) -> str:
    includes = Path(torch.__file__).parent / "include"
    return hashlib.sha256(b"".join((includes / header).read_bytes() for header in headers)).hexdigest()


def _command(compiler: str) -> list[str]:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NativeBuildError("native: expected a Python with its global lock, got a free-threaded one, which needs no helper")
    program = shutil.which(compiler)
    if program is None:
        raise NativeBuildError(
            f"native: expected a C++ compiler, got none named {compiler!r} on the PATH; install g++, or name another one"
        )
    of_torch, of_python = Path(torch.__file__).parent, Path(sysconfig.get_path("include"))
    for header in (of_python / "Python.h", of_torch / _HEADER):
        if not header.exists():
            raise NativeBuildError(
                f"native: expected the header {header.name}, got none in {header.parent}; install Python's development files, "
                f"and a torch that has its headers"
            )
    includes = of_torch / "include", of_torch / "include" / "torch" / "csrc" / "api" / "include", of_python
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [program, *_FLAGS, abi, *(f"-isystem{path}" for path in includes)]


def _libraries(name: str) -> list[str]:
    """Return options for the linker and for CUDA parts of a source."""
    folder = Path(torch.__file__).parent / "lib"
    # Linked even if none of its symbols is used: it loads torch's CUDA runtime.
    asks_cuda = torch.version.cuda is not None and name in (*OF_CUDA, "notes")
    of_cuda = ["-DWITH_CUDA", "-Wl,--no-as-needed", "-lc10_cuda"] if asks_cuda else []
    return [f"-L{folder}", *of_cuda, "-ltorch_python", "-ltorch_cpu", "-lc10"]


def _compile(command: list[str], name: str, target: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_LIMIT_S, check=False)
    except OSError as error:
        raise NativeBuildError(f"native: expected a program that runs, got {error} from {command[0]}") from error
    except subprocess.TimeoutExpired:
        raise NativeBuildError(f"native: expected {command[0]} to be done in {_COMPILE_LIMIT_S} s, and it was not") from None
    if done.returncode != 0 or not target.exists():
        lines = done.stderr.splitlines() or ["no word of why"]
        why = next((line for line in lines if "error" in line), lines[0])
        raise NativeBuildError(
            f"native: {command[0]} could not compile the helper {name!r} for torch {torch.__version__}: {why}; "
            f"all works without it"
        )


# --- Load a C++ helper that was built earlier. It never compiles and never fails: a helper that does not load is absent


_log = logging.getLogger(__name__)

_loaded: dict[Path, ModuleType] = {}
_said: set[Path] = set()
"""Builds for which the log already has a load failure."""


def load(name: str) -> ModuleType | None:
    """Return helper `name`; None if it is not built for this torch or does not load. Raises `ValueError` for another name."""
    found = _find(name)
    return found if isinstance(found, ModuleType) else None


def status(name: str) -> str:
    """Return "active" if new sessions use helper `name`, else the reason why not. Raises `ValueError` for another name."""
    found = _find(name)
    return found if isinstance(found, str) else "active"


def _find(name: str) -> ModuleType | str:
    """Return the helper, or the reason why there is none."""
    why, paths = "not built for this torch (`chameleon-mm native` builds it)", []
    portions = importlib.util.find_spec(PACKAGE)
    for place in (None, *(() if portions is None else portions.submodule_search_locations or ())):
        try:
            paths.append(file_of(name, None if place is None else Path(place)))
        except (OSError, RuntimeError) as error:  # no home folder, or not readable
            why = f"not built: {error}"
    for path in sorted(paths, key=lambda path: path not in _loaded):  # two loaded builds of one helper would register twice
        if path not in _loaded and not path.exists():
            continue
        found = _loaded.get(path) or _import(name, path)
        if isinstance(found, ModuleType):
            _loaded[path] = found
            return found
        why = found  # not cached: it may be built later
        if path not in _said:
            _said.add(path)
            _log.warning("chameleon_mm: the C++ helper %r %s; all works without it", name, found)
    return why


def _unfit(path: Path) -> str | None:
    """Return why the build at `path` cannot be used with this torch; None: it can. Raises `OSError`."""
    # Like Python, trust code in `sys.path`. A file of the cache is checked: Note [Own files] in `files`.
    build = path.read_bytes() if path.parent.name == PACKAGE else read_file(path, _BUILD_LIMIT_BYTES)
    build, digest = build[:-_DIGEST_BYTES], build[-_DIGEST_BYTES:]
    if hashlib.sha256(build).digest() != digest:
        return "it is cut short or changed (`chameleon-mm native` builds it anew)"
    length = int.from_bytes(build[-_LENGTH_BYTES:])
    facts = json.loads(build[-_LENGTH_BYTES - length : -_LENGTH_BYTES])
    if facts["torch"] == _this_torch():
        return None
    with suppress(OSError):  # a header is missing here
        if facts["headers"] and _digest_here(facts["headers"]) == facts["digest"]:
            return None
    return f"it is for torch {facts['torch'][0]}, whose headers differ from those of {torch.__version__}"


def _import(name: str, path: Path) -> ModuleType | str:
    # pybind11 finds its modules by their whole name, so two builds of a helper need different names.
    loader = importlib.machinery.ExtensionFileLoader(f"{path.stem}.chameleon_mm_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        if (why := _unfit(path)) is not None:
            return f"does not load: {why}"
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - any error: a session then begins without the helper
        return f"does not load: {error}"
    return module
