"""Events after all work of all streams: a context's, which the driver records, or none after the host has waited.

    for each device with a context:
        event = torch.cuda.Event(); event.record()      # makes it, and makes the context current
        cuCtxRecordEvent(context, event)                # CUDA 12.5 and newer: all that the context was given, by any stream
        ... else torch.cuda.synchronize(device)

Events on torch's own streams would not do. Other libraries have streams that torch does not know, and torch's are non-blocking,
so that no event on the null stream comes after them.
"""

from __future__ import annotations

import ctypes
import logging

import torch

from chameleon_mm.device.cuda.cuda_stream import CudaEvent

_log = logging.getLogger(__name__)


def events_after_all_work() -> tuple[CudaEvent, ...]:
    """Events after what this process has given to every device so far. Without such events the host waits, and there are none.

    A device that the process has no context on has done nothing. Pinned memory is every device's, so all are asked.
    """
    events: list[CudaEvent] = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
        if not torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]  # torch declares it in no stub
            continue
        with torch.cuda.device(index):
            event = torch.cuda.Event()
            event.record()
            if _record_context(event):
                events.append(CudaEvent(event, timed=False))
            else:
                torch.cuda.synchronize(index)
    return tuple(events)


def _record_context(event: torch.cuda.Event) -> bool:
    """Record all work of the current context in `event`, which has been recorded there. Returns whether the driver did."""
    driver = ctypes.CDLL("libcuda.so.1")  # torch has loaded it already
    try:
        record = driver.cuCtxRecordEvent
    except AttributeError:  # an older driver
        return False
    context = ctypes.c_void_p()
    status = driver.cuCtxGetCurrent(ctypes.byref(context)) or record(context, ctypes.c_void_p(event.cuda_event))
    if status:
        _log.info("chameleon_mm: the host waits for the device, as the driver records no event of a context: error %d", status)
    return not status
