"""Rules about the sources that no linter knows.

    CUDA is asked in device/ alone   |   `kernels` and `bench` are ours only below `chameleon_mm`   |   every ignore says why
    files, functions and constructors of the package stay small   |   no two files have one name, enums' values are names

Which module imports which is import-linter's business, in `make check`.
"""

from __future__ import annotations

import ast
import enum
import importlib
import io
import os
import re
import tokenize
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_TOP_LEVEL_FOLDERS = {"bench", "kernels"}

# A bench measures CUDA itself, below every layer of ours: a measurement through them would be another one.
_MAY_USE_TORCH_CUDA = re.compile(r"chameleon_mm/(device/cuda/\w+|bench/_reclaim_gap)\.py")
_MAY_ASK_FOR_CUDA = re.compile(r"chameleon_mm/(device/(cuda/)?\w+|bench/_reclaim_gap)\.py")


def _sources(folder: str) -> dict[str, str]:
    """Path from the root -> text, for every module below `folder`, through the links."""
    return {
        (Path(where) / name).relative_to(_ROOT).as_posix(): (Path(where) / name).read_text(encoding="utf-8")
        for where, _, names in os.walk(_ROOT / folder, followlinks=True)
        for name in names
        if name.endswith(".py")
    }


_PACKAGE = _sources("chameleon_mm")
_TESTS = _sources("tests")


def _torch_cuda_uses(source: str) -> list[int]:
    """Lines that name `torch.cuda`, or torch's private way there."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                lines.append(node.lineno)
            case ast.Attribute(attr=attr) if attr.startswith("_cuda_"):  # torch._C._cuda_memoryStats and its like
                lines.append(node.lineno)
            case ast.Import(names=names) if any(f"{alias.name}.".startswith("torch.cuda.") for alias in names):
                lines.append(node.lineno)
            case ast.ImportFrom(module=str(module), names=names) if any(
                f"{module}.{alias.name}.".startswith("torch.cuda.") for alias in names
            ):
                lines.append(node.lineno)
    return lines


MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 60, 8

_HAS_MANY_PARAMETERS = {"SwapSession"}
"""Classes whose constructor parameters are the user's settings, by name."""


def _too_long(source: str) -> list[str]:
    """Return the functions and parameter lists that exceed their limits."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            found += [f"{node.name}: {length} lines"] if length > MOST_LINES_OF_A_FUNCTION else []
        if isinstance(node, ast.ClassDef) and node.name not in _HAS_MANY_PARAMETERS:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    number = len(method.args.args) + len(method.args.kwonlyargs) - 1
                    found += [f"{node.name}: {number} parameters"] if number > MOST_PARAMETERS else []
    return found


def _cuda_questions(source: str) -> list[int]:
    """Lines that ask whether something is on CUDA."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr="is_cuda") | ast.Compare(comparators=[ast.Constant(value="cuda")]):
                lines.append(node.lineno)
            case ast.Compare(left=ast.Constant(value="cuda")):
                lines.append(node.lineno)
    return lines


def _top_level_imports(source: str) -> list[int]:
    """Lines that import `bench` or `kernels` as if they were top-level packages."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if any(alias.name.split(".")[0] in _TOP_LEVEL_FOLDERS for alias in names):
                lines.append(node.lineno)
            case ast.ImportFrom(level=0, module=str(module)) if module.split(".")[0] in _TOP_LEVEL_FOLDERS:
                lines.append(node.lineno)
    return lines


_IGNORE = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma|mypy:|ruff:)", re.IGNORECASE)
_IGNORE_WITH_REASON = re.compile(
    r"#\s*(?:noqa:\s*[A-Z]+\d+(?:\s*,\s*[A-Z]+\d+)*|type:\s*ignore\[[\w, -]+\])"  # the rule that is ignored
    r"(?:\s*#\s*(?:noqa:\s*[A-Z]+\d+|type:\s*ignore\[[\w, -]+\]))*"  # perhaps another tool's
    r"[\s#:(\u2013-]+\w+\W+\w+"  # and at least two words of why
)


def _ignores_without_reason(source: str) -> list[int]:
    """Lines that silence a tool without saying which rule, and why, in the same comment."""
    comments = (token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT)
    return [token.start[0] for token in comments if _IGNORE.match(token.string) and not _IGNORE_WITH_REASON.match(token.string)]


def _breaches(
    rule: Callable[[str], Sequence[object]], sources: dict[str, str], *, but: re.Pattern[str] | None = None
) -> list[str]:
    """Return the findings of `rule`, as `path: finding`, in every file except those that `but` matches."""
    checked = sorted(path for path in sources if but is None or not but.fullmatch(path))
    return [f"{path}: {found}" for path in checked for found in rule(sources[path])]


@pytest.mark.ci
def test_the_sources_keep_the_rules() -> None:
    folders = {Path(name).parts[1] for name in _PACKAGE}  # found through the links
    assert folders >= {"__init__.py", "device", *_TOP_LEVEL_FOLDERS}
    assert "tests/test_layers.py" in _TESTS
    assert _breaches(_torch_cuda_uses, _PACKAGE, but=_MAY_USE_TORCH_CUDA) == []
    assert _breaches(_cuda_questions, _PACKAGE, but=_MAY_ASK_FOR_CUDA) == []
    assert _breaches(_top_level_imports, _PACKAGE | _TESTS) == []
    assert _breaches(_ignores_without_reason, _PACKAGE | _TESTS) == []
    assert _breaches(_too_long, _PACKAGE) == []
    names = sorted(path.rpartition("/")[2] for path in _PACKAGE if not path.endswith("__init__.py"))
    assert [name for name, other in pairwise(names) if name == other] == [], "no two files have one name"


def test_the_value_of_an_enums_member_is_its_name() -> None:
    modules = [importlib.import_module(path[:-3].replace("/", ".")) for path, text in _PACKAGE.items() if "(enum.Enum)" in text]
    found: list[object] = [each for module in modules for each in vars(module).values()]
    enums = [each for each in found if isinstance(each, type) and issubclass(each, enum.Enum) and not issubclass(each, int)]
    members = [member for each in enums if each.__module__.startswith("chameleon_mm") for member in each]
    assert members
    assert [member for member in members if member.value != member.name.lower()] == []
