"""`chameleon-mm plan`: checked arguments in, a step under fake tensors, tables, a file and an exit code out.

step = record(request)                        # takes seconds, for any model size
prediction = predict(step, ...)               # a fraction of a second; or, if more than activations are swapped,
                                              # predict_session(request): its first steps; or largest(...): a search
tables, JSON; 0: there is a plan, 1: there is none within the budgets
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.files import write_file
from chameleon_mm.plan.rule import MIN_BYTES
from chameleon_mm.tools.adapters import adapted, parse_adapters
from chameleon_mm.tools.blocks import Checkpointing, Survey
from chameleon_mm.tools.hub_models import hugging_face
from chameleon_mm.tools.largest import largest, say
from chameleon_mm.tools.outputs import print_line, tell_written
from chameleon_mm.tools.plan_options import Environment, spec_of
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
from chameleon_mm.tools.step_on_shapes import AUTOCAST, DTYPES
from chameleon_mm.tools.workload import BUILT_IN, Build, ModelUnusable, built_in, like_built_in, own_function

LARGEST_SCHEMA = "chameleon_mm.plan_largest/1"


def run(args: argparse.Namespace, console: Console, environment: Environment) -> int:
    """Run the command and return the exit code: 0 if the step, or with --largest any size, fits the budgets; else 1.

    `args`: as `plan_options.check` left them. Raises `ValueError` for bad usage, if possible before anything is built, and
    `OSError` if the file cannot be written.
    """
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
        told = {**environment("plan", SimDevice(spec_of(args))), **told}
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
            how = None if args.checkpointing == "fit" else _checkpointing(args.checkpointing)
            prediction = with_checkpointing(prediction, how, lambda how: record(replace(plain, checkpointed=how)))
    return prediction


def _bar(console: Console) -> Progress:
    """Return a progress bar with the elapsed time, only on a terminal. It disappears at the end."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


def _request(args: argparse.Namespace, **size: int) -> RunRequest:
    """Make the request from the arguments; `size` overrides batch, row length or number of layers.

    Raises `ValueError` for invalid sizes, and what `source_of` raises. No model is built.
    """
    spec = spec_of(args).shared_by(args.local_ranks)
    autocast = None if args.autocast is None else AUTOCAST[args.autocast]
    dtype = DTYPES[args.dtype or ("bfloat16" if autocast is None else "float32")]
    build = source_of(args.model, dtype=dtype, **{"batch": args.batch, "seq": args.seq, "layers": None, **size})
    return RunRequest(
        build=build if args.lora is None else adapted(build, parse_adapters(args.lora, args.quantise)),
        spec=spec,
        swapped=Swapped(optimizer=args.swap_optimizer, parameters=args.swap_parameters),
        hbm_budget_bytes=default_budget(spec) if args.hbm_budget is None else args.hbm_budget,
        host_budget_bytes=args.host_budget,
        dtype=dtype,
        optimizer=args.optimizer,
        min_bytes=MIN_BYTES if args.min_bytes is None else args.min_bytes,
        autocast=autocast,
        shards=None if args.fsdp is None else _shards(args.fsdp),
        local_ranks=args.local_ranks,
    )


def _shards(text: str) -> Shards:
    ranks, _, dtype = text.partition(":")
    return Shards(ranks=int(ranks), dtype=DTYPES[dtype] if dtype else None)


def _checkpointing(text: str) -> Checkpointing:
    return Checkpointing(survey=Survey()) if text == "selective" else Checkpointing(Fraction(1, int(text)))


def source_of(text: str, *, batch: int | None, seq: int | None, dtype: torch.dtype, layers: int | None = None) -> Build:
    """Builder of the model that `text` names, checked as far as possible. None: the model's default, or 1 row.

    Raises `ModelUnusable` if the model cannot be found.
    """
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
    likely = like_built_in(text, cutoff=0.8)
    if likely and not Path(text).exists():  # a typo, found without the network
        raise ModelUnusable(f"MODEL: expected one of {', '.join(BUILT_IN)}, got {text!r}; {likely}?")
    return hugging_face(text, batch=batch or 1, seq=seq, dtype=dtype, layers=layers)
