"""`bench codec`: what is collected from the model, and that shares, ratios and exceptions are counted right."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from chameleon_mm.bench import codec
from chameleon_mm.bench._codec_activations import Saved, Shape, Source, saved_by, sources
from chameleon_mm.bench._measure import Figure, Waived
from chameleon_mm.bench._stand_in import NO_TRITON, is_stand_in
from chameleon_mm.device import SimDevice, resolve_device
from chameleon_mm.kernels.codec_bool import BOOL_AS_BITS
from chameleon_mm.kernels.codec_narrow import FP32_AS_BF16, INT64_AS_INT16
from chameleon_mm.kernels.codec_pack12 import MAX_EXCEPTIONS, PACK12, Pack12Codec
from chameleon_mm.kernels.codecs import CODECS

TINY = Shape(layers=1, width=32, heads=2, context=32, batch=2, steps=1)


def saved(t: Tensor) -> Saved:
    return Saved(t.dtype, t.contiguous().view(-1).view(torch.uint8))


def value(cell: Any) -> float:
    assert isinstance(cell, Figure)
    return cell.median


# --- what is collected


def test_a_storage_counts_once_and_parameters_not_at_all() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    x = torch.randn(8, 8, requires_grad=True)

    def forward() -> Tensor:
        y = x.exp()  # saves y
        return (y @ weight + y.T @ weight.T).sum()  # saves y, a view of it, the parameter and a view of that

    found = saved_by(forward)
    assert [(one.dtype, one.raw.numel()) for one in found] == [(torch.float32, 256)]
    assert torch.equal(found[0].raw.view(torch.float32).view(8, 8), x.detach().exp())


def test_the_demos_model_saves_each_kind() -> None:
    found = {source.name: source for source in sources(torch.device("cpu"), TINY)}
    dtypes = {name: {one.dtype for one in source.tensors} for name, source in found.items()}
    assert dtypes == {
        "GPT, fp32": {torch.float32, torch.int64},
        "GPT, autocast": {torch.float32, torch.bfloat16, torch.int64},
        "GPT, bf16": {torch.float32, torch.bfloat16, torch.int64},
        "RMS norm of bf16": {torch.float32, torch.bfloat16},
        "dropout masks": {torch.bool},
    }
    rows, columns = TINY.batch * TINY.context, TINY.width
    assert {one.raw.numel() for one in found["dropout masks"].tensors} == {rows * columns}
    upcast = max(found["RMS norm of bf16"].tensors, key=lambda one: one.raw.numel())
    numbers = upcast.raw.view(torch.float32)
    assert torch.equal(numbers.bfloat16().float(), numbers)


# --- what is counted


def test_a_row_counts_tensors_bytes_and_ratio() -> None:
    upcast = torch.arange(100, dtype=torch.float32)  # small whole numbers: bf16 has them
    other = torch.full((300,), 1 / 3)
    material = [Source("made", [saved(upcast), saved(other)])]
    table, wrong = codec.count(SimDevice(), material, [FP32_AS_BF16])
    (row,) = table.rows
    assert wrong == 0
    assert row.name == "made: fp32_as_bf16"
    assert {key: value(row.cells[key]) for key in ("tensors", "exact", "exact_bytes", "ratio")} == {
        "tensors": 2, "exact": 0.5, "exact_bytes": 0.25, "ratio": 2.0
    }  # fmt: skip
    assert isinstance(row.cells["odd"], Waived)


def test_no_tensor_of_the_kind_has_no_ratio() -> None:
    table, wrong = codec.count(SimDevice(), [Source("made", [saved(torch.full((4,), 1 << 40))])], [INT64_AS_INT16])
    cells = table.rows[0].cells
    assert (value(cells["exact"]), value(cells["exact_bytes"]), wrong) == (0.0, 0.0, 0)
    assert isinstance(cells["ratio"], Waived)


@pytest.mark.parametrize("odd", [0, 7, MAX_EXCEPTIONS, MAX_EXCEPTIONS + 1, 300])
def test_exceptions_are_counted_also_where_the_tensor_is_refused(odd: int) -> None:
    numbers = torch.ones(1024 + 5)  # the five are in no block
    numbers[:odd] = torch.tensor([2.0**100, 2.0**-100]).repeat(512)[:odd]  # far from the mean, whichever way it moves
    outcome = codec.tried(PACK12, saved(numbers.bfloat16()))
    assert (outcome.is_exact, outcome.is_wrong) == (odd <= MAX_EXCEPTIONS, False)
    assert (outcome.numbers, outcome.exceptions) == (1024, odd)


def test_a_codec_that_changes_a_bit_fails_the_run(sim: SimDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Pack12Codec.decode_reference

    def careless(self: Pack12Codec, src: Tensor, dst: Tensor) -> None:
        decode(self, src, dst)
        dst[0] ^= 1

    assert codec.count(sim, [Source("made", [saved(torch.ones(4).bfloat16())])], CODECS)[1] == 0
    monkeypatch.setattr(Pack12Codec, "decode_reference", careless)
    report = codec.measure(sim, TINY, repeats=1)
    assert report.failed
    assert "exact tensors that decoded to other bits" in report.headline


def test_rates_are_taken_of_the_largest_tensor_that_is_exact() -> None:
    small, large = torch.ones(8, dtype=torch.bool), torch.ones(64, dtype=torch.bool)
    broken = torch.full((128,), 2, dtype=torch.uint8)  # a boolean's byte that is neither 0 nor 1
    material = [Source("made", [saved(small), saved(large), Saved(torch.bool, broken)])]
    chosen = codec.largest_exact(BOOL_AS_BITS, material)
    assert chosen is material[0].tensors[1]
    assert codec.largest_exact(PACK12, material) is None


# --- the command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    codec.add_arguments(parser)
    return codec.run(parser.parse_args(arguments), Console(quiet=True))


def test_the_command_counts_and_waives_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "Shape", lambda steps=12: replace(TINY, steps=steps))
    target = tmp_path / "codec.json"
    assert run("--device", "sim", "--steps", "1", "--json", str(target)) == 0
    written = json.loads(target.read_text(encoding="utf-8"))
    assert (written["theme"], set(written["tables"])) == ("codec", {"found", "rates"})
    assert {row["codec"] for row in written["tables"]["found"]["rows"]} == {one.name for one in CODECS}
    for row in written["tables"]["rates"]["rows"]:
        assert all("CUDA GPU alone" in cell["waived"] for cell in row["cells"].values())
    assert [bound["held"] for bound in written["bounds"]] == [True] + [None] * 2 * len(CODECS)
    assert all(column["simulated"] is False for column in written["tables"]["found"]["columns"])


@pytest.mark.parametrize("arguments", [["--steps", "-1"], ["--repeats", "0"], ["--device", "tpu"]])
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        run("--device", "sim", *arguments)


@pytest.mark.gpu
def test_a_gpus_kernels_have_rates() -> None:
    report = codec.measure(resolve_device("cuda"), TINY, repeats=1)
    cells = [cell for row in report.tables["rates"].rows for cell in row.cells.values()]
    if is_stand_in(report.header["device"]):
        assert all(cell == Waived(NO_TRITON) for cell in cells)
    else:
        assert all(isinstance(cell, Figure) for cell in cells)
