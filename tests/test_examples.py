"""The scripts of `examples/`: each runs as it stands, prints what its page says, and is the script on its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LONGEST = 40
"""Lines of an example."""


def page_of(example: Path) -> str:
    return (ROOT / "docs/examples" / f"{example.stem}.md").read_text(encoding="utf-8")


def block(page: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_each_has_its_page_and_each_page_its_example() -> None:
    pages = sorted((ROOT / "docs/examples").glob("*.md"))
    assert [page.stem for page in pages] == [example.stem for example in EXAMPLES]
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_its_page_shows_it_as_it_is(example: Path) -> None:
    text = example.read_text(encoding="utf-8")
    assert block(page_of(example), "python") == text
    assert 10 <= len(text.splitlines()) <= LONGEST


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_prints_what_its_page_says(example: Path, tmp_path: Path) -> None:
    under_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if example.stem == "ddp" else []
    # Unbuffered, two ranks' lines and line ends may mix.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, *under_torchrun, "-m", "tests.observed", str(example)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    missing = [line for line in block(page_of(example), "text").splitlines() if line != "..." and line not in said]
    assert not missing, f"expected {missing} in:\n{ended.stdout}"
    for name in re.findall(r"writes `(\w+\.html)`", page_of(example)):
        assert (tmp_path / name).stat().st_size > 0
