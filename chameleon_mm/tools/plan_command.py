"""`chameleon-mm plan`: arguments in, a step under fake tensors, tables, a file and an exit code out.

check everything that can be checked          # bad usage costs a moment
step = record(request)                        # seconds, whatever the model's size
prediction = predict(step, ...)               # a fraction of a second; or, if more than activations are swapped,
                                              # predict_session(request): its first steps; or largest(...): a search
tables, JSON; 0: there is a plan, 1: there is none within the budgets
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from chameleon_mm.device import SPECS, Device
from chameleon_mm.device.sim import SimDevice
from chameleon_mm.device.specs import GpuSpec, spec_by_name, spec_from_file
from chameleon_mm.files import write_file
from chameleon_mm.plan.rule import DEFAULT_BUDGET_SHARE, DefaultRule
from chameleon_mm.tools.adapters import BITS, adapted, parse_adapters
from chameleon_mm.tools.blocks import Checkpointing
from chameleon_mm.tools.hub_models import hugging_face
from chameleon_mm.tools.largest import SIZES, largest, say
from chameleon_mm.tools.outputs import check_outputs, print_line, tell_written
from chameleon_mm.tools.prediction import (
    PARTITIONS,
    REPLAYED,
    Prediction,
    default_budget,
    predict,
    predict_compiled,
    show,
    with_checkpointing,
)
from chameleon_mm.tools.session_on_shapes import RUN_STEPS, RunRequest, Swapped, predict_session, record, show_session
from chameleon_mm.tools.sharding import Shards
from chameleon_mm.tools.step_on_shapes import AUTOCAST, DTYPES, OPTIMIZERS
from chameleon_mm.tools.workload import BUILT_IN, Build, ModelUnusable, built_in, own_function
from chameleon_mm.units import AUTO, parse_budget, parse_size

Environment = Callable[[str, Device], Mapping[str, Any]]
"""Theme and device -> the header of a result file: device, simulated, commit, versions."""

LARGEST_SCHEMA = "chameleon_mm.plan_largest/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"built in: {', '.join(BUILT_IN)}; or module:function, which returns (model, batch) or (model, batch, loss_fn), "
        "given --batch and --seq as batch and seq (below); or the file, folder or name of a Hugging Face configuration (needs "
        "transformers: pip install 'chameleon-mm[plan]')",
    )
    _add_step_arguments(parser.add_argument_group("the step"))
    where = parser.add_argument_group("where it would run and what it may use")
    where.add_argument(
        "--gpu",
        default="h200",
        metavar="NAME|FILE",
        help=f"one of {', '.join(SPECS)} (default h200), or a .json file with a GPU's figures: docs/plan.md has one",
    )
    where.add_argument(
        "--fsdp",
        metavar="N[:DTYPE]",
        help="one of N ranks with shards of parameters, gradients and optimizer state, as FSDP2's; DTYPE: theirs (8:float32)",
    )
    where.add_argument(
        "--local-ranks", type=int, default=1, metavar="N",
        help="ranks that share the GPU's link to the host and its memory: each has 1/N of the rates (default 1)",
    )  # fmt: skip
    where.add_argument(
        "--hbm-budget",
        metavar="SIZE",
        help=f'device memory: "40GiB" (default: {DEFAULT_BUDGET_SHARE:.0%}% of the GPU\'s, as a session takes)',
    )
    where.add_argument("--host-budget", metavar="SIZE", help="pinned host memory (default: as much as it takes)")
    where.add_argument(
        "--no-recompute", action="store_true", help="a plan that only swaps (default: recompute where that takes less time)"
    )
    where.add_argument("--min-bytes", metavar="SIZE", help="smallest saved tensor worth moving (default: the library's)")
    where.add_argument(
        "--checkpointing", nargs="?", const="1", metavar="N|fit|selective",
        help="show torch's checkpointing beside the plan: of each block, of every N-th, of as few as fit the budget, or of "
        "each, keeping attention and every second product",
    )  # fmt: skip
    beside = parser.add_argument_group("a session that swaps more than activations")
    beside.add_argument(
        "--swap-optimizer",
        action="store_true",
        help="the optimizer's state is on the host between its steps, as with SwapSession(optimizer=...)",
    )
    beside.add_argument(
        "--swap-parameters",
        action="store_true",
        help="parameters and gradients come in their turn, as with SwapSession(parameters='swap')",
    )
    search = parser.add_argument_group("what fits")
    search.add_argument(
        "--largest",
        choices=SIZES,
        help="search for the largest batch, row (in steps of 64 tokens) or number of layers that fits, all else as said",
    )
    out = parser.add_argument_group("what it writes")
    out.add_argument("--json", type=Path, metavar="FILE", help="every figure as data")


def _add_step_arguments(step: argparse._ArgumentGroup) -> None:
    step.add_argument("--batch", type=int, metavar="N", help="rows (default 1)")
    step.add_argument(
        "--seq",
        type=int,
        metavar="N",
        help="tokens of a row (default: the model's context; 4096 at most where it is not built in)",
    )
    step.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of weights, and of activations without autocast: torch's default dtype while the model is built and run (default "
        "bfloat16, with --autocast float32)",
    )
    step.add_argument(
        "--autocast",
        choices=list(AUTOCAST),
        help="put forward under torch.autocast to it (default: no more than the model does itself)",
    )
    step.add_argument(
        "--compile",
        action="store_true",
        help="each repeated block is compiled, as by block.compile(), and what its compiled code saves is chosen too",
    )
    step.add_argument(
        "--lora", metavar="R[:NAMES]",
        help="adapters of rank R on linear modules of these names (8:q_proj,up), or on all but the output; the rest is frozen",
    )  # fmt: skip
    step.add_argument("--quantise", choices=list(BITS), help="bits of the frozen linear weights, with --lora")
    step.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="adamw",
        help="; ".join(f"{name}: {about}" for name, about in OPTIMIZERS.items()) + " (default adamw)",
    )  # fmt: skip


def run(args: argparse.Namespace, console: Console, environment: Environment) -> int:
    """Run the command and return the exit code: 0 if the step, or with --largest any size, fits the budgets; else 1.

    Raises `ValueError` for bad usage, if possible before anything is built, and `OSError` if the file cannot be written.
    """
    check_outputs({"--json": args.json})
    _check_swapped(args)
    recompute = () if args.no_recompute else REPLAYED
    if args.largest is not None:
        with _bar(console) as bar:
            bar.add_task(f"searching for the largest {args.largest}", total=None)
            found = largest(args.largest, lambda size: _request(args, **{args.largest: size}), recompute=recompute)
        for text in say(found):
            print_line(console, text, style="bold" if found.fits else "bold red")
        told, held = {"schema": LARGEST_SCHEMA, "predicted": True, **found.to_dict()}, found.fits
    elif (request := _request(args)).swapped:
        with _bar(console) as bar:
            steps = bar.track(range(RUN_STEPS), description="running a session's first steps on shapes alone")
            session = predict_session(request, steps)
        show_session(session, console)
        told, held = session.to_dict(), session.run.holds
    else:
        prediction = _predict(args, request, recompute, console)
        show(prediction, console)
        told, held = prediction.to_dict(), prediction.infeasible is None
    if args.json is not None:
        told = {**environment("plan", SimDevice(_spec(args.gpu))), **told}
        write_file(args.json, json.dumps(told, indent=1) + "\n")
        tell_written(console, args.json)
    return 0 if held else 1


def _predict(args: argparse.Namespace, request: RunRequest, recompute: Collection[str], console: Console) -> Prediction:
    budgets = request.spec, request.hbm_budget_bytes, request.host_budget_bytes, recompute
    with _bar(console) as bar:
        if args.compile:
            shares = bar.track(PARTITIONS, description="compiling, recording and planning a step for each partition")
            prediction = predict_compiled((record(replace(request, compiled=share)) for share in shares), *budgets)
        else:
            recording = bar.add_task("recording one step under fake tensors, and planning", total=2)
            step = record(request)
            bar.advance(recording)
            prediction = predict(step, *budgets)
        if args.checkpointing is not None:
            bar.add_task("recording the step with checkpointing", total=None)
            plain = replace(request, compiled=PARTITIONS[0] if args.compile else None)
            how = None if args.checkpointing == "fit" else args.checkpointing
            prediction = with_checkpointing(prediction, how, lambda how: record(replace(plain, checkpointed=how)))
    return prediction


def _bar(console: Console) -> Progress:
    """Bar of what is done, with the time so far. It is gone at the end, and is not drawn into a file."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def _request(args: argparse.Namespace, **size: int) -> RunRequest:
    """Make the request from the arguments; `size` overrides batch, row length or number of layers.

    Raises `ValueError` for invalid sizes, and what `source_of` raises. No model is built.
    """
    if args.local_ranks < 1:
        raise ValueError(f"--local-ranks: expected 1 or more, got {args.local_ranks}")
    spec = _spec(args.gpu).shared_by(args.local_ranks)
    given, whole = args.hbm_budget, lambda: spec.hbm_bytes
    hbm_budget = default_budget(spec) if given in (None, AUTO) else parse_budget(given, whole, what="--hbm-budget")
    if hbm_budget == 0:
        raise ValueError("--hbm-budget: expected more than 0 bytes, got 0; say how much device memory the step may take")
    autocast = None if args.autocast is None else AUTOCAST[args.autocast]
    dtype = DTYPES[args.dtype or ("bfloat16" if autocast is None else "float32")]
    build = source_of(args.model, dtype=dtype, **{"batch": args.batch, "seq": args.seq, "layers": None, **size})
    return RunRequest(
        build=build if args.lora is None else adapted(build, parse_adapters(args.lora, args.quantise)),
        spec=spec,
        swapped=Swapped(optimizer=args.swap_optimizer, parameters=args.swap_parameters),
        hbm_budget_bytes=hbm_budget,
        host_budget_bytes=None if args.host_budget is None else parse_size(args.host_budget, what="--host-budget"),
        dtype=dtype,
        optimizer=args.optimizer,
        min_bytes=DefaultRule().min_bytes if args.min_bytes is None else parse_size(args.min_bytes, what="--min-bytes"),
        autocast=autocast,
        shards=None if args.fsdp is None else _shards(args.fsdp),
        local_ranks=args.local_ranks,
    )


