"""Many small copies in one call: cudaMemcpyBatchAsync, where CUDA's bindings and the driver have it.

batch = batch_copies()                                          # None: no bindings
batch.enqueue(dsts, srcs, sizes, handle) or copy each           # False: the driver refused, nothing is lost
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

_log = logging.getLogger(__name__)


class BatchCopies:
    """cudaMemcpyBatchAsync of CUDA's bindings, of version 12.9 (which returns a failed copy's index, too) or 13.

    Thread-safe. Where a driver turns out not to have it, it is not asked again.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._supported = True
        self._attributes = runtime.cudaMemcpyAttributes()
        self._attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        # A hint to use the copy engines, not kernels of the driver's own.
        self._attributes.flags = int(runtime.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute)

    def enqueue(self, dsts: list[int], srcs: list[int], sizes: list[int], handle: int) -> bool:
        """Enqueue copies between addresses on a stream that is not the null stream, of the current device.

        Returns whether they were. If not they may all be enqueued again: the same bytes to the same places.
        """
        if not self._supported:
            return False
        runtime = self._runtime
        status = runtime.cudaMemcpyBatchAsync(dsts, srcs, sizes, len(sizes), [self._attributes], [0], 1, handle)[0]
        if status == runtime.cudaError_t.cudaSuccess:
            return True
        runtime.cudaGetLastError()  # or the bindings' next caller gets it
        errors = runtime.cudaError_t
        lacking = (errors.cudaErrorNotSupported, errors.cudaErrorCallRequiresNewerDriver, errors.cudaErrorInsufficientDriver)
        self._supported = status not in lacking
        _log.info("chameleon_mm: a batch of %d copies is enqueued one by one, as the driver refused it: %s", len(sizes), status)
        return False


def batch_copies() -> BatchCopies | None:
    """The call that takes many copies, if CUDA's bindings are installed and have it, else None."""
    try:
        return BatchCopies(importlib.import_module("cuda.bindings.runtime"))
    except (ImportError, AttributeError, RuntimeError) as error:
        _log.info("chameleon_mm: small copies are enqueued one by one, as CUDA's bindings cannot be used: %s", str(error))
        return None
