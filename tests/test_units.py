"""Sizes and durations as text and back; errors as built-ins that a caller would already catch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import chameleon_mm as cm
from chameleon_mm import errors
from chameleon_mm.integrations._trainings import Trainings
from chameleon_mm.units import GIB, KIB, MIB, TIB, format_apart, format_size, format_size_up, format_us, parse_size, printable


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("7", 7),
        ("512B", 512),
        ("4KiB", 4096),
        ("1.5 MiB", 3 * 2**19),
        ("20GiB", 21_474_836_480),
        ("2TiB", 2**41),
        ("8KB", 8_000),
        ("1.25MB", 1_250_000),
        ("8GB", 8_000_000_000),
        ("1TB", 10**12),
        ("  3 gib ", 3 * 2**30),
        ("0.5KiB", 512),
    ],
)
def test_text_is_parsed_exactly(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@given(st.integers(min_value=0, max_value=2**53 - 1))
def test_whole_numbers_lose_nothing(nbytes: int) -> None:
    assert parse_size(nbytes) == nbytes
    assert parse_size(str(nbytes)) == nbytes
    assert parse_size(f"{nbytes}KiB") == nbytes * KIB


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1 2", "1GiBs", "1 XB", "1e9", "0x10", "1,5GiB", "1.", ".5GiB", "nan", "inf"]
)
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hbm_budget: expected a number and B, KiB"):
        parse_size(text, what="hbm_budget")


@given(st.integers(min_value=0, max_value=10**15), st.sampled_from([("KB", 3), ("MB", 6), ("GB", 9), ("TB", 12)]))
def test_decimals_lose_nothing(nbytes: int, unit: tuple[str, int]) -> None:
    suffix, digits = unit
    whole, fraction = divmod(nbytes, 10**digits)
    assert parse_size(f"{whole}.{fraction:0{digits}d}{suffix}") == nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("112.3GiB", 120_581_206_835),
        ("0.3KiB", 307),
        ("1.0000001MB", 1_000_000),
        ("4.00000000000000000001GiB", 4 * GIB),
        ("0.0001KiB", 0),
    ],
)
def test_a_fraction_of_a_byte_is_rounded_down(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["1.5", "1.5 B", "0.1b"])
def test_a_fraction_of_bytes_themselves_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size: expected a whole number of bytes, or a unit after it"):
        parse_size(text)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="pool limit: expected 0 bytes or more, got -1"):
        parse_size(-1, what="pool limit")


@pytest.mark.parametrize("size", [1 << 63, np.uint64(1 << 63), "8388608TiB", f"{'9' * 30}GiB", "9" * 400])
def test_more_than_any_memory_is_refused(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"^hbm_budget: expected less than 8 EiB, got \d+(TiB|GiB)?$"):
        parse_size(size, what="hbm_budget")
    assert parse_size((1 << 63) - 1) == (1 << 63) - 1


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint64, np.array, torch.tensor])
def test_integers_of_other_libraries_are_sizes(kind: Callable[[int], Any], sim: cm.SimDevice) -> None:
    assert type(parse_size(kind(100))) is int and parse_size(kind(100)) == 100
    with cm.PinnedPool(kind(100), device=sim) as pool:
        assert pool.limit_bytes == 100
    assert cm.SwapSession(kind(100), kind(100), sim, kind(100), plans=False).hbm_budget == 100
    with cm.PinnedPool("1MiB", device=sim) as pool:
        assert pool.allocate(kind(100)).nbytes == 100


@pytest.mark.parametrize(
    "size", [True, 1.5, None, b"1GiB", [1], np.bool_(True), np.float32(1), np.ones((9, 9)), torch.ones(9, 9)]
)
def test_other_types_are_refused(size: object) -> None:
    with pytest.raises(TypeError, match="min_bytes: expected an int of bytes or text"):
        parse_size(size, what="min_bytes")  # type: ignore[arg-type]  # the wrong type is what is tested
    with pytest.raises(TypeError, match=r"^(?!.*\n)"):
        parse_size(size)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (12 * MIB, "12.0 MiB"),
        (GIB + GIB // 2, "1.50 GiB"),
        (141 * GIB, "141.0 GiB"),
        (5 * TIB, "5.00 TiB"),
        (-2 * KIB, "-2.00 KiB"),
    ],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (KIB + 1, "1.01 KiB"),
        (10 * KIB - 1, "10.00 KiB"),
        (10 * KIB + 1, "10.1 KiB"),
        (GIB - 1, "1024.0 MiB"),
        (3 * GIB + 7_000_000, "3.01 GiB"),
    ],
)
def test_sizes_to_be_said_back_are_rounded_up(nbytes: int, text: str) -> None:
    assert format_size_up(nbytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_said_back_is_enough_and_says_itself(nbytes: int) -> None:
    said = parse_size(format_size_up(nbytes))
    assert nbytes <= said <= nbytes * 1.01
    assert parse_size(format_size_up(said)) == said


def test_sizes_that_differ_are_told_apart() -> None:
    assert format_apart([20 * GIB, 16 * GIB]) == ["20.0 GiB", "16.0 GiB"]
    assert format_apart([20 * GIB, 20 * GIB + KIB]) == ["21474836480 B", "21474837504 B"]


@given(st.text(st.characters(categories=("Cs", "L", "N")), max_size=5))
def test_printable_text_can_be_printed(text: str) -> None:
    assert printable(text).encode("utf-8").decode() == printable(text)
    assert printable(text) == text or any("\ud800" <= letter <= "\udfff" for letter in text)


@pytest.mark.parametrize(("us", "text"), [(0, "0.0 us"), (8, "8.0 us"), (12_400, "12.40 ms"), (3.2e6, "3.20 s")])
def test_durations_for_people(us: float, text: str) -> None:
    assert format_us(us) == text


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InfeasibleBudget, ValueError),
        (errors.HostMemoryExhausted, MemoryError),
        (errors.BlockReleasedError, ValueError),
        (errors.SessionClosedError, RuntimeError),
    ],
)
def test_errors_are_caught_by_name_and_as_built_ins(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, errors.ChameleonError)
    assert str(error("expected 1, got 2")) == "expected 1, got 2"


# --- arguments of a wrong type are refused in one line, before anything was started: expected, got, what to do


SHARES = {"min_bytes": (None, np.int64(4096), "1GiB", 4096), "device": (None,), "pool": (None,)}
SIZES, SWITCH, NOTHING = (None, np.int64(4096), "1GiB", 4096), (True,), (None,)
BUDGETS = (*SIZES, np.float32(1))
WRONG: tuple[Any, ...] = (
    *(None, 4096, -1, 1.5, float("nan"), True, "x", b"", [], [1], {}, object(), cm.SimDevice, torch.ones(2), torch.ones(9, 9)),
    *(np.int64(4096), np.float32(1), np.ones((9, 9)), "1GiB"),
)


def _installed(**arguments: Any) -> None:
    try:
        cm.install(**arguments)
    finally:
        cm.uninstall()


def _callables(
    device: cm.SimDevice, pool: cm.PinnedPool, session: cm.SwapSession
) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield the name of a public callable's argument, its call, and the members of `WRONG` that it takes."""
    model, block = nn.Linear(1, 1), pool.allocate(4096)
    made: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
        (partial(cm.SwapSession, device=device, model=model), {
            **SHARES, "hbm_budget": BUDGETS, "host_budget": BUDGETS, "model": NOTHING, "plans": SWITCH,
            "recompute": SWITCH, "optimizer": NOTHING, "parameters": (), "progress": SWITCH, "keep": ([],),
            "never_recompute": ([],),
        }),
        (partial(cm.attach, model, device=device), {
            "hbm_budget": BUDGETS, "optimizer": NOTHING, "budget": (),
        }),
        (cm.attach, {"model": ()}),
        (partial(cm.save_on_cpu, device=device), SHARES),
        (_installed, {**SHARES, "pin_memory": ()}),
        (Trainings, {
            **SHARES, "hbm_budget": BUDGETS, "host_budget": BUDGETS, "plans": SWITCH, "model": (),
            "budget": (), "optimizer_state": SWITCH,
        }),
        (partial(cm.PinnedPool, device=device), {"max_bytes": SIZES, "chunk_bytes": SIZES, "device": NOTHING}),
        (pool.allocate, {"nbytes": SIZES[1:]}), (partial(pool.allocate, 1), {"stream": NOTHING}),
        (pool.allocate_pageable, {"nbytes": SIZES[1:]}), (partial(pool.empty, 2), {"dtype": ()}),
        (lambda value: setattr(pool, "limit_bytes", value), {"value": SIZES[1:]}), (partial(block.tensor, 2), {"dtype": ()}),
        (partial(block.numpy, 2), {"dtype": (None, [], {}, np.int64(4096), np.float32(1), np.ones((9, 9)))}),
        *((partial(call, dtype=torch.uint8), {"shape": (4096, True, b"", [], [1], {}, np.int64(4096))})
          for call in (pool.empty, block.tensor)),
        (block.wait_on, {"stream": ()}), (block.release, {"after": NOTHING}),
        (cm.SimDevice, {"spec": (), "hbm_bytes": SIZES, "cost": NOTHING, "moves_bytes": SWITCH}),
        (lambda stream: device.stream(stream).__enter__(), {"stream": ()}), (cm.resolve_device, {"device": NOTHING}),
        (session.run_step, {"fn": ()}), (partial(session.run_step, lambda: None), {"snapshot": SWITCH}),
        (session.restore, {"snapshot": NOTHING}), (session.snapshot().write, {"path": ("x", "1GiB")}),
        (session.snapshot().write("earlier").wait, {"timeout_s": (None, 4096, 1.5, True, np.int64(4096), np.float32(1))}),
        (lambda value: setattr(session, "hbm_budget", value), {"value": BUDGETS[1:]}),
        (lambda value: setattr(session, "host_budget", value), {"value": BUDGETS[1:]}),
        *((call, {"path": ("x", "1GiB")}) for call in (session.report().save_html, session.report().save_trace)),
    ]  # fmt: skip
    for call, arguments in made:
        for name, right in arguments.items():
            yield f"{getattr(call, 'func', call)}({name}=)", lambda value, call=call, name=name: call(**{name: value}), right


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_each_wrong_argument_is_refused_in_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    device = cm.SimDevice()
    with (
        cm.PinnedPool("1MiB", device=device) as pool,
        cm.SwapSession("1GiB", "8MiB", device, model=nn.Linear(1, 1)) as session,
    ):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        wrong_ends = []
        for name, call, right in _callables(device, pool, session):
            live = pool.stats().num_live
            for value in WRONG:
                if repr(value) in map(repr, right):
                    continue
                try:
                    call(value)
                    ended = "accepted"
                except Exception as error:  # noqa: BLE001 - all are collected
                    ended = f"{isinstance(error, (TypeError, ValueError))} {error}"
                if not re.fullmatch(r"True [^\n]*expected [^\n]*got [^\n]*", ended):
                    wrong_ends.append((name, repr(value), ended))
            assert pool.stats().num_live == live, name
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) == hooks, name
        assert not wrong_ends, "\n".join(map(str, wrong_ends))
        del call