def _spec(text: str) -> GpuSpec:
    return spec_from_file(Path(text)) if text.endswith(".json") else spec_by_name(text)


def _shards(text: str) -> Shards:
    ranks, _, dtype = text.partition(":")
    if not ranks.isdecimal() or int(ranks) < 2 or (":" in text and dtype not in DTYPES):
        raise ValueError(f"--fsdp: expected 2 or more ranks, or those and one of {', '.join(DTYPES)} (8:float32), got {text!r}")
    return Shards(ranks=int(ranks), dtype=DTYPES[dtype] if dtype else None)


def _checkpointing(text: str) -> Checkpointing | str:
    """ "fit": of as few blocks as fit."""
    if text in ("fit", "selective"):
        return text if text == "fit" else Checkpointing(selective=True)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--checkpointing: expected fit, selective, or a number of 1 or more, got {text!r}")
    return Checkpointing(Fraction(1, int(text)))


def _check_swapped(args: argparse.Namespace) -> None:
    """Raise `ValueError` for options about swapping that contradict each other. Parses --checkpointing."""
    swaps = args.swap_optimizer or args.swap_parameters
    if args.optimizer == "none" and args.swap_optimizer:
        raise ValueError("--swap-optimizer: expected an optimizer, whose state is swapped, got --optimizer none; name one")
    if args.compile and (args.largest or swaps):
        raise ValueError("--compile: expected no --largest, --swap-optimizer or --swap-parameters beside it; leave those out")
    if args.quantise is not None and args.lora is None:
        raise ValueError("--quantise: expected --lora beside it, since packed weights are not trained; name a rank")
    if args.fsdp is not None and swaps:
        raise ValueError(
            "--fsdp: expected no --swap-optimizer or --swap-parameters beside it, which are one device's; leave those out"
        )
    if args.checkpointing is not None:
        args.checkpointing = _checkpointing(args.checkpointing)
        if args.largest or swaps:
            raise ValueError(
                "--checkpointing: expected no --largest, --swap-optimizer or --swap-parameters beside it; leave those out"
            )
    if args.largest is None:
        return
    if args.swap_parameters and not args.swap_optimizer:
        raise ValueError("--largest: expected --swap-optimizer beside --swap-parameters, for what state needs; say both")
    if args.largest != "layers" and getattr(args, args.largest) is not None:
        raise ValueError(f"--largest {args.largest}: expected no --{args.largest}, which is searched for; leave it out")


