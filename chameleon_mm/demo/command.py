"""`chameleon-mm demo`: arguments in, three runs, tables and an exit code out.

    check everything that can be checked          # bad usage costs seconds, not a run
    unswapped = train(...)                        # its peak gives the default budget
    swapped = train(..., SwapSession)             # its report after each step says what swapping made of it
    plain = train_plain(...)                      # the same training with nothing of the library around it: the judge
    differs?  the reference once more             # does the machine reproduce itself at all?
    table, JSON, exit code

torch is imported when the command runs, not when its arguments are declared: help stays fast.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chameleon_mm.outputs import check_outputs, tell_written
from chameleon_mm.units import format_size, format_size_up, parse_size

if TYPE_CHECKING:
    from chameleon_mm.demo.floor import Floor
    from chameleon_mm.demo.outcome import Outcome
    from chameleon_mm.demo.program import Numbers, Program
    from chameleon_mm.demo.train import RunResult
    from chameleon_mm.device.protocols import Device
    from chameleon_mm.report import SwapReport
    from chameleon_mm.session import SwapSession


_LIBRARY = "chameleon_mm"


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().removeprefix(f"{_LIBRARY}: "))  # beside the demo's own figures nobody asks whose


@contextmanager
def remarks() -> Iterator[list[str]]:
    """The library's warnings, as they come. Handlers of the program's own get them all the same."""
    listener, logger = _Listener(), logging.getLogger(_LIBRARY)
    logger.addHandler(listener)
    try:
        yield listener.said
    finally:
        logger.removeHandler(listener)


SIZES: dict[str, dict[str, int]] = {
    "simulated": {"steps": 11, "layers": 4, "width": 64, "heads": 2, "context": 8192, "batch": 1},
    "real": {"steps": 20, "layers": 12, "width": 1024, "heads": 16, "context": 1024, "batch": 16},
}
"""Default sizes by kind of device. Activations dominate in both: parameters, gradients and AdamW's state together are less
than a fifth of the unswapped peak. Simulated ones are computed on the CPU, in about a minute on two cores, where only a long
context gives a narrow model the compute per saved byte that a real one has: that of attention grows with the context, that of
matrix products with the width. Real ones need about 20 GiB of device memory."""

RATIO_SIZES: dict[str, dict[str, int]] = {
    "simulated": {"steps": 8, "layers": 12, "width": 512, "heads": 8, "context": 256, "batch": 2},
    "real": {"steps": 20, "layers": 24, "width": 2048, "heads": 16, "context": 1024, "batch": 8},
}
"""Default sizes under --ratio, as of a model that is too large for its device: weights, gradients and AdamW's state are half of
the unswapped peak or more. Real ones need about 40 GiB of device memory for the run without swapping."""

Environment = Callable[[str, "Device"], Mapping[str, Any]]
"""Theme and device -> the header of a result file: device, simulated, commit, versions."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options on `parser`."""
    where = parser.add_argument_group("where it runs and what it may use")
    where.add_argument(
        "--device", default="auto", metavar="DEVICE",
        help="auto (CUDA where there is one, else sim), cuda, cuda:1, sim (an H200), sim:a100, ... (default: auto)",
    )  # fmt: skip
    where.add_argument(
        "--hbm-budget",
        metavar="SIZE",
        help='device memory the swapped run may use: "300MiB" (default: half of what it uses unswapped)',
    )
    where.add_argument(
        "--ratio",
        type=float,
        metavar="N",
        help="train within 1/N of the device memory that it takes unswapped, with parameters, gradients and optimizer state "
        "swapped, too (in place of --hbm-budget; other default sizes: a model too large for its device)",
    )
    where.add_argument("--host-budget", metavar="SIZE", help="pinned host memory it may use (default: decided by what is free)")
    where.add_argument("--min-bytes", metavar="SIZE", help="smallest saved tensor worth moving (default: the library's)")
    model = parser.add_argument_group("the model and its training (fp32)")
    model.add_argument("--steps", type=int, metavar="N", help=f"steps of each run ({_default('steps')})")
    model.add_argument("--layers", type=int, metavar="N", help=f"transformer blocks ({_default('layers')})")
    model.add_argument("--width", type=int, metavar="N", help=f"width of the residual stream ({_default('width')})")
    model.add_argument("--heads", type=int, metavar="N", help=f"attention heads, a divisor of the width ({_default('heads')})")
    model.add_argument(
        "--context", type=int, metavar="N", help=f"bytes per row, in some steps half of it ({_default('context')})"
    )
    model.add_argument("--batch", type=int, metavar="N", help=f"rows per step ({_default('batch')})")
    model.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, dropout and rows (default 0)")
    model.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="AdamW's learning rate (default 1e-3)")
    model.add_argument("--dropout", type=float, default=0.1, metavar="SHARE", help="0 <= share < 1 (default 0.1)")
    model.add_argument(
        "--text", type=Path, metavar="FOLDER", help="its *.py files are the text (default: Python's standard library)"
    )
    out = parser.add_argument_group("what it writes")
    out.add_argument("--json", type=Path, metavar="FILE", help="every figure as data")
    out.add_argument("--report", type=Path, metavar="FILE.html", help="the swapped run's report as a page")
    out.add_argument(
        "--trace", type=Path, metavar="FILE.json", help="the swapped run's copies as a trace for chrome://tracing or Perfetto"
    )


