"""The optional C++ helpers: built on request for the torch that is installed, and used from then on; without them all works.

    build("memory")          # compile it, where no build fits: a quarter of a minute. `chameleon-mm native` builds them all
    load("memory")           # the module, or None: not built for this torch, or not loadable; never compiles
    status("memory")         # the same, in words: `chameleon-mm doctor` prints it

A build is made for one Python, one torch, one C++ ABI and one source, and the name of its file says which: after an update of
any of them there is none, until it is built again. `memory`, `notes` and `loop` do the work of Python code, which is their
reference; `reclaim` is what torch's allocator calls. Sessions use what is built when they are made.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from chameleon_mm.errors import NativeBuildError
from chameleon_mm.files import cache_folder, make_private, read_file, write_file
from chameleon_mm.units import MIB

# --- Compiles a C++ helper against the installed torch, with the user's own compiler, into the user's cache
#
# A build ends with the digest of what is before it, which the loader of the system passes over. A process that loads a build
# whose last pages are missing would end by SIGBUS, so the digest is compared first: Note [Own files] in `files`.

HELPERS = ("reclaim", "memory", "notes", "loop")
"""Names of the helpers. The source of each lies beside this file."""

OF_CUDA = ("reclaim", "memory", "loop")
"""Those that are of use with torch's CUDA build alone."""

CACHE: Path | None = None
"""Folder of the builds; None: a folder of the user's cache."""

_COMPILE_LIMIT_S = 600
_BUILD_LIMIT_BYTES = 64 * MIB
_DIGEST_BYTES = hashlib.sha256().digest_size
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
_HEADER = Path("include", "torch", "csrc", "autograd", "python_variable.h")


def folder() -> Path:
    """Folder of the builds. Raises as `cache_folder` does."""
    return CACHE or cache_folder() / "native"


def useful() -> list[str]:
    return [name for name in HELPERS if name not in OF_CUDA or torch.version.cuda is not None]


def source_of(name: str) -> Path:
    """Source of the helper `name`. Raises `ValueError` for another name."""
    if name not in HELPERS:
        raise ValueError(f"native: expected one of {', '.join(HELPERS)}, got {name!r}")
    return Path(__file__).with_name(f"{name}.cpp")


def file_of(name: str) -> Path:
    """The build of the helper `name` for this Python, this torch and this source, there or not. Raises as `folder` and
    `source_of` do."""
    of_torch = torch.__version__, str(torch.version.git_version), str(torch.version.debug), str(torch.compiled_with_cxx11_abi())
    key = "\n".join((sys.version, *of_torch, *_FLAGS, "with its digest"))
    source = source_of(name)
    headers = sorted(source.parent.glob("*.h"))
    digest = hashlib.sha256(b"".join((key.encode(), *(path.read_bytes() for path in (source, *headers))))).hexdigest()[:16]
    return folder() / f"chameleon_mm_{name}-{digest}{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def build(name: str, *, compiler: str = "g++", again: bool = False) -> Path:
    """Return the build of the helper `name`, compiled now by `compiler` if there is none, or `again`. Takes up to a minute.

    Raises `NativeBuildError`: there is no such compiler, Python or torch has no headers, the folder cannot be written to, or
    the compiler refuses the source.
    """
    try:
        path = file_of(name)
        if path.exists() and not again:
            return path
        command = [*_command(compiler), str(source_of(name))]
        make_private(path.parent)  # fails before the compiler takes its time
        with tempfile.TemporaryDirectory() as made:
            fresh = Path(made) / path.name
            _compile([*command, "-o", str(fresh), *_libraries(name)], name, fresh)
            whole = fresh.read_bytes()
        write_file(path, whole + hashlib.sha256(whole).digest(), private=True)
    except (OSError, RuntimeError) as error:
        if isinstance(error, NativeBuildError):
            raise
        raise NativeBuildError(
            f"native: expected to write the helper {name!r} to the user's cache, got {error}; make that folder writable"
        ) from error
    return path


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
    """Options for the linker, and for the parts of a source that are for CUDA."""
    folder = Path(torch.__file__).parent / "lib"
    # Needed whether or not anything of it is called by name: it brings the runtime that torch uses.
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


# --- Loads a C++ helper that was built before. Compiles nothing and never fails: a helper that does not load is absent


_log = logging.getLogger(__name__)

_loaded: dict[Path, ModuleType] = {}
_said: set[Path] = set()
"""Builds of which the log has that they do not load."""


def load(name: str) -> ModuleType | None:
    """The helper `name`; None where it is not built for this torch, or does not load. Raises `ValueError` for another name."""
    found = _find(name)
    return found if isinstance(found, ModuleType) else None


def status(name: str) -> str:
    """Return "active" if new sessions use the helper `name`, else why not. Raises `ValueError` for another name."""
    found = _find(name)
    return found if isinstance(found, str) else "active"


def _find(name: str) -> ModuleType | str:
    """The helper, or why there is none."""
    try:
        path = file_of(name)
        if path not in _loaded:
            if not path.exists():
                return "not built for this torch (`chameleon-mm native` builds it)"
            found = _import(name, path)
            if isinstance(found, str):  # asked again the next time: it may have been built anew
                if path not in _said:
                    _said.add(path)
                    _log.warning("chameleon_mm: the C++ helper %r %s; all works without it", name, found)
                return found
            _loaded[path] = found
    except (OSError, RuntimeError) as error:  # no home, or one that may not be read
        return f"not built: {error}"
    return _loaded[path]


def _import(name: str, path: Path) -> ModuleType | str:
    try:
        build = read_file(path, _BUILD_LIMIT_BYTES)
    except OSError as error:
        return f"does not load: {error}"
    if hashlib.sha256(build[:-_DIGEST_BYTES]).digest() != build[-_DIGEST_BYTES:]:
        return "does not load: it is cut short or changed (`chameleon-mm native` builds it anew)"
    # By the whole name pybind11 finds modules that it made before: two builds of one helper must not have the same.
    loader = importlib.machinery.ExtensionFileLoader(f"{path.stem}.chameleon_mm_{name}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a build does, a session begins without it
        return f"does not load: {error}"
    return module
