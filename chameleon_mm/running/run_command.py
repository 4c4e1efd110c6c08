"""The command `chameleon-mm run`: its options, and the report at the end.

own, program = arguments[:count_own(arguments)], arguments[count_own(arguments):]
exit_code = run(args, console)         # args.program: the command line of the program
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from chameleon_mm.device import resolve_device
from chameleon_mm.errors import ProgramInterrupted
from chameleon_mm.outputs import check_outputs
from chameleon_mm.running.ending import End
from chameleon_mm.running.launched_ranks import LaunchedRank
from chameleon_mm.running.main_program import Program
from chameleon_mm.running.training_watch import TrainingWatch
from chameleon_mm.session import SwapSession
from chameleon_mm.units import parse_size

_COMPILED_UNDER_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""What torch says at each call of a compiled module while the watch's hook is there, which only looks: see Note [Watch]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand before the program."""
    parser.usage = "chameleon-mm run [options] (script.py | -m MODULE) [args ...]"
    parser.allow_abbrev = False
    parser.add_argument("--hbm-budget", metavar="SIZE", help="device memory that a step may take (default: 90%% of the device)")
    parser.add_argument(
        "--host-budget", metavar="SIZE", help="pinned host memory at most (default: the rank's part of half of it)"
    )
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1, sim, sim:a100 (default: that of the parameters)")
    parser.add_argument("--min-bytes", metavar="SIZE", help="smaller saved storages stay on the device (default: 1MiB)")
    parser.add_argument("--no-recompute", action="store_true", help="plans only swap, and recompute nothing")
    parser.add_argument("--no-plans", action="store_true", help="every step by the default rule: everything moves")
    parser.add_argument("--verify", action="store_true", help="compare checksums of what goes out and comes back; slow")
    parser.add_argument("--progress", action="store_true", help="a line for each step on stderr")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report to FILE, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report to FILE, as a page")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the copies to FILE, for chrome://tracing and Perfetto"
    )


def count_own(arguments: Sequence[str]) -> int:
    """Count how many of `arguments` are options of `run`: the rest is the program, with what is its own."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    with_value = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-", "-m", "-c", "--"):
        at += 2 if arguments[at] in with_value else 1
    return min(at, len(arguments))


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the program and return its exit code. Raises `ValueError`, with nothing begun, for options or a program that are
    none, and `ProgramInterrupted` where an interrupt ended it."""
    program = _program(args.program)
    program.check()
    ranks = LaunchedRank.started_by_launcher()
    given = {"--report": args.report, "--html": args.html, "--trace": args.trace}
    files = {option: ranks.own(path) for option, path in given.items() if path is not None}
    check_outputs(files)
    watch = TrainingWatch(_session_maker(args, told=ranks.rank == 0))
    end = End(watch, files, Console(stderr=True), ranks)
    watch.begin()
    warnings.filterwarnings("ignore", _COMPILED_UNDER_GLOBAL_HOOKS, UserWarning)
    atexit.register(end.tell)  # runs after the program's own
    ending = program.run()
    end.ending = ending
    with contextlib.suppress(OSError, ValueError):  # Python says it once more, at its own end
        sys.stdout.flush()
    if watch.may_finish:
        end.tell()
    if ending.interrupted:
        sys.excepthook = lambda *told: None
        raise ProgramInterrupted
    return ending.exit_code or end.exit_code


def _program(line: Sequence[str]) -> Program:
    if line[:1] == ["--"]:
        line = line[1:]
    is_module = line[:1] == ["-m"]
    line = line[1:] if is_module else line
    if not line:
        raise ValueError("run: expected a script or -m MODULE after the options, got none; see `chameleon-mm run --help`")
    return Program(line[0], tuple(line[1:]), is_module=is_module)


def _session_maker(args: argparse.Namespace, *, told: bool) -> Callable[[Any, str | None], SwapSession]:
    """Function that makes the session. `told`: this rank is the one whose steps are told. Raises `ValueError` for what can be
    known to be wrong before there is one."""
    sizes = {name: getattr(args, name) for name in ("hbm_budget", "host_budget", "min_bytes")}
    for name, size in sizes.items():
        if size is not None:
            parse_size(size, what=f"--{name.replace('_', '-')}")
    if args.device is not None and not args.device.startswith("cuda"):
        resolve_device(args.device)  # a GPU is not asked: whoever has started CUDA can fork no workers that use it
    options: dict[str, Any] = {**sizes, "verify": args.verify, "plans": not args.no_plans, "recompute": not args.no_recompute}
    if args.progress and told:
        options["progress"] = True

    def make(model: Any, device: str | None) -> SwapSession:
        return SwapSession(device=args.device or device, model=model, **options)

    return make
