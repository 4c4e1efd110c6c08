"""The command `chameleon-mm run`: its options, and the report at the end.

own, program = arguments[:count_own(arguments)], arguments[count_own(arguments):]
exit_code = run(args, console)         # args.program: the command line of the program
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from chameleon_mm.errors import ChameleonError, ProgramInterrupted
from chameleon_mm.files import write_file
from chameleon_mm.tools.main_program import Ending, Program
from chameleon_mm.tools.outputs import check_outputs, print_line, tell_written
from chameleon_mm.units import AUTO, parse_budget, parse_size

if TYPE_CHECKING:
    from chameleon_mm.api.session import SwapSession
    from chameleon_mm.report.report import SwapReport
    from chameleon_mm.tools.training_watch import TrainingWatch

# --- Rank of this process among those of a launcher. It is part of file names, and decides which rank prints


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    rank: int = 0
    count: int = 1

    @classmethod
    def started_by_launcher(cls) -> LaunchedRank:
        """Read torchrun's variables, which other launchers set too. Without them, this process is the only rank."""
        environ = os.environ  # noqa: TID251  # launchers pass ranks in environment variables only
        try:
            return cls(rank=int(environ["RANK"]), count=int(environ["WORLD_SIZE"]))
        except (KeyError, ValueError):
            return cls()

    def own(self, path: Path) -> Path:
        """Return the name of this rank's file: `report.rank1.json` if there are several ranks."""
        return path if self.count == 1 else path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")


# --- End of a run: exit the session, then write and print its report, once. Only the first rank prints

_SHOWN = frozenset({
    "in short", "device", "budget of device memory", "PROBLEM", "WARNING", "steps", "what the steps were", "peak device memory",
    "recomputed", "swapped out / in", "hidden share of copy time", "stall", "pinned host memory", "pins",
})  # fmt: skip
"""Labels of the report that are printed at the end. Its files have all labels."""


class End:
    """End of a run: exits the session, then writes and prints its report."""

    def __init__(self, watch: TrainingWatch, files: Mapping[str, Path], console: Console, ranks: LaunchedRank) -> None:
        self._watch, self._files, self._console, self._ranks = watch, files, console, ranks
        self._written: list[Path] = []
        self._told = False
        self.ending = Ending(exit_code=0, error=None)
        self.exit_code = 0
        """1 if the session itself failed, or a file of its report could not be written."""

    def tell(self) -> None:
        """Exit the session and print its report. Does nothing at a second call, or in a forked child."""
        if self._told or self._watch.in_forked_child:
            return
        self._told = True
        try:
            report = self._watch.finish(self.ending.error)
        except (ChameleonError, RuntimeError) as error:
            self.exit_code = 1
            self._say(f"the session failed as it ended: {error}")
            return
        why = self._why_nothing(report)
        if report is not None:
            self._write(report)
        failed = self.ending.error is not None and not self.ending.interrupted  # an interrupt ends all ranks
        tells = self._ranks.rank == 0 or failed
        if why is not None and (tells or self._watch.failure is not None):
            self._say(why)
        if report is not None and tells:
            self._show(report)

    def _why_nothing(self, report: SwapReport | None) -> str | None:
        watch = self._watch
        if watch.failure is not None:
            return f"the program was stopped before its first step: {watch.failure}"
        if watch.stood_aside is not None:
            return f"{'nothing' if report is None else 'nothing more'} was swapped: {watch.stood_aside}"
        if report is not None:
            return None
        if watch.postponed is not None:
            return f"nothing was swapped: every forward that trains ran {watch.postponed}"
        return (
            "no training was seen: no module with parameters was called with gradients on in this process, and no optimizer "
            "stepped; what child processes train is not swapped"
        )

    def _write(self, report: SwapReport) -> None:
        figures = report.to_dict()
        if self._ranks.count > 1:  # a session knows its rank only if the program has a process group
            figures |= {"rank": self._ranks.rank, "world_size": self._ranks.count}
        writers: dict[str, Callable[[Path], object]] = {
            "--report": lambda path: write_file(path, json.dumps(figures, indent=1)),
            "--html": report.save_html,
            "--trace": report.save_trace,
        }
        for option, path in self._files.items():
            try:
                writers[option](path)
                self._written.append(path)
            except OSError as error:
                self.exit_code = 1
                self._say(f"{option}: {path} was not written: {error.strerror}")

    def _show(self, report: SwapReport) -> None:
        rows = [(label, text) for label, text in report.rows() if label.removesuffix(" (simulated)") in _SHOWN]
        width = max(len(label) for label, _ in rows)
        self._say("report" if self._ranks.count == 1 else f"report of rank {self._ranks.rank} of {self._ranks.count}")
        for label, text in rows:
            print_line(self._console, f"  {label:<{width}}  {text}")
        for path in self._written:
            tell_written(self._console, path)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print_line(self._console, f"chameleon-mm run: {' '.join(text.split())}")


