"""Names of the library's own work in `torch.profiler`'s traces: "chameleon::swap_out" and its siblings.

with annotation("chameleon::swap_out"): ...
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

_profiler_is_on = torch._C._autograd._profiler_enabled
_NOTHING: AbstractContextManager[object] = nullcontext()


def annotation(name: str) -> AbstractContextManager[object]:
    """A range of that name where torch's profiler runs on the calling thread; else nothing, for a tenth of a microsecond."""
    return record_function(name) if _profiler_is_on() else _NOTHING
