"""Options of each theme: what is judged of a command line before torch is loaded.

OPTIONS[theme](parser)     # adds the options; chameleon_mm.bench.THEME: run(args, console)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

TINY: dict[str, Any] = {"layers": 10, "width": 128, "heads": 4, "ffn": 448, "seq": 256, "batch": 8, "dtype": "float32"}
"""Llama: small enough for a CPU, yet every activation is large enough to move (1 MiB or more). An eighth of its blocks needs
more memory than the part that must be present at once."""
FILL: dict[str, Any] = {"width": 4096, "heads": 32, "ffn": 14336, "seq": 4096, "batch": 4, "dtype": "bfloat16"}
"""Llama: blocks as in Llama 3 8B, without grouped heads; `fill_layers` gives their number."""


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every theme has: its device, and the file of its table."""
    devices = '"cuda", "cuda:1", "sim" or "sim:a100"; default: CUDA where there is one, else "sim"'
    parser.add_argument("--device", metavar="DEVICE", help=devices)
    parser.add_argument("--json", metavar="FILE", help="write the figures with their environment to FILE")


def _add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of model and sizes on `parser`."""
    models = ("llama", "gpt2", "vit", "resnet", "video-dit")
    parser.add_argument("--model", choices=models, default="llama", help="what is trained (default llama)")
    for name, what in (
        ("layers", "blocks; of a resnet: of each stage"), ("width", "residual stream; of a resnet: inside the first blocks"),
        ("heads", "attention heads"), ("ffn", "width inside SwiGLU, of the llama alone"),
        ("seq", "tokens per row; of images: pixels of a side; of videos: latents of a side"),
        ("batch", "rows, images or videos per step"),
    ):  # fmt: skip
        about = f"{what} (llama: tiny {TINY[name]}, fill {FILL.get(name, 'fitted')})"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=about)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=f"tiny: {TINY['dtype']}, fill: {FILL['dtype']}")


def copy(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    sizes = "sizes of one copy, such as 1MiB,64MiB; default: 64KiB to 1GiB on a GPU, to 16MiB where a CPU does its work"
    parser.add_argument("--sizes", metavar="SIZE,...", help=sizes)
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="samples of each figure (default: %(default)s)")


def hooks(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.add_argument("--saves", type=int, default=100, metavar="N", help="tensors saved in a step (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="samples of each figure (default: %(default)s)")


def lengths(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.set_defaults(device="sim")
    kinds = ("uniform", "log-normal")
    parser.add_argument("--distribution", choices=kinds, default="log-normal", help="of the lengths (default: %(default)s)")
    steps = "steps, each of another length (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=200, metavar="N", help=steps)
    parser.add_argument("--svg", metavar="FILE", help="write the run in the session as a picture to FILE (needs matplotlib)")


def overlap(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="samples of each figure (default: %(default)s)")


def pack(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    sizes = "4KiB,16KiB,64KiB,256KiB,1MiB"
    parser.add_argument("--sizes", metavar="SIZE,...", default=sizes, help="multiples of 512 bytes (default: %(default)s)")
    parser.add_argument("--svg", metavar="FILE", help="write the rates of many tensors as a picture to FILE")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="samples of each figure (default: %(default)s)")


def pinned(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="samples of each time (default: %(default)s)")


def profiler(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.add_argument("--saves", type=int, default=1000, metavar="N", help="of the chain (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=51, metavar="N", help="samples of each (default: %(default)s)")


def timeline(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    parser.set_defaults(device="sim")
    parser.add_argument("--svg", metavar="FILE", help="write the planned step as a picture to FILE")


def training(parser: argparse.ArgumentParser) -> None:
    add_output_arguments(parser)
    _add_size_arguments(parser)
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="timed steps per peer, after its warm-up (default 4)")
    compiled = "each block is compiled; on a simulator: llama-7b instead, predicted from shapes; --batch, --seq, --layers"
    parser.add_argument("--compile", action="store_true", help=compiled)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (default 0)")


OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "copy": copy, "hooks": hooks, "lengths": lengths, "overlap": overlap, "pack": pack, "pinned": pinned, "profiler": profiler,
    "timeline": timeline, "training": training,
}  # fmt: skip
