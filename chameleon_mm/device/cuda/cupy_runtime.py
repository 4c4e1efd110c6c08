"""CuPy's binding of the CUDA runtime, which lets go of the GIL while the driver works.

runtime = cupy_runtime(index)           # None: copies and pinning go through torch
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

_log = logging.getLogger(__name__)

ATTR_HOST_REGISTER_SUPPORTED = 99
"""cudaDevAttrHostRegisterSupported."""


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
