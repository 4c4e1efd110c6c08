"""Benchmarks, one module per theme.

    THEMES[name] -> what it measures; _options.OPTIONS[name](parser); chameleon_mm.bench.NAME: run(args, console) -> exit code

The map holds texts, not modules: the command line lists the themes without importing torch.
"""

from __future__ import annotations

THEMES: dict[str, str] = {
    "copy": "H2D and D2H rates by size, pinned against pageable, and both ways at once",
    "hooks": "what a saved tensor costs the host, save and use, over hooks that do nothing: where it stays, where it moves",
    "lengths": "training whose batch length changes with every step, simulated: recorded, followed, over the budget; --svg",
    "overlap": "compute beside copies and packing: what it loses, what is hidden, how long an urgent copy waits",
    "pack": "many tensors to pinned memory by every way there is, and what packing costs the host",
    "pinned": "the host allocator alone: time of a block, bytes lost on recorded steps; beside torch's pinned cache",
    "profiler": "what watching a step costs the host, by every way there is, from hooks that do nothing to torch.profiler",
    "timeline": "one step by a plan on a simulated GPU: kernels, copies and memory over time, as a picture",
    "training": "step time and peak memory of one model: no swapping, checkpointing, torch's save_on_cpu, chameleon_mm",
}
"""Themes. Its options are in `_options`; the module of each has `run(args, console) -> int`: 0 done, 1 failed."""
