"""Traces as files: what is read back is what was written, what does not fit is told by line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chameleon_mm.trace import StepPhase, TensorKind, Trace, TraceBuilder, load_trace, save_trace
from chameleon_mm.trace.files import SCHEMA
from tests._traces import chain, random_step


def assert_equal(a: Trace, b: Trace) -> None:
    for column in fields(a):
        if not column.init:
            continue
        x, y = getattr(a, column.name), getattr(b, column.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, column.name
            assert x.tobytes() == y.tobytes(), column.name
        else:
            assert x == y, column.name


@given(random=st.randoms(use_true_random=False), name=st.sampled_from(["a.jsonl", "a.jsonl.gz"]))
def test_a_random_step_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, random: Random, name: str) -> None:
    path = tmp_path_factory.mktemp("trace") / name
    trace = random_step(random)
    save_trace(trace, path)
    assert_equal(load_trace(path), trace)


def test_equal_traces_make_equal_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        one, two = tmp_path / "one" / name, tmp_path / "two" / f"other {name}"
        for path in (one, two):
            path.parent.mkdir(exist_ok=True)
            save_trace(chain(), path)
        assert one.read_bytes() == two.read_bytes()
    assert gzip.decompress((tmp_path / "one" / "a.jsonl.gz").read_bytes()) == (tmp_path / "one" / "a.jsonl").read_bytes()


def test_times_and_features_of_another_run_change_no_line_of_what_happened(tmp_path: Path) -> None:
    trace = chain(layers=2)
    other = replace(trace, op_us=trace.op_us * 1.1, hook_feature=trace.hook_feature + np.uint64(1), fingerprint=1)
    save_trace(trace, tmp_path / "a")
    save_trace(other, tmp_path / "b")
    lines = zip((tmp_path / "a").read_text().splitlines(), (tmp_path / "b").read_text().splitlines(), strict=True)
    differ = [json.loads(a)[0] for a, b in lines if a != b]
    assert differ == ["us", "features"]


def test_the_file_of_a_small_step(tmp_path: Path) -> None:
    b = TraceBuilder(device="simulated h200", simulated=True, start_bytes=512)
    w = b.tensor(100, TensorKind.PARAMETER, born=-1)
    x = b.tensor(1000, TensorKind.ACTIVATION)
    b.op("aten::mm", 0xAB, StepPhase.FORWARD, 0.1, reads=(w,), writes=(x,), inner_bytes=1536)
    b.save(x, 1)
    b.sendable(x, b.save(-1, 2))
    b.released(x)
    b.released_after(b.use(x, 3))
    b.use(x, 3)
    b.dies(x)
    save_trace(b.finish(-5), tmp_path / "t.jsonl")
    header, *lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert header == (
        '{"schema":"chameleon_mm.trace/3","device":"simulated h200","simulated":true,"start_bytes":512,"ops":1,"tensors":2,'
        '"hooks":4,"op_names":["aten::mm"]}'
    )
    assert lines == [
        '["tensor","parameter",100,null,null,null,null]',
        '["tensor","activation",1000,0,2,1,4]',
        '["op","aten::mm","00000000000000ab","forward",[2],[1],1536]',
        '["save",1]',
        '["save",null]',
        '["use",1,0]',
        '["use",1,null]',
        '["us",0,[0.1]]',
        '["features",-5,["0000000000000001","0000000000000002","0000000000000003","0000000000000003"]]',
    ]


def lines_of(trace: Trace, tmp_path: Path) -> list[str]:
    save_trace(trace, tmp_path / "whole")
    return (tmp_path / "whole").read_text().splitlines()


def load_lines(lines: list[str], tmp_path: Path) -> Trace:
    (tmp_path / "t").write_text("".join(f"{line}\n" for line in lines))
    return load_trace(tmp_path / "t")


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    save_trace(chain(layers=1), tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    # From every 7th byte on; the last newline alone is no loss.
    for size in [*range(0, len(whole) - 1, 7), len(whole) - 2]:
        (tmp_path / "t").write_bytes(whole[:size])
        line = whole[: size + 1].count(b"\n") + 1  # a line without its newline alone is whole: the next one is missing
        with pytest.raises(ValueError, match=rf"line {line}: expected .*, got "):
            load_trace(tmp_path / "t")


def test_a_compressed_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_trace(chain(layers=1), tmp_path / "t.gz")
    whole = (tmp_path / "t.gz").read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "t.gz").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"line \d+: expected .*, got .*cut short"):
            load_trace(tmp_path / "t.gz")
    (tmp_path / "t.gz").write_bytes(b"[1]\n")
    with pytest.raises(ValueError, match="line 1: expected UTF-8 text, whole where it is compressed"):
        load_trace(tmp_path / "t.gz")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ValueError, match="line 1: expected UTF-8 text"):
        load_trace(tmp_path / "t")


def edited(line: int, change: Callable[[Any], Any]) -> Callable[[list[str]], list[str]]:
    def edit(lines: list[str]) -> list[str]:
        lines, value = lines.copy(), change(json.loads(lines[line]))
        lines[line] = value if isinstance(value, str) else json.dumps(value)
        return lines

    return edit


def put(index: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda line: [*line[:index], value, *line[index + 1 :]]


def times(written: str) -> Callable[[list[str]], list[str]]:
    """In place of the first time."""
    return edited(-2, lambda line: json.dumps(line).replace("120.0", written, 1))


# Lines of chain(layers=1): 1 header, 2-5 a layer's parameter, gradient and moments, 6 the first activation, 7 the operator that
# makes it, 8 its save; the last two are times and features.
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edited(0, lambda h: [h]), f"line 1: expected schema {SCHEMA}, got None: record the trace again with `save_trace`"),
        (edited(0, lambda h: {**h, "ops": "many"}), "line 1: expected ops of type int in the header, got 'many'"),
        (edited(0, lambda h: {**h, "op_names": [1]}), "line 1: expected text, got 1"),
        (edited(0, lambda h: {**h, "ops": 3}), "expected 3 ops, as the header says, got 23"),
        (edited(1, lambda _: '["tensor"'), "line 2: expected one JSON value, got"),
        (edited(1, lambda line: line[:-1]), "line 2: expected a tensor, op, .* line with all its values"),
        (edited(1, put(1, "weight")), "line 2: expected a kind of tensor: parameter, .*, got 'weight'"),
        (edited(1, put(2, 1.5)), "line 2: expected a whole number, got 1.5"),
        (edited(1, put(2, 1 << 70)), "line 2: expected a whole number"),
        (edited(1, put(2, -1)), "sizes of 0 bytes or more"),
        (edited(6, put(1, "aten::unheard")), "line 7: expected an operator that the header names, got 'aten::unheard'"),
        (edited(6, put(2, "xyz")), "line 7: expected a hash of 16 hexadecimal digits, got 'xyz'"),
        (edited(6, put(3, "sideways")), "line 7: expected a phase: forward, backward, optimizer, got 'sideways'"),
        (edited(6, put(5, [99])), "numbers below"),
        (edited(7, put(1, 1 << 40)), "hook_tensor from -1"),
        (edited(7, put(0, "load")), "line 8: expected a tensor, op, save, use, us or features line"),
        (times("NaN"), "expected finite numbers, got NaN"),
        (times('"long"'), "expected finite times in microseconds, got 'long'"),
        (times("-1"), "finite times of 0 us or more, got -1"),
        (times("1" + 400 * "0"), "line 60: expected whole numbers of 40 digits at most, got 10000000000000000000... of 401"),
        (edited(0, lambda _: "[" * 100_000), "line 1: expected values of a trace's lines"),
        (edited(-2, put(1, 7)), "expected times from operator 0 on, got 7; is a line missing"),
        (lambda lines: lines[:-2] + lines[-1:], "expected 23 ops, as the header says, got 0; was the file cut short"),
        (lambda lines: [*lines, lines[1]], "expected the end of the file after the features"),
        (lambda lines: lines[:1] + lines[2:], "expected .* tensors, as the header says"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_line(tmp_path: Path, edit: Callable[[list[str]], list[str]], message: str) -> None:
    lines = lines_of(chain(layers=1), tmp_path)
    assert_equal(load_lines(lines, tmp_path), chain(layers=1))
    with pytest.raises(ValueError, match=message):
        load_lines(edit(lines), tmp_path)


@pytest.mark.parametrize("schema", ["chameleon_mm.trace/1", "chameleon_mm.trace/2", "chameleon_mm.trace/4", "other", 3])
def test_another_schema_is_refused_in_one_line(tmp_path: Path, schema: Any) -> None:
    header, *lines = lines_of(chain(layers=1), tmp_path)
    with pytest.raises(ValueError, match="line 1: expected schema") as refusal:
        load_lines([json.dumps({**json.loads(header), "schema": schema}), *lines], tmp_path)
    expected = f"expected schema {SCHEMA}, got {schema!r}: record the trace again with `save_trace`"
    assert str(refusal.value) == f"{tmp_path / 't'}, line 1: {expected}"


VALUES: list[Any] = [
    None, True, False, 0, -1, 3, 255, 1 << 31, 1 << 60, -(1 << 61), 10**400, 0.5, 1e308, "", "x", [], {}, [[]],
]  # fmt: skip


def mutant(rng: Random, value: Any) -> Any:
    """Another value in place of one that is somewhere in it."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        return put(at := rng.randrange(len(value)), mutant(rng, value[at]))(value)
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: mutant(rng, value[key])}
    return rng.choice(VALUES)


