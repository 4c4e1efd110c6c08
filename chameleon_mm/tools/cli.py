"""The command line: arguments in, text out. All output comes from the commands' modules.

    chameleon-mm demo | run SCRIPT | doctor | native | plan MODEL | bench THEME
    0 done   1 failed   2 bad usage   130 interrupted

Only the named command is imported, so that help does not wait for the others.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from chameleon_mm import __version__
from chameleon_mm.bench import THEMES
from chameleon_mm.errors import DeviceUnavailable, NativeBuildError, ProgramInterrupted
from chameleon_mm.units import printable

if TYPE_CHECKING:
    from chameleon_mm.device.protocols import Device

DONE, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130
_AS_WRITTEN = argparse.RawDescriptionHelpFormatter

_DESCRIPTION = """\
Swaps the activations of eager PyTorch training to pinned host memory and back, bit-exactly, overlapped with compute.
"""
_EPILOG = """\
examples:
  chameleon-mm demo                              train a small GPT with swapping and in plain PyTorch, compare every bit
  chameleon-mm demo --device sim:a100 --steps 5  the same on a simulated A100; needs no GPU
  chameleon-mm run --hbm-budget 20GiB train.py   a training script as it is, swapped
  chameleon-mm doctor                            what this machine offers
  chameleon-mm bench copy --json copy.json       copy rates of this machine
  chameleon-mm plan llama-7b --gpu rtx4090       what a step needs, and what a plan makes of it; needs no GPU

Sizes are bytes or text such as 300MiB, 1.5GiB or 8GB. Exit codes: 0 done, 1 failed, 2 bad usage.
"""
_DEMO = """\
Trains a byte-level GPT on the sources of Python's standard library, once without swapping, once with, and once in plain
PyTorch with nothing of chameleon_mm around it, from the same seed. Prints peaks, bytes moved, stall and step times, and
whether the runs are bit-identical: every loss, every gradient norm, the final weights and the random state. On a simulated
GPU the numbers are computed on the CPU and the times are simulated.
"""
_DEMO_EPILOG = """\
examples:
  chameleon-mm demo --hbm-budget 120MiB          a budget of your own (default: half of the unswapped peak)
  chameleon-mm demo --device cuda --steps 50     on the first GPU, with larger default sizes
  chameleon-mm demo --json demo.json             every figure as data

Exits with 1 if one bit differs or the swapped peak passes the budget.
"""
_RUN = """\
Runs a training script as `python script.py args` would, with the same output, exit code and bits, and swaps from its first
step on. Steps are found by themselves: each begins with the first forward that trains, and ends as the optimizer has stepped.
A report is printed on stderr at the end, after an error or Ctrl-C, too.
"""
_RUN_EPILOG = """\
examples:
  chameleon-mm run train.py --epochs 3                            what stands after the script is the script's
  chameleon-mm run --hbm-budget 20GiB --html run.html -m my.train
  torchrun --nproc_per_node 2 -m chameleon_mm run --hbm-budget 20GiB train.py
  accelerate launch -m chameleon_mm run train.py

Options of `run` stand before the script. A script for which no session can be made, as where the budget is below what never
moves, is stopped before its first step, with exit code 1. Set what torch reads as it is loaded, such as OMP_NUM_THREADS,
outside of the script: torch is there before it.
"""
_DOCTOR = """\
Says what this machine offers: versions, GPU, link, pinned memory, limits, and the device that would be used by default.
A part that is missing is a finding, not an error.
"""
_NATIVE = """\
Builds the optional C++ helpers for the Python and the torch that run this command, with the compiler of this machine. It takes
a minute; sessions made from then on use them. Of several ranks that run it on a node, one builds and the others wait.
Nothing needs the helpers: without them the same is done in Python. Run it again after an update of torch, Python or this
library. `pip install 'chameleon-mm[native]'` brings them without a compiler.
"""
_NATIVE_EPILOG = """\
examples:
  chameleon-mm native                            into this user's cache folder
  chameleon-mm native --into "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
                                                 into this environment, for all users of it
  chameleon-mm native --into /shared/helpers     ... and PYTHONPATH=/shared/helpers where it trains
"""
_PLAN = """\
Says what one training step of a model needs on a GPU, whether it fits, and what swapping makes of it. Nothing is computed and
nothing is loaded: the step runs on shapes alone, its times are a roofline's, so every figure is predicted.
"""
_PLAN_EPILOG = """\
examples:
  chameleon-mm plan llama-7b --batch 4 --hbm-budget 80GiB
  chameleon-mm plan models:tiny --gpu a100 --json tiny.json
  chameleon-mm plan ./config.json --seq 8192 --optimizer adamw-fused
  chameleon-mm plan llama-7b --autocast bfloat16         float32 weights, bfloat16 products

A model of your own, as module:function, looked for in the working directory, too:
  def tiny(batch, seq):                  given --batch and --seq
      return model, ids                  model(ids) is a scalar tensor, or has one as .loss
      return model, ids, loss_fn         loss_fn(model(ids), ids) is that scalar: the model's output, then the batch
A batch that is a tuple or list goes to the model as *batch, a mapping as **batch; loss_fn gets it as it was returned.

