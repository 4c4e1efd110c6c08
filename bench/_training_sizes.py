"""Sizes of the training benchmark's models: tiny ones, ones that fill a GPU, and options that change single sizes.

    workload = choose_workload(args, device)          # raises ValueError for sizes that cannot be built, and unused options
    shape = choose_shape(args, device)                # only the Llama's

On a simulator the CPU does the work: sizes are tiny there, large enough that most activations are worth moving.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from chameleon_mm.bench._llama import Shape
from chameleon_mm.bench._options import FILL, TINY
from chameleon_mm.bench._stand_in import computes_on_cpu
from chameleon_mm.bench._training_models import Sizes, Workload, gpt2, llama, resnet, video_dit, vit
from chameleon_mm.device.protocols import Device
from chameleon_mm.pool.host_memory import available_host_bytes

Sized = Mapping[str, Mapping[str, Any]]

OTHERS: Mapping[str, tuple[Callable[[Sizes], Workload], Sized]] = {
    "gpt2": (
        gpt2,
        {
            "tiny": {"layers": 8, "width": 128, "heads": 4, "seq": 256, "batch": 8, "dtype": "float32"},
            "fill": {"layers": 36, "width": 1280, "heads": 20, "seq": 1024, "batch": 8, "dtype": "bfloat16"},
        },
    ),
    "vit": (
        vit,
        {
            "tiny": {"layers": 6, "width": 128, "heads": 4, "seq": 64, "batch": 8, "dtype": "float32"},
            "fill": {"layers": 24, "width": 1024, "heads": 16, "seq": 224, "batch": 64, "dtype": "bfloat16"},
        },
    ),
    "resnet": (
        resnet,
        {
            "tiny": {"layers": 2, "width": 32, "seq": 32, "batch": 16, "dtype": "float32"},
            "fill": {"layers": 4, "width": 64, "seq": 112, "batch": 64, "dtype": "bfloat16"},
        },
    ),
    "video-dit": (
        video_dit,
        {
            "tiny": {"layers": 4, "width": 128, "heads": 4, "seq": 16, "batch": 2, "dtype": "float32"},
            "fill": {"layers": 12, "width": 384, "heads": 6, "seq": 32, "batch": 16, "dtype": "bfloat16"},
        },
    ),
}
"""Builders of each family except the Llama, and their sizes: `fill` as in GPT-2 large, ViT-L/14, a ResNet of 38 layers,
and a small video model over 4 x 17 x 32 x 32 latents."""


def choose_workload(args: argparse.Namespace, device: Device) -> Workload:
    """Model of the sizes in `args`, with defaults for the kind of device. Raises `ValueError` if they cannot be built."""
    if args.model == "llama":
        return llama(choose_shape(args, device))
    make, sized = OTHERS[args.model]
    sizes = dict(sized[_size(device)])
    for name, given in _given(args).items():
        if name not in sizes:
            raise ValueError(
                f"--{name}: expected none with --model {args.model}, got {given}; its sizes are {', '.join(sizes)}"
            )
        sizes[name] = given
    return make(Sizes(**sizes))


def choose_shape(args: argparse.Namespace, device: Device) -> Shape:
    """Sizes of the Llama. Raises `ValueError` for sizes that cannot be built."""
    sizes = dict(TINY if _size(device) == "tiny" else FILL) | _given(args)
    if "layers" not in sizes:
        sizes["layers"] = fill_layers(Shape(layers=1, **sizes), device.capacity, available_host_bytes())
    return Shape(**sizes)


def fill_layers(block: Shape, capacity: int, host_bytes: int) -> int:
    """Number of such blocks that fill a device without failing any peer, at least 2.

    Device: layers * (state + saved) <= capacity / 2; the rest is for the peaks of backward and the optimizer.
    Host: layers * saved <= host_bytes / 4. Reason: torch's save_on_cpu rounds every block up to a power of two, copies some
    storages twice, and never frees the memory that it pinned; it runs after ours has freed as much.
    """
    by_device = capacity // 2 // (block.layer_state_bytes + block.layer_saved_bytes)
    by_host = host_bytes // 4 // block.layer_saved_bytes
    return max(2, min(by_device, by_host))


def _size(device: Device) -> str:
    """`tiny` takes seconds on a CPU; `fill` is as published, or as many layers as the memory of device and host allow."""
    return "tiny" if computes_on_cpu(device) else "fill"


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes that the user gave as options."""
    return {name: given for name in TINY if (given := getattr(args, name)) is not None}
