"""CuPy's binding of the CUDA runtime, where it can be used, and the calls that page-lock host memory, of it or of torch.

runtime = cupy_runtime(index)           # lets go of the GIL while the driver works. None: copies and pinning go through torch
calls = pinning_calls(runtime, index)   # for a PageLocker, which says in which order they are tried
"""

from __future__ import annotations

import ctypes
import logging
import warnings
from typing import Any

import torch
from torch import Tensor

from chameleon_mm.device.pinning import PinningCalls

ATTR_HOST_REGISTER_SUPPORTED = 99
"""cudaDevAttrHostRegisterSupported."""

_log = logging.getLogger(__name__)

_HOST_PORTABLE = 1  # cudaHostRegisterPortable = cudaHostAllocPortable: page-locked for every device of the process
_ATTR_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


def cupy_runtime(index: int) -> Any:
    """CuPy's CUDA runtime if it is installed and answers for this device, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its remarks on import are about compilers and libraries that are not used here
            from cupy.cuda import runtime

        runtime.deviceGetAttribute(ATTR_HOST_REGISTER_SUPPORTED, index)  # refused by a CuPy for another CUDA than the driver's
    except (ImportError, RuntimeError) as error:
        _log.info("chameleon_mm: copies and pinning go through torch, as CuPy cannot be used: %s", error)
        return None
    return runtime


def pinning_calls(runtime: Any, index: int) -> PinningCalls:
    """The calls of CuPy's runtime, or of torch's where `runtime` is None."""

    def clear_error() -> None:
        # The error is kept per thread and runtime, and torch has no call that reads it: a kernel launch does, and raises it.
        try:
            torch.ones(1, device=torch.device("cuda", index))
        except RuntimeError as error:
            _log.debug("chameleon_mm: cleared a CUDA error that a refused pinning left behind: %s", error)

    # Without the second, a kernel would need another address for the memory than the one its tensor has.
    wanted = (ATTR_HOST_REGISTER_SUPPORTED, _ATTR_CAN_USE_HOST_POINTER)
    ask = driver_attribute if runtime is None else runtime.deviceGetAttribute
    registers = all(ask(attribute, index) for attribute in wanted)
    if runtime is None:
        return PinningCalls(
            register=_torch_register if registers else None,
            unregister=_torch_unregister,
            # torch rounds this up to a power of two and keeps it in a cache of its own: right, if wasteful, as a last resort.
            host_alloc=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True),
            host_free=lambda memory: None,  # goes back to that cache with its last reference
            clear_error=clear_error,
        )

    def host_alloc(nbytes: int) -> Tensor:
        address = runtime.hostAlloc(nbytes, _HOST_PORTABLE)
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    return PinningCalls(
        register=(lambda address, nbytes: runtime.hostRegister(address, nbytes, _HOST_PORTABLE)) if registers else None,
        unregister=runtime.hostUnregister,
        host_alloc=host_alloc,
        host_free=lambda memory: runtime.freeHost(memory.data_ptr()),
        clear_error=clear_error,
    )


def driver_attribute(attribute: int, index: int) -> int:
    """Value of a GPU's attribute by the driver, 0 where it does not tell. torch has no call for it; the driver's numbers are
    the runtime's."""
    driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it already
    gpu, value = ctypes.c_int(), ctypes.c_int()
    known = driver.cuDeviceGet(ctypes.byref(gpu), index) == 0
    known = known and driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, gpu) == 0
    return value.value if known else 0


def _torch_register(address: int, nbytes: int) -> None:
    _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, nbytes, _HOST_PORTABLE))


def _torch_unregister(address: int) -> None:
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, status: Any) -> None:
    runtime = torch.cuda.cudart()
    if status != runtime.cudaError.success:
        raise RuntimeError(f"{call}: {runtime.cudaGetErrorString(status)} ({int(status)})")