A model's own torch.autocast("cuda") counts as it would on a GPU. The built-in GPT-2s save less than Hugging Face's: they have
the fused GELU, and their loss in the dtype of the logits. What is printed as a smallest budget may be given as --hbm-budget.
Exits with 1 if no plan keeps within the budgets.
"""
_COMMANDS = {
    "demo": ("train a small GPT with swapping and in plain PyTorch, compare every bit", _DEMO, _DEMO_EPILOG),
    "run": ("run a training script as it is, swapped", _RUN, _RUN_EPILOG),
    "doctor": ("what this machine offers, and what is missing", _DOCTOR),
    "native": ("build the optional C++ helpers for the torch that is installed", _NATIVE, _NATIVE_EPILOG),
    "plan": ("what a model's step needs, and what a plan makes of it, without a GPU", _PLAN, _PLAN_EPILOG),
    "bench": ("measure this machine, or the library on it", "Runs one benchmark: chameleon-mm bench THEME."),
}
"""Commands: line in the list, description, and epilog if there is one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `argv` None means `sys.argv[1:]`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments, program = _split(arguments)
        args = _parser(arguments).parse_args(arguments, argparse.Namespace(program=program))
        return int(args.handler(args, Console()))
    except SystemExit as done:  # argparse has already printed its help
        return done.code if isinstance(done.code, int) else FAILED
    except (ValueError, OSError, DeviceUnavailable) as error:
        return _complain(error, BAD_USAGE)
    except (MemoryError, NativeBuildError) as error:
        return _complain(error, FAILED)
    except RuntimeError as error:
        import torch  # already loaded: only help does not need it

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        return _complain(f"{error}; choose smaller sizes or a larger --device", FAILED)
    except ProgramInterrupted:
        raise KeyboardInterrupt from None  # not a subclass of it: only then is Python's exit status the signal's
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split `arguments` into our own and the command line of the program that `run` starts. The parser sees only our own."""
    if arguments[:1] != ["run"]:
        return arguments, []
    count = 1 + importlib.import_module("chameleon_mm.tools.run_command").count_own(arguments[1:])
    return arguments[:count], arguments[count:]


def _complain(what: object, code: int) -> int:
    line = " ".join(printable(str(what)).split())  # one line: a driver's message may have several
    Console(stderr=True).print(f"chameleon-mm: {line}", markup=False, highlight=False, soft_wrap=True)
    return code


class _Parser(argparse.ArgumentParser):
    """A parser of which an error is one line, as all of ours are. Those of commands and themes are of this class, too."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            expected = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"expected one of {expected}, got {value!r}")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser, with the options of the command that `arguments` name and only the names of the others."""
    parser = _Parser(prog="chameleon-mm", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_AS_WRITTEN)
    parser.add_argument("--version", action="version", version=f"chameleon-mm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command, theme = (*arguments[:2], "", "")[:2]

    of = {name: _add(commands, name, *texts) for name, texts in _COMMANDS.items()}
    of["doctor"].add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE")
    of["doctor"].set_defaults(handler=_run_doctor)
    compiler = "C++ compiler that knows C++20 (default: g++)"
    of["native"].add_argument("--compiler", default="g++", metavar="PROGRAM", help=compiler)
    into = "folder of sys.path, for homes that cannot be written to (default: this user's cache folder)"
    of["native"].add_argument("--into", type=Path, metavar="DIR", help=into)
    of["native"].set_defaults(handler=_run_native)
    if command in ("demo", "run", "plan"):
        module = importlib.import_module(f"chameleon_mm.tools.{command}_{'options' if command == 'plan' else 'command'}")
        module.add_arguments(of[command])
        more = {} if command == "run" else {"environment": _environment}
        of[command].set_defaults(handler=partial(module.run, **more))
    themes = of["bench"].add_subparsers(title="themes", metavar="THEME", required=True)
    for name, about in THEMES.items():
        parser_of_theme = _add(themes, name, about, about)
        if (command, theme) == ("bench", name):
            importlib.import_module("chameleon_mm.bench._options").OPTIONS[name](parser_of_theme)
            parser_of_theme.set_defaults(handler=partial(_run_theme, name))
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, about: str, description: str, epilog: str = "") -> _Parser:
    return commands.add_parser(name, help=about, description=description, epilog=epilog, formatter_class=_AS_WRITTEN)


def _run_theme(name: str, args: argparse.Namespace, console: Console) -> int:
    from chameleon_mm.tools.outputs import check_outputs, tell_written

    given = {name: getattr(args, name, None) for name in ("json", "svg")}
    files = {f"--{name}": Path(path) for name, path in given.items() if path is not None}
    check_outputs(files, make_folders=True)
    code = int(importlib.import_module(f"chameleon_mm.bench.{name}").run(args, console))
    for path in files.values():
        if path.exists():  # a theme that failed early wrote no file
            tell_written(console, path)
    return code


def _environment(theme: str, device: Device) -> Mapping[str, Any]:
    from chameleon_mm.bench._environment import environment

    return environment(theme, device)


def _run_native(args: argparse.Namespace, console: Console) -> int:
    from chameleon_mm.device import native

    given = args.into is None or os.path.realpath(args.into) in map(os.path.realpath, sys.path)
    if not given:
        sys.path.append(str(args.into))
    if not native.useful():
        console.print(f"nothing to build: no helper is of use with torch {native.release()}")
    for name, path in native.build_useful(into=args.into, compiler=args.compiler).items():
        console.print(f"{name}: {native.status(name)}, {path}", soft_wrap=True)
    if not given:
        console.print(f"sessions find them with PYTHONPATH={args.into.resolve()}: it is not in sys.path", soft_wrap=True)
    return 0


def _run_doctor(args: argparse.Namespace, console: Console) -> int:
    from chameleon_mm.tools import doctor

    return doctor.run(args.json, console)
