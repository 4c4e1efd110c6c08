"""Examples in README, docs and examples: Python that runs as it stands, complete output, links that lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
EXAMPLE_PAGES = sorted((ROOT / "docs/examples").glob("*.md"))
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {*EXAMPLE_PAGES}))
MOST_LINES = 120
"""Limit of the README: longer text belongs into docs/."""


class Snippet(NamedTuple):
    """Python code of one page that imports the library. Code without the import is an excerpt."""

    page: str
    text: str

    @property
    def first_call(self) -> str:
        """First call of the snippet, which tells it from the others of its page."""
        found = re.search(r"cm\.(attach|install|SwapSession|save_on_cpu|PinnedPool|SimDevice)", self.text)
        assert found is not None
        return found[1]


SNIPPETS = [
    Snippet(page.name, text)
    for page in PAGES
    if page.stem != "tutorial"
    for text in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if "import chameleon_mm" in text
]


@pytest.mark.ci
@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: f"{snippet.page}-{snippet.first_call}")
def test_a_snippet_runs_as_it_stands(
    snippet: Snippet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # for its output
    module = ModuleType("__main__")  # where dynamo finds the names of what it compiled
    monkeypatch.setitem(sys.modules, "__main__", module)
    namespace: dict[str, Any] = vars(module)
    exec(compile(snippet.text, snippet.page, "exec"), namespace)
    if "handle" in namespace:  # a handle attached until the program's end would stay attached in all tests
        namespace["handle"].detach()
    said = capsys.readouterr().out
    for call, printed in re.findall(r"print\((.*)\)  # (\d+)", snippet.text):
        assert printed in said.splitlines(), call
    assert bool(said) == ("print(" in snippet.text)


@pytest.mark.ci
def test_the_tutorial_runs_from_its_first_block_to_its_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    program = "\n".join(block for language, block in blocks if language == "python")
    exec(compile(program, "tutorial.md", "exec"), {"__name__": "__main__"})
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    quoted = [line for language, block in blocks if not language for line in block.splitlines() if line != "..."]
    lines = [" ".join(line.split()) for line in quoted]
    assert len(lines) == 3
    for line in lines:
        assert any(each.startswith(line.removesuffix(" ...")) for each in said), line


def test_every_way_into_the_library_is_among_them() -> None:
    calls = {page: [snippet.first_call for snippet in SNIPPETS if snippet.page == page] for page in ("README.md", "using.md")}
    assert calls == {
        "README.md": ["attach", "PinnedPool"],
        "using.md": [
            "SwapSession",
            "SimDevice",
            "SimDevice",
            "SimDevice",
            "SwapSession",
            "SimDevice",
            "save_on_cpu",
            "SimDevice",
        ],
    }
    assert ("pinned_pool.md", "PinnedPool") in [(snippet.page, snippet.first_call) for snippet in SNIPPETS]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLE_PAGES], ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = [
        target for target in targets if "://" not in target and not (page.parent / target.partition("#")[0]).resolve().exists()
    ]
    assert not missing


def test_every_test_that_a_page_names_exists_and_every_row_of_what_was_run_names_one() -> None:
    """A name is `test_file.py`, `test_file.py::test_name`, or `::test_name` of the file that was named last."""
    defined = {
        path.name: {*re.findall(r"^ *def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)}
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    missing, named, file = [], 0, ""
    for page in (*PAGES, *EXAMPLE_PAGES):
        for given, name in re.findall(
            r"`(?:tests/(?:\w+/)*)?(test_\w+\.py)?(?:::(test_\w+))?`", page.read_text(encoding="utf-8")
        ):
            file, named = given or file, named + bool(given or name)
            if (given or name) and (file not in defined or (name and name not in defined[file])):
                missing.append(f"{page.name}: {given}::{name}")
    assert missing == []
    assert named > 100
    ran = (ROOT / "docs/integrations.md").read_text(encoding="utf-8").partition("\n## What it was run with\n")[2]
    rows = [
        row for table in re.findall(r"^\|.* test \|\n\|[-|]+\n((?:\|.*\n)+)", ran, re.MULTILINE) for row in table.splitlines()
    ]
    assert len(rows) > 20
    assert [row for row in rows if not re.search(r"::test_\w+` \|$|\| the same \|$", row)] == []


def test_every_page_of_the_docs_is_on_the_site_and_in_one_place() -> None:
    pages = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(pages) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_what_the_readme_quotes_of_the_demo_is_in_the_demos_whole_output() -> None:
    readme, demo = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/report.md"))
    blocks = re.findall(r"^```\w*\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (quoted,) = (block for block in blocks if "bit-identical" in block)
    assert quoted in demo


# --- the scripts of `examples/`: each runs as it stands, prints what its page says, and is the script on its page


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


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_prints_what_its_page_says(example: Path, tmp_path: Path) -> None:
    under_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if example.stem == "ddp" else []
    # Unbuffered, two ranks' lines and line ends may mix; buffered, two lines may still be one.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, *under_torchrun, "-m", "tests.observed", str(example)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout if under_torchrun else ended.stdout.splitlines()
    missing = [line for line in block(page_of(example), "text").splitlines() if line != "..." and line not in said]
    assert not missing, f"expected {missing} in:\n{ended.stdout}"
    for name in re.findall(r"writes `(\w+\.html)`", page_of(example)):
        assert (tmp_path / name).stat().st_size > 0
