"""`make check`: point at docstrings, comments and sentences of the documentation that have to be read twice.

    python -m tests.prose [--show N] [PATH ...]        # default: every tracked .py and .md file

A sentence is listed if it
    opens        begins with a word that hides its subject (Of, What, Where, By, As, ...)
    goes round   names a thing by a clause instead of by its name ("what is to be", "is told", "nobody", "beside")
    is long      has more than 28 words (first sentences of docstrings and comments), or 35 (documentation)

A listed sentence may be fine, and an unlisted one may be bad. Exit status 1 if more than `MOST_OF_ALL` percent of all sentences
are listed, or more than `MOST_OF_AREA` percent of an area that has more than `AREA_SENTENCES`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MOST_OF_ALL, MOST_OF_AREA, AREA_SENTENCES = 3.0, 6.0, 100
IN_CODE, IN_DOCS = 28, 35
"""Most words of a sentence."""

OPENINGS = {
    "Of", "What", "Whatever", "Whose", "Whoever", "Who", "Where", "Wherever", "By", "As", "One", "That", "Those", "Which",
    "How", "None", "Nothing", "Nobody", "Beside", "Behind", "Besides", "Whether", "So",
}  # fmt: skip
ROUND = re.compile(
    r"\b(whoever|whatever|whichever|nobody|somebody|someone else's|is told|are told|was told|tells? of|told of|beside|behind"
    r"|what (is|are|was|were|has|had) (to|not|been|there|held|left|given)|that which|of it all|of them all|as ever|has it that"
    r"|the affair of|the one that was|by this|goes by|hangs? on what|what only|what nothing|but for|is no more|hold good)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z][\w'-]*")
_NOT_PROSE = ("#!", "# noqa", "# type", "# ruff", "# fmt")


class Sentence(NamedTuple):
    line: int
    text: str
    most_words: int


def _first(text: str) -> str:
    return re.split(r"(?<=[a-z\)`\"'0-9])[.:;](?=\s|$)", " ".join(text.split()), maxsplit=1)[0]


def in_python(source: str) -> Iterator[Sentence]:
    """First sentences of docstrings, of attributes too, and of blocks of comments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Sentence(statement.lineno, _first(value.value), IN_CODE)
    block: list[tuple[int, str]] = []
    for token in [*tokenize.generate_tokens(io.StringIO(source).readline), None]:
        if token is None or (block and token.type == tokenize.COMMENT and token.start[0] != block[-1][0] + 1):
            if block:
                yield Sentence(block[0][0], _first(" ".join(text for _, text in block)), IN_CODE)
            block = []
        if token is not None and token.type == tokenize.COMMENT and not token.string.startswith(_NOT_PROSE):
            block.append((token.start[0], token.string.lstrip("# ")))


def in_markdown(source: str) -> Iterator[Sentence]:
    """Sentences of paragraphs and of list items; no tables, headings or code."""
    fenced, paragraph, start = False, list[str](), 1
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if fenced or line.startswith(("|", "#", "<", "![")):
            continue
        if line.strip() and not re.match(r"\s*([*-]|\d+\.) ", line):
            start = start if paragraph else number
            paragraph.append(line.strip())
            continue
        for text in re.split(r"(?<=[a-z\)`0-9])[.:;](?=\s|$)", " ".join(paragraph)):
            if len(_WORD.findall(text)) > 3:
                yield Sentence(start, text.strip(), IN_DOCS)
        paragraph, start = ([re.sub(r"^\s*([*-]|\d+\.) ", "", line).strip()] if line.strip() else []), number


def faults(sentence: Sentence) -> list[str]:
    """Reasons why the sentence is listed."""
    words = _WORD.findall(sentence.text)
    if len(words) < 2:
        return []
    found = {
        "opens": words[0] in OPENINGS and sentence.text.startswith(words[0]),
        "goes round": ROUND.search(sentence.text) is not None,
        "is long": len(words) > sentence.most_words,
    }
    return [name for name, is_so in found.items() if is_so]


def _area(path: Path) -> str:
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] == "chameleon_mm" and len(parts) > 2 else ("*.md" if len(parts) == 1 else parts[0])


def _files(paths: Sequence[str]) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "*.py", "*.md"], capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listing.splitlines() if not Path(name).is_symlink() and Path(name).exists()]
    within = [Path(path) for path in paths]
    return [file for file in files if not within or any(path == file or path in file.parents for path in within)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each area's share, with examples. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="examples of an area that has too many (default 3)")
    given = parser.parse_args(arguments)
    total, listed, examples = Counter[str](), Counter[str](), defaultdict[str, list[str]](list)
    for file in _files(given.paths):
        for sentence in (in_python if file.suffix == ".py" else in_markdown)(file.read_text(encoding="utf-8")):
            total[_area(file)] += 1
            if found := faults(sentence):
                listed[_area(file)] += 1
                examples[_area(file)].append(f"    {file}:{sentence.line} ({', '.join(found)}): {sentence.text[:170]}")
    share = 100 * listed.total() / max(1, total.total())
    too_many = [name for name, count in total.items() if count > AREA_SENTENCES and 100 * listed[name] > MOST_OF_AREA * count]
    for name in sorted(total if given.paths or share > MOST_OF_ALL else too_many):
        share_of_area = 100 * listed[name] / total[name]
        lines = [f"{share_of_area:5.1f} %  {listed[name]:5} of {total[name]:5}  {name}", *examples[name][: given.show]]
        sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.write(f"prose: {share:.1f} % of {total.total()} sentences listed, at most {MOST_OF_ALL} %\n")
    return int(share > MOST_OF_ALL or bool(too_many))


if __name__ == "__main__":
    sys.exit(main())
