"""Options of `chameleon-mm plan`, and all checks of them that need no torch, so that bad usage fails fast.

add_arguments(parser)
check(args)                        # ValueError; sizes are numbers afterwards
run(args, console, environment)    # check, then plan_command.run
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from chameleon_mm.device.specs import SPECS, GpuSpec, spec_by_name, spec_from_file
from chameleon_mm.plan.rule import DEFAULT_BUDGET_SHARE
from chameleon_mm.tools.outputs import check_outputs
from chameleon_mm.units import AUTO, parse_budget, parse_size

if TYPE_CHECKING:
    from chameleon_mm.device.protocols import Device

Environment = Callable[[str, "Device"], Mapping[str, Any]]
"""Theme and device -> the header of a result file: device, simulated, commit, versions."""

MODELS = (
    "llama-7b", "llama-13b", "llama-70b", "llama-3-8b", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "vit-l16", "dit-xl2",
    "resnet-50", "video-dit-2b",
)  # fmt: skip
"""Keys of `workload.BUILT_IN`."""

DTYPES = ("bfloat16", "float16", "float32")
"""Keys of `step_on_shapes.DTYPES`. The first two are the keys of its AUTOCAST."""

OPTIMIZERS = {
    "adamw": "torch's AdamW as it runs by default on CUDA, which makes temporaries as large as the parameters",
    "adamw-fused": "AdamW(fused=True): one kernel, no temporaries",
    "adamw-8bit": "AdamW with moments of 8 bits and a float32 scale for 256 elements, as bitsandbytes' and torchao's",
    "sgd": "SGD with momentum, as it runs by default on CUDA",
    "none": "forward and backward alone",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL",
        help=f"built in: {', '.join(MODELS)}; or module:function, which returns (model, batch) or (model, batch, loss_fn), "
        "given --batch and --seq as batch and seq (below); or the file, folder or name of a Hugging Face configuration (needs "
        "transformers: pip install 'chameleon-mm[plan]')",
    )  # fmt: skip
    _add_step_arguments(parser.add_argument_group("the step"))
    where = parser.add_argument_group("where it would run and what it may use")
    gpus = f"one of {', '.join(SPECS)} (default h200), or a .json file with a GPU's figures: docs/plan.md has one"
    where.add_argument("--gpu", default="h200", metavar="NAME|FILE", help=gpus)
    where.add_argument(
        "--fsdp", "--shards", metavar="N[:DTYPE]",
        help="one of N ranks with shards of parameters, gradients and optimizer state, as FSDP2's; DTYPE: theirs (8:float32)",
    )  # fmt: skip
    where.add_argument(
        "--local-ranks", type=int, default=1, metavar="N",
        help="ranks that share the GPU's link to the host and its memory: each has 1/N of both (default 1)",
    )  # fmt: skip
    hbm = f'device memory: "40GiB" or "80%%" (default: {DEFAULT_BUDGET_SHARE:.0%}% of the GPU\'s, as a session takes)'
    where.add_argument("--hbm-budget", metavar="SIZE", help=hbm)
    host = 'pinned host memory, of all --local-ranks: "64GiB", "30%%" or "auto", half (default: as much as it takes)'
    where.add_argument("--host-budget", metavar="SIZE", help=host)
    of_host = "the host's memory, of which --host-budget is a share, half by default (default: what this machine has free)"
    where.add_argument("--host-memory", metavar="SIZE", help=of_host)
    swaps = "a plan that only swaps (default: recompute where that takes less time)"
    where.add_argument("--no-recompute", action="store_true", help=swaps)
    where.add_argument("--min-bytes", metavar="SIZE", help="smallest saved tensor worth moving (default: the library's)")
    where.add_argument(
        "--checkpointing", nargs="?", const="1", metavar="N|fit|selective",
        help="show torch's checkpointing beside the plan: of each block, of every N-th, of as few as fit the budget, or of "
        "each, keeping as many products and attentions as fit",
    )  # fmt: skip
    more = parser.add_argument_group("a session that swaps more than activations")
    state = "the optimizer's state is on the host between its steps, as with SwapSession(optimizer=...)"
    more.add_argument("--swap-optimizer", action="store_true", help=state)
    parameters = "parameters and gradients come in their turn, as with SwapSession(parameters='swap')"
    more.add_argument("--swap-parameters", action="store_true", help=parameters)
    fits = "search for the largest batch, row (in steps of 64 tokens) or number of layers that fits, all else as said"
    search = parser.add_argument_group("what fits")
    search.add_argument("--largest", choices=("batch", "seq", "layers"), help=fits)
    out = parser.add_argument_group("what it writes")
    out.add_argument("--json", type=Path, metavar="FILE", help="every figure as data")


def _add_step_arguments(step: argparse._ArgumentGroup) -> None:
    step.add_argument("--batch", type=int, metavar="N", help="rows (default 1)")
    tokens = "tokens of a row (default: the model's context; 4096 at most where it is not built in)"
    step.add_argument("--seq", type=int, metavar="N", help=tokens)
    step.add_argument(
        "--dtype", choices=DTYPES,
        help="of weights, and of activations without autocast: torch's default dtype while the model is built and run (default "
        "bfloat16, with --autocast float32)",
    )  # fmt: skip
    autocast = "put forward under torch.autocast to it (default: no more than the model does itself)"
    step.add_argument("--autocast", choices=DTYPES[:2], help=autocast)
    compiled = "each repeated block is compiled, as by block.compile(), and what its compiled code saves is chosen too"
    step.add_argument("--compile", action="store_true", help=compiled)
    step.add_argument(
        "--lora", metavar="R[:NAMES]",
        help="adapters of rank R on linear modules of these names (8:q_proj,up), or on all but the output; the rest is frozen",
    )  # fmt: skip
    step.add_argument("--quantise", choices=("4bit", "8bit"), help="bits of the frozen linear weights, with --lora")
    optimizers = "; ".join(f"{name}: {about}" for name, about in OPTIMIZERS.items()) + " (default adamw)"
    step.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help=optimizers)


def run(args: argparse.Namespace, console: Console, environment: Environment) -> int:
    """Check the arguments and run the command, as `plan_command.run` does."""
    check(args)
    with _collected_rarely():
        from chameleon_mm.tools import plan_command

        return plan_command.run(args, console, environment)


@contextmanager
def _collected_rarely() -> Iterator[None]:
    """Context in which Python's garbage collector runs after 100,000 new objects instead of 700. Imports and the recorded step
    make many lasting objects, and the collector took a tenth of a prediction's time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def check(args: argparse.Namespace) -> None:
    """Check `args`, and replace each size by its number of bytes. Raises `ValueError`, and `OSError` for --gpu."""
    check_outputs({"--json": args.json})
    _check_swapped(args)
    for name in ("batch", "seq", "local_ranks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value}")
    spec, given = spec_of(args), args.hbm_budget
    args.hbm_budget = None if given in (None, AUTO) else parse_budget(given, lambda: spec.hbm_bytes, what="--hbm-budget")
    if args.hbm_budget == 0:
        raise ValueError("--hbm-budget: expected more than 0 bytes, got 0; say how much device memory the step may take")
    for name in ("host_memory", "min_bytes"):
        text = getattr(args, name)
        setattr(args, name, None if text is None else parse_size(text, what=f"--{name.replace('_', '-')}"))
    args.host_budget = _host_budget(args)
    if args.fsdp is not None:
        ranks, colon, dtype = args.fsdp.partition(":")
        if not ranks.isdecimal() or int(ranks) < 2 or (colon and dtype not in DTYPES):
            expected = f"2 or more ranks, or those and one of {', '.join(DTYPES)} (8:float32)"
            raise ValueError(f"--fsdp: expected {expected}, got {args.fsdp!r}")


def _host_budget(args: argparse.Namespace) -> int | None:
    """Bytes of pinned memory that one of --local-ranks may take, all alike; None: any. Raises `ValueError`."""

    def memory_bytes() -> int:
        if args.host_memory is not None:
            return int(args.host_memory)
        from chameleon_mm.pool.host_memory import available_host_bytes  # loads torch

        return available_host_bytes()

    given = args.host_budget
    if given is None and args.host_memory is None:
        return None
    by_default = given in (None, AUTO)  # half, as a session's
    return int(parse_budget("50%" if by_default else given, memory_bytes, what="--host-budget") // args.local_ranks)


def spec_of(args: argparse.Namespace) -> GpuSpec:
    """Return the datasheet of --gpu. Raises `ValueError` and `OSError`."""
    return spec_from_file(Path(args.gpu)) if args.gpu.endswith(".json") else spec_by_name(args.gpu)


def _check_swapped(args: argparse.Namespace) -> None:
    """Raise `ValueError` for options about swapping that contradict each other."""
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
        number = args.checkpointing
        if number not in ("fit", "selective") and not (number.isdecimal() and int(number)):
            raise ValueError(f"--checkpointing: expected fit, selective, or a number of 1 or more, got {number!r}")
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
