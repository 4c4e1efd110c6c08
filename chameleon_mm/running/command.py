"""The command `chameleon-mm run`: its options, and the report at the end.

own, program = arguments[:count_own(arguments)], arguments[count_own(arguments):]
exit_code = run(args, console)         # args.program: the command line of the program
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from chameleon_mm.device import resolve_device
from chameleon_mm.errors import ChameleonError, ProgramInterrupted
from chameleon_mm.outputs import check_outputs, print_line, tell_written
from chameleon_mm.report import SwapReport
from chameleon_mm.running.program import Ending, Program
from chameleon_mm.running.watch import TrainingWatch
from chameleon_mm.session import SwapSession
from chameleon_mm.units import parse_size

_SHOWN = ("device", "PROBLEM", "steps  ", "what the steps were", "peak device memory", "swapped out / in", "hidden share", "stall",
          "pinned host memory")  # fmt: skip
"""Beginnings of the report's labels that are shown at the end; all others are in its files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that stand before the program."""
    parser.usage = "chameleon-mm run [options] (script.py | -m MODULE) [args ...]"
    parser.allow_abbrev = False
    parser.add_argument("--hbm-budget", metavar="SIZE", help="device memory that a step may take (default: 90%% of the device)")
    parser.add_argument("--host-budget", metavar="SIZE", help="pinned host memory at most (default: the rank's part of half of it)")
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1, sim, sim:a100 (default: that of the parameters)")
    parser.add_argument("--min-bytes", metavar="SIZE", help="smaller saved storages stay on the device (default: 1MiB)")
    parser.add_argument("--no-recompute", action="store_true", help="plans only swap, and make nothing again")
    parser.add_argument("--no-plans", action="store_true", help="every step by the default rule: everything moves")
    parser.add_argument("--verify", action="store_true", help="compare checksums of what goes out and comes back; slow")
    parser.add_argument("--progress", action="store_true", help="a line for each step on stderr")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report to FILE, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report to FILE, as a page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the copies to FILE, for chrome://tracing and Perfetto")
    parser.add_argument("--quiet", action="store_true", help="print no report; files are written all the same")


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
    """Run the program and return its exit code. Raises `ValueError`, with nothing begun, for options or a program that are none,
    and `ProgramInterrupted` where an interrupt ended it."""
    program = _program(args.program)
    program.check()
    files = {"--report": args.report, "--html": args.html, "--trace": args.trace}
    check_outputs(files)
    watch = TrainingWatch(_session_maker(args))
    end = _End(watch, files, Console(stderr=True), quiet=args.quiet)
    watch.begin()
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


def _session_maker(args: argparse.Namespace) -> Callable[[Any, str | None], SwapSession]:
    """Function that makes the session. Raises `ValueError` for what can be known to be wrong before there is one."""
    sizes = {name: getattr(args, name) for name in ("hbm_budget", "host_budget", "min_bytes")}
    for name, size in sizes.items():
        if size is not None:
            parse_size(size, what=f"--{name.replace('_', '-')}")
    if args.device is not None and not args.device.startswith("cuda"):
        resolve_device(args.device)  # a GPU is not asked: whoever has started CUDA can fork no workers that use it
    options: dict[str, Any] = {**sizes, "verify": args.verify, "plans": not args.no_plans, "recompute": not args.no_recompute}
    if args.progress:
        options["progress"] = True

    def make(model: Any, device: str | None) -> SwapSession:
        return SwapSession(device=args.device or device, model=model, **options)

    return make


class _End:
    """The end of a run: the session is left, and the report is written and told, once."""

    def __init__(self, watch: TrainingWatch, files: dict[str, Path | None], console: Console, *, quiet: bool) -> None:
        self._watch = watch
        self._files = files
        self._console = console
        self._quiet = quiet
        self._told = False
        self.ending = Ending(exit_code=0, error=None)
        self.exit_code = 0
        """1 where the session itself failed."""

    def tell(self) -> None:
        """Leave the session and tell what it did. Does nothing the second time, nor in a forked child."""
        if self._told or self._watch.in_forked_child:
            return
        self._told = True
        try:
            report = self._watch.finish(self.ending.error)
        except (ChameleonError, RuntimeError) as error:
            self._say(f"the session failed as it ended: {error}")
            self.exit_code = 1
            return
        if self._watch.failure is not None:
            self._say(f"the program was stopped before its first step: {self._watch.failure}")
        elif self._watch.stood_aside is not None:
            self._say(f"nothing was swapped: {self._watch.stood_aside}")
        elif report is None and not self._quiet:
            self._say(self._nothing())
        if report is not None:
            self._write(report)

    def _nothing(self) -> str:
        if self._watch.postponed is not None:
            return f"nothing was swapped: every forward that trains ran {self._watch.postponed}"
        return (
            "no training was seen: no module with parameters was called with gradients on in this process, and no optimizer "
            "stepped; what child processes train is not swapped"
        )

    def _write(self, report: SwapReport) -> None:
        if not self._quiet:
            rows = [row for row in report.rows() if f"{row[0]}  ".startswith(_SHOWN)]
            width = max(len(label) for label, _ in rows)
            self._say("report")
            for label, text in rows:
                print_line(self._console, f"  {label:<{width}}  {text}")
        writers: dict[str, Callable[[Path], object]] = {
            "--report": lambda path: path.write_text(json.dumps(report.to_dict(), indent=1), encoding="utf-8"),
            "--html": report.save_html,
            "--trace": report.save_trace,
        }
        for option, path in self._files.items():
            if path is not None:
                writers[option](path)
                if not self._quiet:
                    tell_written(self._console, path)

    def _say(self, text: str) -> None:
        print_line(self._console, f"chameleon-mm run: {' '.join(text.split())}")