_COMPILED_UNDER_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""Warning of torch at each call of a compiled module while the watch's hook is on. The hook changes nothing: Note [Watch]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "chameleon-mm run [options] (script.py | -m MODULE) [args ...]"
    parser.allow_abbrev = False
    parser.add_argument("--hbm-budget", metavar="SIZE", help="device memory that a step may take: 20GiB, 80%% (default: auto)")
    host = "pinned host memory at most: 64GiB, 30%% (default: the rank's part of half of it)"
    parser.add_argument("--host-budget", metavar="SIZE", help=host)
    parser.add_argument("--device", metavar="NAME", help="cuda, cuda:1, sim, sim:a100 (default: that of the parameters)")
    parser.add_argument("--min-bytes", metavar="SIZE", help="smaller saved storages stay on the device (default: 1MiB)")
    parser.add_argument("--no-recompute", action="store_true", help="plans only swap, and recompute nothing")
    parser.add_argument("--no-plans", action="store_true", help="every step by the default rule: everything moves")
    for option, does in (("--keep", "stays on the device"), ("--never-recompute", "is never dropped")):
        parser.add_argument(
            option, action="append", default=[], metavar="PATTERN",
            help=f"what modules with such paths save {does}, as '*.lm_head'; may be given again",
        )  # fmt: skip
    parser.add_argument("--progress", action="store_true", help="a line for each step on stderr")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report to FILE, as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report to FILE, as a page")
    copies = "write the copies to FILE, for chrome://tracing and Perfetto"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=copies)


def count_own(arguments: Sequence[str]) -> int:
    """Count the first `arguments` that are options of `run`: the rest is the program with its arguments. Raises `ValueError`
    for a misspelt option."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    with_value = {name for action in parser._actions if action.nargs != 0 for name in action.option_strings}
    known = ["--help", *(name for action in parser._actions for name in action.option_strings)]
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-", "-m", "-c", "--"):
        given = arguments[at].partition("=")[0]
        for near in difflib.get_close_matches(given, known, 1) if given not in known else ():
            raise ValueError(f"run: expected an option of its own before the script, got {given}; did you mean {near}?")
        at += 2 if arguments[at] in with_value else 1
    return min(at, len(arguments))


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the program and return its exit code. Raises `ValueError` for invalid options or no program, before anything runs,
    and `ProgramInterrupted` if an interrupt ended the program."""
    program = _program(args.program)
    program.check()
    ranks = LaunchedRank.started_by_launcher()
    given = {"--report": args.report, "--html": args.html, "--trace": args.trace}
    files = {option: ranks.own(path) for option, path in given.items() if path is not None}
    check_outputs(files)
    make_session = _session_maker(args, told=ranks.rank == 0)
    from chameleon_mm.tools.training_watch import TrainingWatch  # imports torch, which bad usage does not need

    watch = TrainingWatch(make_session)
    end = End(watch, files, Console(stderr=True), ranks)
    watch.begin()
    warnings.filterwarnings("ignore", _COMPILED_UNDER_GLOBAL_HOOKS, UserWarning)
    atexit.register(end.tell)  # runs after the program's own exit handlers
    ending = program.run()
    end.ending = ending
    with contextlib.suppress(OSError, ValueError):  # Python reports the error again at its exit
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
    """Return the function that makes the session. `told`: this rank prints its steps. Raises `ValueError` for options that are
    invalid in any session."""
    sizes = {name: getattr(args, name) for name in ("hbm_budget", "host_budget", "min_bytes")}
    for name, size in sizes.items():
        if size not in (None, AUTO):
            (parse_size if name == "min_bytes" else parse_budget)(size, what=f"--{name.replace('_', '-')}")
    if args.device is not None and not args.device.startswith("cuda"):
        from chameleon_mm.device import resolve_device

        resolve_device(args.device)  # without a query of a GPU: it would start CUDA, and forked workers could not use it
    options: dict[str, Any] = {**sizes, "plans": not args.no_plans, "recompute": not args.no_recompute}
    options |= {"keep": args.keep, "never_recompute": args.never_recompute}
    if args.progress and told:
        options["progress"] = True

    from chameleon_mm.api.session import SwapSession  # before the program, whose folder will be first in sys.path

    def make(model: Any, device: str | None) -> SwapSession:
        return SwapSession(device=args.device or device, model=model, **options)

    return make
