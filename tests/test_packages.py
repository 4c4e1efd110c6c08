"""Ten packages: one table in pyproject, which the layers, the packages and the documents repeat."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_TOOL = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
_PACKAGES: dict[str, str] = _TOOL["chameleon-mm"]["packages"]
_BESIDE = {"__main__", "bench", "errors", "files", "integrations", "kernels", "replayable", "units"}


def test_there_are_ten_in_the_order_of_the_layers() -> None:
    (layers,) = [each["layers"] for each in _TOOL["importlinter"]["contracts"] if each["id"] == "layers"]
    rows = [name for row in layers for name in row.split(" | ")]
    assert len(_PACKAGES) == 10
    assert [name for name in rows if name not in _BESIDE] == list(_PACKAGES)


def test_there_are_no_others() -> None:
    folders = {path.parent.name for path in (_ROOT / "chameleon_mm").glob("*/__init__.py")}
    assert folders == {*_PACKAGES, "bench", "integrations", "kernels"}


@pytest.mark.parametrize("name", _PACKAGES)
def test_a_package_says_what_the_table_says(name: str) -> None:
    text = (_ROOT / "chameleon_mm" / name / "__init__.py").read_text(encoding="utf-8")
    assert (ast.get_docstring(ast.parse(text)) or "").split("\n")[0] == _PACKAGES[name]


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_a_document_has_the_table(document: str) -> None:
    rows = "".join(f"| `{name}` | {sentence} |\n" for name, sentence in _PACKAGES.items())
    assert f"| package | is |\n|---|---|\n{rows}\n" in (_ROOT / document).read_text(encoding="utf-8")


def test_the_makefile_names_tests_that_there_are() -> None:
    lists = re.findall(r"addprefix tests/test_,([^)]*)\)", (_ROOT / "Makefile").read_text(encoding="utf-8"))
    names = [name for each in lists for name in each.replace("\\", " ").split()]
    assert len(names) > 10
    assert [name for name in names if not (_ROOT / "tests" / f"test_{name}").exists()] == []