def mutated(rng: Random, lines: list[str]) -> list[str]:
    lines, at, other = lines.copy(), rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.choice(("value", "value", "value", "cut", "drop", "copy", "swap", "garble")):
        case "value":
            lines[at] = json.dumps(mutant(rng, json.loads(lines[at])))
        case "cut":
            lines[at] = lines[at][: rng.randrange(len(lines[at]))]
        case "drop":
            del lines[at]
        case "copy":
            lines.insert(at, lines[other])
        case "swap":
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            where = rng.randrange(len(lines[at]))
            lines[at] = lines[at][:where] + chr(rng.randrange(32, 127)) * rng.choice((1, 1, 5000)) + lines[at][where + 1 :]
    return lines


def test_whatever_was_done_to_a_file_it_is_a_trace_or_refused_by_name(tmp_path: Path) -> None:
    rng = Random(0)
    lines = lines_of(chain(layers=1), tmp_path)
    refusals: list[str] = []
    for _ in range(600):
        try:
            trace = load_lines(mutated(rng, lines), tmp_path)
        except ValueError as error:
            refusals.append(str(error))
        else:
            save_trace(trace, tmp_path / "again")
            assert_equal(load_trace(tmp_path / "again"), trace)
    assert 300 < len(refusals) < 600
    assert all(refusal.startswith(f"{tmp_path / 't'}") for refusal in refusals)


@pytest.mark.parametrize("depth", [10, 300, *range(900, 1000, 7)])
def test_values_however_deeply_nested_are_refused_by_line(tmp_path: Path, depth: int) -> None:
    lines = lines_of(chain(layers=1), tmp_path)
    for at, value in (0, "16777216"), (1, "4194304"), (6, "[]"), (7, "1"):
        assert value in lines[at]
        nested = lines[at].replace(value, f"{'[' * depth}{']' * depth}", 1)
        with pytest.raises(ValueError, match=rf"line {at + 1}: expected .*, got "):
            load_lines([*lines[:at], nested, *lines[at + 1 :]], tmp_path)
