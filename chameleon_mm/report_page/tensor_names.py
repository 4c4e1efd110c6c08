"""Names of a trace's storages for people: where they were saved, by the module's path where it is known, and what made them.

    names_of(trace, numbers, modules)[number]        "blocks.3.mlp.fc1: gelu"

Two storages of one name are told apart by a number: "gelu #2".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from chameleon_mm.trace import TensorKind, Trace
from chameleon_mm.trace.replayable import VIEWS, base_name


def names_of(trace: Trace, numbers: Sequence[int], modules: Mapping[int, str]) -> dict[int, str]:
    """Names of the storages `numbers` of `trace`, in the trace's order. `modules`: paths by the number of the hook."""
    makers, saved_in = _makers(trace), _modules(trace, modules)
    plain: dict[int, str] = {}
    for number in sorted(numbers):
        made_by = makers.get(number) or TensorKind(int(trace.tensor_kind[number])).name.lower()
        module = saved_in.get(number, "")
        plain[number] = f"{module}: {made_by}" if module else made_by
    count, seen = Counter(plain.values()), Counter[str]()
    for number, name in plain.items():
        if count[name] > 1:
            seen[name] += 1
            plain[number] = f"{name} #{seen[name]}"
    return plain


def _makers(trace: Trace) -> dict[int, str]:
    """Name, without its library and overload, of the first operator that wrote each storage and is no view."""
    names = [base_name(name) for name in trace.op_names]
    op = np.repeat(np.arange(len(trace.op_us)), np.diff(trace.write_offsets))
    found: dict[int, str] = {}
    for tensor, name in zip(trace.write_tensors.tolist(), trace.op_name[op].tolist(), strict=True):
        if tensor not in found and names[name] not in VIEWS:
            found[tensor] = names[name].rpartition("::")[2]
    return found


def _modules(trace: Trace, modules: Mapping[int, str]) -> dict[int, str]:
    """Path of the module that each storage was saved in first."""
    if not modules:
        return {}
    found: dict[int, str] = {}
    for hook, (use, tensor) in enumerate(zip(trace.hook_use.tolist(), trace.hook_tensor.tolist(), strict=True)):
        if not use and tensor >= 0 and hook in modules:
            found.setdefault(tensor, modules[hook])
    return found