def source_of(text: str, *, batch: int | None, seq: int | None, dtype: torch.dtype, layers: int | None = None) -> Build:
    """Builder of the model that `text` names, checked as far as possible. None: the model's default, or 1 row.

    Raises `ModelUnusable` if the model cannot be found, and `ValueError` for sizes below 1.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and value < 1:
            raise ValueError(f"--{name}: expected 1 or more, got {value}")
    if not text:
        raise ModelUnusable(
            f"MODEL: expected one of {', '.join(BUILT_IN)}, module:function, or a Hugging Face configuration, got ''"
        )
    if text in BUILT_IN:
        return built_in(text, batch=batch or 1, seq=seq, layers=layers)
    if ":" in text and not Path(text).exists():
        return own_function(text, batch=batch, seq=seq, layers=layers)
    # A name on the hub is `name` or `owner/name`.
    is_a_path = text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith(".json")
    if is_a_path and not (Path(text).is_file() or Path(text).is_dir()):
        raise ModelUnusable(
            f"MODEL: expected a file or folder with a Hugging Face configuration, got {text!r}, which is neither; correct "
            f"the path, or name a built-in model or module:function"
        )
    likely = difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=0.8)
    if likely and not Path(text).exists():  # a typo would cost half a minute of network requests
        raise ModelUnusable(f"MODEL: expected one of {', '.join(BUILT_IN)}, got {text!r}; {likely[0]}?")
    return hugging_face(text, batch=batch or 1, seq=seq, dtype=dtype, layers=layers)
