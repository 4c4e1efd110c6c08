"""`make gallery`: six small trainings under `chameleon-mm run` on a simulated H100, and the page of the site that shows them.

docs/gallery/NAME.html, NAME.json    <- `chameleon-mm run --html --trace`, for each name of `SHOWN`
docs/gallery/NAME.png                <- the page's first part, by a headless Chromium
docs/gallery.md                      <- a part for each: the command, its first line, the picture, links
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "gallery"

SHOWN = {
    "llm": ("A language model", "160MiB", "Llama of 8 layers: 4 x 256 tokens."),
    "lora": ("LoRA", "95MiB", "The same model with adapters of rank 8 by peft: all but these is frozen."),
    "dit": ("A diffusion transformer", "240MiB", "DiT of 8 layers, by diffusers: 4 latents of 32 x 32."),
    "vit": ("A vision transformer", "200MiB", "ViT of 8 layers: 8 images in 256 patches each."),
    "resnet": ("A convolutional network", "36MiB", "ResNet of 8 blocks: 32 images of 64 x 64."),
    "moe": ("A mixture of experts", "220MiB", "Mixtral of 8 layers with 4 experts. Each step routes its tokens anew."),
}
"""Name of each training -> its title, its budget, and what it is."""

_HEAD = """# Gallery

Six small trainings in plain PyTorch and Hugging Face's libraries, unchanged, under `chameleon-mm run`. All are **simulated**: a
CPU computes, and an H100's clock is counted. Each picture is the first part of the page that `--html` wrote. A trace opens in
[Perfetto](https://ui.perfetto.dev). `make gallery` writes all of it anew.
The models are so small that the host launches later than an H100 computes: a step's measured time is mostly the host's.
[trainings.py](gallery/trainings.py) has the trainings.
"""


def command(name: str) -> list[str]:
    """Arguments after `chameleon-mm` that write the page and the trace of `name`."""
    budget = SHOWN[name][1]
    files = [f"--html=docs/gallery/{name}.html", f"--trace=docs/gallery/{name}.json"]
    return [
        "run",
        "--device=sim:h100",
        f"--hbm-budget={budget}",
        "--min-bytes=64KiB",
        *files,
        "docs/gallery/trainings.py",
        name,
    ]


def first_line(name: str, *arguments: str) -> str:
    """Run the training and return what its report says in short. Raises `RuntimeError` if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "chameleon_mm", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.search(r"in short +(.*)", done.stderr)
    if done.returncode or found is None:
        raise RuntimeError(f"gallery: {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return found[1].strip()


def picture(name: str, chromium: str) -> None:
    """Draw the first part of a page."""
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,640", f"--user-data-dir={profile}"]
        at = (FOLDER / f"{name}.html").as_uri()
        subprocess.run([chromium, *options, f"--screenshot={FOLDER / name}.png", at], check=True, capture_output=True)


def main() -> int:
    """Write the gallery. Returns the exit status."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.stderr.write("gallery: expected Chromium, which draws the pictures, found none; install your system's package\n")
        return 1
    parts = [_HEAD]
    for name, (title, _, about) in SHOWN.items():
        line = first_line(name, *command(name))
        sys.stdout.write(f"{name}: {line}\n")
        picture(name, chromium)
        written = FOLDER / f"{name}.json"
        written.with_suffix(".json.gz").write_bytes(gzip.compress(written.read_bytes(), mtime=0))
        written.unlink()
        shown = " \\\n    ".join(("chameleon-mm run " + " ".join(command(name)[1:4]), " ".join(command(name)[4:])))
        drawn = f"![{title}: memory and engines of a step](gallery/{name}.png)"
        files = f"{drawn}\n\n[Page](gallery/{name}.html), [trace](gallery/{name}.json.gz)"
        parts.append(f"## {title}\n\n{about}\n\n```bash\n{shown}\n```\n\n`{line}`\n\n{files}\n")
    (ROOT / "docs" / "gallery.md").write_text("\n".join(parts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
