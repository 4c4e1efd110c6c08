"""README's Python runs as it stands, each snippet by itself, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def first_call(snippet: str) -> str:
    """What tells one snippet from the others."""
    found = re.search(r"cm\.(SwapSession|save_on_cpu|PinnedPool|SimDevice)", snippet)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=first_call)
def test_a_snippet_runs_as_it_stands(snippet: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet, str(README), "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    for call, printed in re.findall(r"print\((.*)\)  # (\d+)", snippet):
        assert printed in said.splitlines(), call
    assert bool(said) == ("print(" in snippet)


def test_every_way_into_the_library_is_among_them() -> None:
    assert [first_call(snippet) for snippet in SNIPPETS] == ["SwapSession", "save_on_cpu", "PinnedPool", "SimDevice"]


def test_hooks_of_the_second_one_move_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints nothing that could be looked at."""
    import chameleon_mm as cm

    made: list[cm.save_on_cpu] = []

    class Noted(cm.save_on_cpu):
        def __enter__(self) -> None:
            made.append(self)
            super().__enter__()

    monkeypatch.setattr(cm, "save_on_cpu", Noted)
    exec(compile(SNIPPETS[1], str(README), "exec"), {"__name__": "__main__"})
    assert [manager.pool.stats().peak_live_bytes > 0 for manager in made] == [True]
