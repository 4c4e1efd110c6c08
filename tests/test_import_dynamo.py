"""Dynamo's import, which a dispatch mode's first operator causes, leaves no frame of ours or of the caller's in a cycle.

a fresh interpreter, without a collector  ->  a function that is the first to need a dispatch mode  ->  its variables are gone

In a process of its own: whether dynamo is imported depends on what ran before.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests._run_scripts import python

_PROGRAM = """
import gc, json, sys, weakref
import torch
import chameleon_mm as cm
from chameleon_mm.uncompiled import import_dynamo

sim = cm.SimDevice()
pool = cm.PinnedPool("8MiB", device=sim)
before = "torch._dynamo" in sys.modules
gc.disable()

def caller():
    x = torch.randn(64, 64, requires_grad=True)
    {case}
    return weakref.ref(x)

x = caller()
print(json.dumps([before, "torch._dynamo" in sys.modules, x() is not None, pool.stats().num_live]))
"""

_CASES = {
    "by itself": "import_dynamo()",
    "simulated operators": "with sim.compute(): x * 2",
    "a save hook": "with sim.compute(), cm.save_on_cpu(device=sim, pool=pool, min_bytes=0): (x * 2).exp().sin()",
    "a recorded step": (
        'with cm.SwapSession("1GiB", pool.limit_bytes, "sim", min_bytes=0) as s, s.step(): (x * 2).exp().sum().backward()'
    ),
}


@pytest.mark.parametrize("case", list(_CASES))
def test_what_needs_dynamo_first_keeps_none_of_its_callers_variables(case: str, tmp_path: Path) -> None:
    done = python(["-c", _PROGRAM.format(case=_CASES[case])], tmp_path)
    assert done.code == 0, done.err
    before, imported, is_kept, num_live = json.loads(done.out)
    if before:
        pytest.skip("torch has imported dynamo by itself")
    assert imported
    assert not is_kept
    assert num_live == 0


_BROKEN = """
import importlib.abc, sys
from chameleon_mm.uncompiled import import_dynamo

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo":
            raise ImportError("a broken installation")

sys.meta_path.insert(0, Broken())
try:
    import_dynamo()
except ImportError as error:
    print(error)
"""


def test_an_import_that_fails_raises_in_the_caller_alone(tmp_path: Path) -> None:
    done = python(["-c", _BROKEN], tmp_path)
    assert (done.code, done.out, done.err) == (0, "a broken installation\n", "")
