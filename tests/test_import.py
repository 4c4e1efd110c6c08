"""`import chameleon_mm` is light: no torch, no cupy, no Triton, no CUDA; every public name is there without the last three.

A public name loads its own modules and torch at its first use. A device or a session asks for the rest when it is made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import chameleon_mm as cm
from chameleon_mm.bench import THEMES, _length_models, _llama, _training_sizes
from chameleon_mm.bench._options import OPTIONS
from chameleon_mm.tools import adapters, largest, plan_options, step_on_shapes, workload
from tests._run_scripts import Ended, forks, python

pytestmark = pytest.mark.timeout(900)  # the first test runs the interpreters of all

_PUBLIC = {"CudaDevice", "PinnedPool", "SimDevice", "SwapReport", "SwapSession", "save_on_cpu"}
_HEAVY = {"accelerate", "cuda", "cupy", "lightning", "transformers", "triton", "trl"}
_BEGIN = "import json, sys, torch; torchs_own = set(sys.modules)"
"""What `import torch` alone loads is not ours: torch 2.14 built for CUDA imports `cuda`."""
_REPORT = f"""
heavy = sorted({_HEAVY} & set(sys.modules) - torchs_own)
print(json.dumps({{"heavy": heavy, "cuda_started": torch.cuda.is_initialized()}}))
"""

_LIGHT = {
    "package": "import chameleon_mm",
    "public names": f"import chameleon_mm as cm; [getattr(cm, name) for name in {sorted(_PUBLIC)}]",
    "command line": "import chameleon_mm.tools.cli",
    "integrations": "import chameleon_mm as cm; cm.integrations, dir(cm.integrations)",
    "device, doctor, bench, kernels": (
        "import chameleon_mm.device.cuda, chameleon_mm.tools.doctor, chameleon_mm.bench, chameleon_mm.kernels"
    ),
}
_FRAMEWORKS = ("accelerate", "lightning", "transformers", "trl")


# A dispatch mode's first operator imports dynamo. That leaves no frame of ours or of the caller's in a cycle:
# an interpreter without a collector  ->  a function that is the first to need a dispatch mode  ->  its variables are gone

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


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How the interpreters of most tests ended."""
    folder = tmp_path_factory.mktemp("imports")
    codes = {
        "cupy": "sys.modules['cupy'] = sys" + _REPORT,
        **{name: code + _REPORT for name, code in _LIGHT.items()},
        "pool": "import chameleon_mm as cm; cm.PinnedPool; print(*sorted(set(sys.modules) - torchs_own))",
        **{
            f"no {name}": f"sys.modules[{name!r}] = None; import chameleon_mm as cm; cm.integrations.{name}"
            for name in _FRAMEWORKS
        },
        "broken": _BROKEN,
    }
    return forks(_BEGIN, codes, folder, folder / "notes")


@pytest.fixture(scope="module")
def slowly_ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """... and those that import transformers or dynamo."""
    folder = tmp_path_factory.mktemp("imports")
    codes = {
        "transformers": "import chameleon_mm as cm; cm.integrations.transformers.SwapCallback" + _REPORT,
        **{name: _PROGRAM.format(case=case) for name, case in _CASES.items()},
    }
    return forks(_BEGIN, codes, folder, folder / "notes")


def reported(ended: Ended) -> dict[str, object]:
    assert ended.code == 0, ended.err
    report: dict[str, object] = json.loads(ended.out)
    return report


@pytest.mark.ci
def test_the_report_sees_what_it_is_asked_about(ended: dict[str, Ended]) -> None:
    assert reported(ended["cupy"])["heavy"] == ["cupy"]


@pytest.mark.parametrize("name", _LIGHT)
def test_importing_starts_nothing(name: str, ended: dict[str, Ended]) -> None:
    assert reported(ended[name]) == {"heavy": [], "cuda_started": False}


def test_the_allocator_alone_loads_no_session(ended: dict[str, Ended]) -> None:
    loaded = ended["pool"].out.split()
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"chameleon_mm", "lazy_loader", "numpy"}
    ours = [name for name in loaded if name.startswith("chameleon_mm")]
    assert "chameleon_mm.pool.pool" in ours and len(ours) <= 40
    assert {name.split(".")[1] for name in ours[1:]} == {"device", "errors", "files", "pool", "replayable", "units"}


