"""Benchmarks, one module per theme.

    THEMES[name] -> module path; module.add_arguments(parser); module.run(args, console) -> exit code

The map holds paths, not modules: the command line lists the themes without importing torch.
"""

from __future__ import annotations

THEMES: dict[str, str] = {
    "copy": "chameleon_mm.bench.copy",
    "hooks": "chameleon_mm.bench.hooks",
    "lengths": "chameleon_mm.bench.lengths",
    "overlap": "chameleon_mm.bench.overlap",
    "pack": "chameleon_mm.bench.pack",
    "pinned": "chameleon_mm.bench.pinned",
    "profiler": "chameleon_mm.bench.profiler",
    "timeline": "chameleon_mm.bench.timeline",
    "training": "chameleon_mm.bench.training",
}
"""Theme -> module with `add_arguments(parser)` and `run(args, console) -> int` (0 done, 1 failed; `ValueError`: bad usage)."""