def _default(name: str) -> str:
    simulated, real = (SIZES[kind][name] for kind in ("simulated", "real"))
    return f"default {simulated}" if simulated == real else f"default {simulated} simulated, {real} on a GPU"


def run(args: argparse.Namespace, console: Console, environment: Environment) -> int:
    """Run the demo and return its exit code: 0 if all runs are bit-identical and the budget held, 1 if not.

    Raises `ValueError` and `DeviceUnavailable` for bad usage, before anything is trained where that can be known, and
    `torch.OutOfMemoryError` where a run does not fit.
    """
    from chameleon_mm.demo.show import show

    outcome = _Job(args).run(console)
    show(outcome, console)
    if args.json is not None:
        args.json.write_text(
            json.dumps(outcome.to_dict(environment("demo", outcome.device)), indent=1) + "\n", encoding="utf-8"
        )
    for path in (args.report, args.trace, args.json):
        if path is not None:
            tell_written(console, path)
    return 0 if outcome.passed else 1


class _Job:
    """One demo with its arguments checked. Raises `ValueError` for those that cannot be."""

    def __init__(self, args: argparse.Namespace) -> None:
        from chameleon_mm.demo.model import GPTConfig
        from chameleon_mm.demo.program import TrainConfig, draw_batches, read_text

        self._args = args
        check_outputs({"--json": args.json, "--report": args.report, "--trace": args.trace})
        self._budgets = {
            name: None if value is None else parse_size(value, what="--" + name.replace("_", "-"))
            for name, value in (
                ("hbm_budget", args.hbm_budget),
                ("host_budget", args.host_budget),
                ("min_bytes", args.min_bytes),
            )
        }
        self.ratio: float | None = args.ratio
        if self.ratio is not None and not 1.0 < self.ratio < float("inf"):
            raise ValueError(f"--ratio: expected more than 1, got {self.ratio:g}; 4 trains within a quarter of the memory")
        if self.ratio is not None and args.hbm_budget is not None:
            raise ValueError("--ratio: expected none beside --hbm-budget, as both say the budget; leave one of the two out")
        choices = SIZES if self.ratio is None else RATIO_SIZES
        sizes = choices["simulated" if self.device().simulated else "real"]
        size = {name: default if (given := getattr(args, name)) is None else given for name, default in sizes.items()}
        self.config = TrainConfig(
            model=GPTConfig(
                layers=size["layers"], width=size["width"], heads=size["heads"], context=size["context"], dropout=args.dropout
            ),
            steps=size["steps"], batch=size["batch"], seed=args.seed, lr=args.lr, built_on_host=self.ratio is not None,
        )  # fmt: skip
        self._rows = draw_batches(
            read_text(args.text), steps=size["steps"], batch=size["batch"], context=size["context"], seed=args.seed
        )

    def device(self) -> Device:
        """A device as the user named it: a fresh one on the simulator, the same GPU again on CUDA."""
        from chameleon_mm.device import present_device, resolve_device

        return present_device() if self._args.device == "auto" else resolve_device(self._args.device)

    def run(self, console: Console) -> Outcome:
        from chameleon_mm.demo.outcome import Outcome, notes
        from chameleon_mm.demo.train import first_difference

        self._check_budgets()
        with _progress(console) as progress:
            unswapped = self._train(progress, "no swapping")
            given = self._budgets["hbm_budget"]
            hbm_budget = int(unswapped.peak_bytes / (self.ratio or 2)) if given is None else given
            floor = None if self.ratio is None else self._floor(progress, unswapped.peak_bytes, hbm_budget, self.ratio)
            self._check_host_budget(unswapped.peak_bytes, hbm_budget)
            device = self.device()
            sessions: list[SwapSession] = []
            reports: list[SwapReport] = []

            def swapped_session(program: Program) -> SwapSession:
                sessions.append(self._session(device, program, hbm_budget))
                return sessions[0]

            with remarks() as said:
                swapped = self._train(
                    progress, "swapping", device=device, session_of=swapped_session, on_host=self.ratio is not None,
                    on_step=lambda: reports.append(sessions[0].report()),
                )  # fmt: skip
            plain = self._train_plain(progress, "plain PyTorch", device)
            difference, plain_difference = first_difference(unswapped, swapped), first_difference(plain, swapped)
            reproducible = plain_reproducible = None
            if difference is not None:
                reproducible = first_difference(unswapped, self._train(progress, "no swapping, again")) is None
            if plain_difference is not None:
                plain_again = self._train_plain(progress, "plain, again", device)
                plain_reproducible = first_difference(plain, plain_again) is None
        # The run reset the device's peaks before each step, and read them after it: of them all the session knows less.
        peak_bytes = swapped.peak_bytes
        report = replace(sessions[0].report(), peak_hbm_bytes=peak_bytes, peak_hbm_at_most_bytes=peak_bytes)
        if self._args.report is not None:
            report.save_html(self._args.report)
        if self._args.trace is not None:
            report.save_trace(self._args.trace)
        return Outcome(
            config=self.config, device=device, unswapped=unswapped, swapped=swapped, plain=plain, report=report.to_dict(),
            notes=notes(reports, swapped.kinds), hbm_budget_bytes=hbm_budget, difference=difference,
            reproducible=reproducible, plain_difference=plain_difference, plain_reproducible=plain_reproducible,
            remarks=tuple(dict.fromkeys(said)), ratio=self.ratio, floor=floor,
        )  # fmt: skip

    def _check_budgets(self) -> None:
        """Refuse the user's budgets now rather than after a run without them."""
        from chameleon_mm.demo.program import Program
        from chameleon_mm.policy import DefaultRule

        if all(value is None for value in self._budgets.values()):
            return
        host_budget, min_bytes = self._budgets["host_budget"], self._budgets["min_bytes"]
        smallest = DefaultRule().min_bytes if min_bytes is None else min_bytes
        if host_budget is not None and host_budget < smallest:
            raise ValueError(
                f"--host-budget: expected at least {format_size(smallest)}, one block of the smallest tensor that moves "
                f"(--min-bytes), got {format_size(host_budget)}; raise it"
            )
        if self.ratio is not None:  # which is known once the run without swapping is
            return
        device = self.device()
        with device.compute():
            program = Program(self.config, self._rows, device.torch_device)
            with self._session(device, program, self._budgets["hbm_budget"]):
                pass

    def _session(self, device: Device, program: Program, hbm_budget: int | None) -> SwapSession:
        from chameleon_mm.session import SwapSession

        moves_all = self.ratio is not None
        return SwapSession(
            hbm_budget,
            self._budgets["host_budget"],
            device=device,
            min_bytes=self._budgets["min_bytes"],
            model=program.model,
            optimizer=program.optimizer if moves_all else None,
            parameters="swap" if moves_all else "keep",
        )

    def _floor(self, progress: Progress, peak_bytes: int, hbm_budget: int, ratio: float) -> Floor:
        """The least that the training takes. Raises `ValueError` for a ratio beyond it, before the run that would not hold."""
        from chameleon_mm.demo.floor import measure_floor

        task = progress.add_task("floor", total=1)
        with remarks():
            floor = measure_floor(self.config, self._rows, self.device, self._session)
        progress.advance(task)
        if hbm_budget < floor.smallest_bytes:
            most = int(peak_bytes / floor.smallest_bytes * 100) / 100
            raise ValueError(
                f"--ratio: expected at most {most:g} for this model and batch, got {ratio:g}: within "
                f"{format_size(hbm_budget)} it cannot train; the smallest budget is {format_size_up(floor.smallest_bytes)}, of "
                f"{floor.why}"
            )
        return floor

    def _check_host_budget(self, peak_bytes: int, hbm_budget: int) -> None:
        """Check the host budget: whatever was live at the unswapped peak and is above the HBM budget must be on the host at
        that moment."""
        host_budget, needed = self._budgets["host_budget"], peak_bytes - hbm_budget
        if host_budget is not None and host_budget < needed:
            raise ValueError(
                f"--host-budget: expected at least {format_size(needed)}, the unswapped peak of {format_size(peak_bytes)} less "
                f"the HBM budget of {format_size(hbm_budget)}, got {format_size(host_budget)}; raise either budget"
            )

    def _train(
        self,
        progress: Progress,
        what: str,
        *,
        device: Device | None = None,
        on_step: Callable[[], None] = lambda: None,
        **session: Any,
    ) -> RunResult:
        from chameleon_mm.demo.train import train

        task = progress.add_task(what, total=self.config.steps)

        def stepped() -> None:
            progress.advance(task)
            on_step()

        return train(self.config, self._rows, device or self.device(), **session, on_step=stepped)

    def _train_plain(self, progress: Progress, what: str, device: Device) -> Numbers:
        """The torch device on which `device` computes; nothing else is asked of it."""
        from chameleon_mm.demo.program import train_plain

        task = progress.add_task(what, total=self.config.steps)
        return train_plain(self.config, self._rows, device.torch_device, on_step=lambda: progress.advance(task))


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)