_ANSWERED = [
    (["--version"], 0, f"chameleon-mm {cm.__version__}"),
    (["--help"], 0, "usage: chameleon-mm"),
    (["no-such-command"], 2, "got 'no-such-command'"),
    ([], 2, "the following arguments are required: COMMAND"),
    *(([command, "--help"], 0, "usage: chameleon-mm") for command in ("demo", "run", "doctor", "native", "plan", "bench")),
    *(([command, "--marmot"], 2, "--marmot") for command in ("demo", "doctor", "native")),
    *((["bench", theme, "--marmot"], 2, "--marmot") for theme in THEMES),
    (["demo", "--steps", "few"], 2, "invalid int value: 'few'"),
    (["demo", "--ratio", "2", "--hbm-budget", "1GiB"], 2, "not allowed with"),
    (["bench"], 2, "the following arguments are required: THEME"),
    (["bench", "sing"], 2, "got 'sing'"),
    (["doctor", "--json"], 2, "expected one argument"),
    (["native", "--into"], 2, "expected one argument"),
    (["run"], 2, "expected a script or -m MODULE"),
    (["run", "--keeep", "x", "train.py"], 2, "did you mean --keep?"),
    (["run", "--hbm-budget", "much", "-m", "train"], 2, "--hbm-budget: expected"),
    (["run", "no-such.py"], 2, "which does not exist"),
    (["bench", "copy", "--repeats", "few"], 2, "invalid int value: 'few'"),
    (["bench", "training", "--dtype", "int3"], 2, "got 'int3'"),
    (["plan"], 2, "the following arguments are required: MODEL"),
    (["plan", "gpt2", "--marmot"], 2, "--marmot"),
    (["plan", "gpt2", "--optimizer", "lion"], 2, "got 'lion'"),
    (["plan", "gpt2", "--gpu", "nothing"], 2, "GPU spec: expected one of"),
    (["plan", "gpt2", "--hbm-budget", "much"], 2, "--hbm-budget: expected"),
    (["plan", "gpt2", "--hbm-budget", "0"], 2, "--hbm-budget: expected more than 0 bytes"),
    (["plan", "gpt2", "--batch", "0"], 2, "--batch: expected 1 or more, got 0"),
    (["plan", "gpt2", "--fsdp", "1"], 2, "--fsdp: expected 2 or more ranks"),
    (["plan", "gpt2", "--checkpointing", "some"], 2, "--checkpointing: expected fit"),
]


def test_the_command_line_answers_without_torch(tmp_path: Path) -> None:
    begin = "import sys; sys.modules['torch'] = None; from chameleon_mm.tools.cli import main"
    codes = {" ".join(arguments): f"sys.exit(main({arguments}))" for arguments, _, _ in _ANSWERED}
    ended = forks(begin, codes, tmp_path, tmp_path / "notes")
    for arguments, code, words in _ANSWERED:
        done = ended[" ".join(arguments)]
        assert done.code == code and words in done.out + done.err, (arguments, done)
        assert bool(done.out) is (code == 0)


def choices_of(add_arguments: Callable[[argparse.ArgumentParser], None]) -> dict[str, tuple[str, ...]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {action.dest: tuple(action.choices) for action in parser._actions if action.choices}


def test_the_choices_of_options_are_the_keys_of_the_tables_that_need_torch() -> None:
    assert choices_of(plan_options.add_arguments) == {
        "dtype": tuple(step_on_shapes.DTYPES), "autocast": tuple(step_on_shapes.AUTOCAST),
        "quantise": tuple(adapters.BITS), "optimizer": tuple(plan_options.OPTIMIZERS), "largest": largest.SIZES,
    }  # fmt: skip
    assert tuple(workload.BUILT_IN) == plan_options.MODELS
    assert choices_of(OPTIONS["lengths"]) == {"distribution": _length_models.DISTRIBUTIONS}
    models = ("llama", *_training_sizes.OTHERS)
    assert choices_of(OPTIONS["training"]) == {"model": models, "dtype": tuple(_llama.DTYPES)}


def test_the_public_names_are_there_and_listed() -> None:
    assert set(cm.__all__) >= _PUBLIC
    assert all(getattr(cm, name).__module__.startswith("chameleon_mm") for name in _PUBLIC)
    assert set(dir(cm)) >= set(cm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = cm.integrations.keras


@pytest.mark.slow
def test_an_integration_loads_its_framework_and_none_beside(slowly_ended: dict[str, Ended]) -> None:
    loaded = reported(slowly_ended["transformers"])["heavy"]
    assert isinstance(loaded, list)
    assert "transformers" in loaded and not {"lightning", "trl"} & set(loaded)


@pytest.mark.parametrize("name", _FRAMEWORKS)
def test_a_missing_framework_is_one_sentence_that_names_the_extra(name: str, ended: dict[str, Ended]) -> None:
    assert ended[f"no {name}"].err.splitlines()[-1] == (
        f"ImportError: chameleon_mm.integrations.{name}: expected {name} to be installed, found none; "
        f"pip install 'chameleon-mm[{name}]'"
    )


@pytest.mark.parametrize("module", ["numpy.exceptions", "numpy.dtypes", "torch._tensor"])
def test_an_interrupt_while_it_is_imported_is_not_lost(module: str, tmp_path: Path) -> None:
    """Torch ignores an interrupt while it imports NumPy; a half-imported module then fails where it is needed."""
    code = f"""
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
try:
    import chameleon_mm
    chameleon_mm.SwapSession
except KeyboardInterrupt:
    print("interrupted")
else:
    print("went on" if {module!r} in sys.modules else "imported no such module")
"""
    done = python(["-c", code], tmp_path)
    assert (done.code, done.out) == (0, "interrupted\n"), done.err


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_what_needs_dynamo_first_keeps_none_of_its_callers_variables(case: str, slowly_ended: dict[str, Ended]) -> None:
    done = slowly_ended[case]
    assert done.code == 0, done.err
    before, imported, is_kept, num_live = json.loads(done.out)
    if before:
        pytest.skip("torch has imported dynamo by itself")
    assert imported
    assert not is_kept
    assert num_live == 0


def test_an_import_that_fails_raises_in_the_caller_alone(ended: dict[str, Ended]) -> None:
    done = ended["broken"]
    assert (done.code, done.out, done.err) == (0, "a broken installation\n", "")
