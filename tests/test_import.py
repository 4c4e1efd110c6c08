"""`import chameleon_mm` is light: no cupy, no Triton, no CUDA, and every public name is there without them.

    a fresh interpreter imports  ->  reports which of them are loaded  ->  none

Names resolve without them too: a device or a session asks for them when it is made.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import chameleon_mm as cm
from tests._run_scripts import python

_PUBLIC = {"CudaDevice", "PinnedPool", "SimDevice", "SwapReport", "SwapSession", "save_on_cpu"}
_HEAVY = {"accelerate", "cuda", "cupy", "lightning", "transformers", "triton", "trl"}
_TORCHS_OWN = "import sys, torch; torchs_own = set(sys.modules)\n"
"""What `import torch` alone loads is not ours: torch 2.14 built for CUDA imports `cuda`."""
_REPORT = f"""
import json, sys
import torch
heavy = sorted({_HEAVY} & set(sys.modules) - torchs_own)
print(json.dumps({{"heavy": heavy, "cuda_started": torch.cuda.is_initialized()}}))
"""


def _in_a_fresh_interpreter(code: str, folder: Path) -> dict[str, object]:
    done = python(["-c", _TORCHS_OWN + code + _REPORT], folder)
    assert done.code == 0, done.err
    report: dict[str, object] = json.loads(done.out)
    return report


def test_the_report_sees_what_it_is_asked_about(tmp_path: Path) -> None:
    found = _in_a_fresh_interpreter("import sys, types; sys.modules['cupy'] = types.ModuleType('cupy')", tmp_path)
    assert found["heavy"] == ["cupy"]


@pytest.mark.parametrize(
    "code",
    [
        "import chameleon_mm",
        f"import chameleon_mm as cm; [getattr(cm, name) for name in {sorted(_PUBLIC)}]",
        "import chameleon_mm.tools.cli",
        "import chameleon_mm as cm; cm.integrations, dir(cm.integrations)",
        "import chameleon_mm.device.cuda, chameleon_mm.tools.doctor, chameleon_mm.bench, chameleon_mm.kernels",
    ],
    ids=["package", "public names", "command line", "integrations", "device, doctor, bench, kernels"],
)
def test_importing_starts_nothing(code: str, tmp_path: Path) -> None:
    assert _in_a_fresh_interpreter(code, tmp_path) == {"heavy": [], "cuda_started": False}


def test_the_public_names_are_there_and_listed() -> None:
    assert set(cm.__all__) >= _PUBLIC
    assert all(getattr(cm, name).__module__.startswith("chameleon_mm") for name in _PUBLIC)
    assert set(dir(cm)) >= set(cm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = cm.integrations.keras


def test_an_integration_loads_its_framework_and_none_beside(tmp_path: Path) -> None:
    loaded = _in_a_fresh_interpreter("import chameleon_mm as cm; cm.integrations.transformers.SwapCallback", tmp_path)["heavy"]
    assert isinstance(loaded, list)
    assert "transformers" in loaded and not {"lightning", "trl"} & set(loaded)


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers", "trl"])
def test_a_missing_framework_is_one_sentence_that_names_the_extra(name: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import chameleon_mm as cm; cm.integrations.{name}"
    assert python(["-c", code], tmp_path).err.splitlines()[-1] == (
        f"ImportError: chameleon_mm.integrations.{name}: expected {name} to be installed, found none; "
        f"pip install 'chameleon-mm[{name}]'"
    )


@pytest.mark.parametrize("module", ["numpy.exceptions", "numpy.dtypes", "torch._tensor"])
def test_an_interrupt_while_it_is_imported_is_not_lost(module: str, tmp_path: Path) -> None:
    """torch ignores one that comes while it imports NumPy, and what it left half imported fails where it is needed."""
    code = f"""
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
try:
    import chameleon_mm
except KeyboardInterrupt:
    print("interrupted")
else:
    print("went on" if {module!r} in sys.modules else "imported no such module")
"""
    done = python(["-c", code], tmp_path)
    assert (done.code, done.out) == (0, "interrupted\n"), done.err


# --- dynamo's import

# A dispatch mode's first operator causes it. It leaves no frame of ours or of the caller's in a cycle:
# a fresh interpreter, without a collector  ->  a function that is the first to need a dispatch mode  ->  its variables are gone


_PROGRAM = """
import gc, json, sys, weakref
import torch
import chameleon_mm as cm
from chameleon_mm.device.uncompiled import import_dynamo

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
from chameleon_mm.device.uncompiled import import_dynamo

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
