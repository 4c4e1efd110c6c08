"""Redirect other libraries than torch. CuPy and CUDA's Python bindings each link a CUDA runtime; Triton compiles for a GPU.

    cupy_backends.cuda.api.runtime   keeps its symbol table: each of its cudaXxx functions begins with a jump
    cuda.bindings                    is stripped, but its low-level module hands its functions to the others as capsules: they
                                     are replaced before the others take them

    triton.runtime.jit               kernels go to Triton's interpreter

All happens when the module is imported, by a finder at the front of `sys.meta_path`.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from tests.cuda_stand_in import triton_kernels
from tests.cuda_stand_in.library import runtime

_PAGE = 4096
_READ_WRITE_EXECUTE = 7
_SYMBOL_TABLE = 2  # SHT_SYMTAB
_FUNCTION = 2  # STT_FUNC

_kept: list[object] = []
"""Replaced capsules: the new ones use their names' memory."""


def _address(name: str) -> int | None:
    """Address of the substitute's function; None if it has no function of this name."""
    try:
        return ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _functions(path: str) -> Iterator[tuple[str, int]]:
    """Name and offset of each function in the symbol table of a 64-bit ELF file, local ones as well."""
    with Path(path).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    headers_at = struct.unpack_from("<Q", data, 0x28)[0]
    header_size, header_count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, headers_at + i * header_size) for i in range(header_count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names_at = sections[link][4]
        for at in range(offset, offset + length, 24):
            name, info, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == _FUNCTION and value:
                end = data.find(b"\0", names_at + name)
                yield data[names_at + name : end].decode(), value


def lead_functions(path: str) -> int:
    """Loads a shared library and lets its own cudaXxx functions jump to the substitute's. Returns how many do."""
    ctypes.CDLL(path)
    libc = ctypes.CDLL(None)
    with Path("/proc/self/maps").open() as maps:
        real = os.path.realpath(path)  # as the kernel names it: a folder on the way may be a link
        base = next(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(real))
    done = 0
    for name, offset in _functions(path):
        target = _address(name) if name.startswith("cuda") else None
        if target is None:
            continue
        place = base + offset
        page = place // _PAGE * _PAGE
        libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * _PAGE), _READ_WRITE_EXECUTE)
        ctypes.memmove(place, b"\x48\xb8" + struct.pack("<Q", target) + b"\xff\xe0", 12)  # mov rax, target; jmp rax
        done += 1
    return done


def lead_capsules() -> int:
    """Replace the functions that cuda.bindings' low-level runtime module exports. Return their number."""
    low = importlib.import_module("cuda.bindings._bindings.cyruntime")
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_void_p, [ctypes.py_object]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    done = 0
    for name, capsule in list(low.__pyx_capi__.items()):
        if target := _address(name.lstrip("_")):
            _kept.append(capsule)
            low.__pyx_capi__[name] = api.PyCapsule_New(target, api.PyCapsule_GetName(capsule), None)
            done += 1
    return done


class Finder(importlib.abc.MetaPathFinder):
    """Leads a module's calls just before it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "cupy_backends.cuda.api.runtime":
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin:
                lead_functions(spec.origin)
            return spec
        if fullname == "cuda.bindings.cyruntime":
            lead_capsules()
        if fullname == "triton.runtime.jit":
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Then(spec.loader, triton_kernels.lead)
            return spec
        return None


class _Then(importlib.abc.Loader):
    """A loader after which a function sees the module."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.then(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self.loader, name)  # `inspect` asks the loader for the source


def install() -> None:
    sys.meta_path.insert(0, Finder())
