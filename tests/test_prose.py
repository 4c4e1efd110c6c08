"""Check of the prose: what it lists, what it leaves, and when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import prose


def listed(sentences: list[prose.Sentence]) -> list[tuple[int, list[str]]]:
    return [(one.line, found) for one in sentences if (found := prose.faults(one))]


def test_docstrings_and_blocks_of_comments_are_read_by_their_first_sentence() -> None:
    long = " ".join(["word"] * 29)
    source = (
        f'"""Plain. What comes later is not read."""\n\nX = 1\n"""{long}"""\n\n# Nobody comes.\n# here\nY = 2  # noqa: By\n'
    )
    assert listed(list(prose.in_python(source))) == [(4, ["is long"]), (6, ["opens", "goes round"])]


def test_every_sentence_of_a_page_is_read_and_no_code_and_no_table() -> None:
    source = "# What\n\nA page says this. Whoever reads it knows.\nIt goes on.\n\n"
    source += "```\nBy nobody at all\n```\n\n| Of | it |\n\n* So it is said\n"
    assert listed(list(prose.in_markdown(source))) == [(3, ["opens", "goes round"]), (12, ["opens"])]


@pytest.mark.parametrize(
    ("bad", "good", "elsewhere", "listed"),
    [
        (0, 101, 0, []),
        (3, 101, 0, []),
        pytest.param(4, 101, 0, ["docs", "tests"], id="more than 3 % of all"),
        pytest.param(7, 101, 300, ["docs"], id="more than 6 % of an area"),
        pytest.param(7, 90, 300, [], id="an area with few sentences"),
    ],
)
def test_it_fails_and_shows_examples_if_too_many_are_listed(
    bad: int, good: int, elsewhere: int, listed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain = "The loop runs the rows in order."
    for name, sentences in (
        ("docs", ["Nobody is told of it at all."] * bad + [plain] * good),
        ("tests", [plain] * (1 + elsewhere)),
    ):
        (tmp_path / name).write_text("\n\n".join(sentences), encoding="utf-8")
    monkeypatch.setattr(prose, "_files", lambda paths: [tmp_path / "docs", tmp_path / "tests"])
    monkeypatch.setattr(prose, "_area", lambda path: path.name)
    assert prose.main([]) == bool(listed)
    printed = capsys.readouterr().out
    assert [line.split()[-1] for line in printed.splitlines()[:-1] if not line.startswith("    ")] == listed
    assert printed.count("Nobody is told") == (3 if listed else 0)
