"""`chameleon-mm plan` for what people run: checkpointing, shards, adapters, packed weights, 8-bit moments, another GPU."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chameleon_mm.device import SPECS
from chameleon_mm.device.specs import spec_from_file
from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace
from chameleon_mm.plan.unswapped_memory import peak_memory
from chameleon_mm.pool import host_memory
from chameleon_mm.tools.adapters import Adapters, adapted
from chameleon_mm.tools.blocks import TRIALS, Checkpointing, Survey, fullest
from chameleon_mm.tools.cli import main
from chameleon_mm.tools.plan_command import source_of
from chameleon_mm.tools.prediction import Way, predict, with_checkpointing
from chameleon_mm.tools.sharding import Shards, shardable, sharded
from chameleon_mm.tools.step_on_shapes import RecordedStep, StepRequest, record_step
from chameleon_mm.tools.workload import Build, Llama, LlamaShape, ModelUnusable, Workload
from chameleon_mm.units import GIB, allocated_size
from tests._simulated_step import simulated_step
from tests._user_modules import write_module

H200 = SPECS["h200"]
LLAMA = LlamaShape(layers=4, width=64, heads=4, kv_heads=2, ffn=160, vocabulary=128, context=64)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width, bias=False), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.dropout(self.linear(x)))


class Blocks(nn.Module):
    """Three equal blocks of one matrix each, between two matrices outside them."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


def blocks() -> Workload:
    model, x = Blocks(), torch.zeros(8, 256)
    return Workload(about="blocks", model=model, loss=lambda: model(x).sum())


def llama() -> Workload:
    model, ids = Llama(LLAMA), torch.zeros(2, 64, dtype=torch.int64)
    return Workload(about="a small llama", model=model, loss=lambda: model.loss(ids))


def recorded(build: Build, **options: Any) -> RecordedStep:
    options = {"spec": H200, "dtype": torch.float32, "optimizer": "adamw-fused", "min_bytes": 1, **options}
    return record_step(StepRequest(build=build, **options))


def bytes_of(trace: Trace, kind: TensorKind) -> int:
    return int(trace.tensor_bytes[trace.tensor_kind == kind].sum())


# --- models of Hugging Face, by the kind that their configuration is of

_TEXT = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 48, "pad_token_id": 0}
_SIDES = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))}
_STACK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "t5": ({"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "n_positions": 48},
           "T5ForConditionalGeneration), 2 x 48 tokens"),
    "bart": ({**_TEXT, **_SIDES, "encoder_layerdrop": 0.1}, "BartForConditionalGeneration), 2 x 48 tokens"),
    "bert": ({**_STACK, "vocab_size": 64, "max_position_embeddings": 48}, "BertForMaskedLM), 2 x 48 tokens"),
    "vit": ({**_STACK, "image_size": [32, 16], "patch_size": 8}, "ViTForImageClassification), 2 x 3 x 32 x 16"),
    "convnext": ({"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32, "drop_path_rate": 0.0},
                 "ConvNextForImageClassification), 2 x 3 x 32 x 32"),
    "whisper": ({**_TEXT, **_SIDES, "max_source_positions": 32, "max_target_positions": 16, "num_mel_bins": 8,
                 "decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
                "WhisperForConditionalGeneration), 2 x 16 tokens"),
}  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_each_kind_of_hugging_faces_needs_what_it_needs_when_it_runs(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config, about = CONFIGURATIONS[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **config}))
    build = source_of(str(path), batch=2, seq=None, dtype=torch.float32)
    step = recorded(build)
    assert step.about.endswith(about)
    _, peak_bytes, us = simulated_step(build, "adamw-fused")
    assert peak_memory(step.trace).nbytes == peak_bytes
    assert step.trace.duration_us == pytest.approx(us, rel=1e-9)
    assert any("layerdrop off" in note for note in step.notes) == (kind == "bart")


def test_a_row_of_an_image_model_has_no_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit"}))
    assert main(["plan", str(path), "--seq", "9"]) == 2
    assert "--seq: expected none" in capsys.readouterr().err


# --- checkpointing


@pytest.mark.parametrize(
    ("build", "how"),
    [
        (llama, Checkpointing()),
        (llama, Checkpointing(Fraction(3, 4))),
        (llama, Checkpointing(selective=True)),
        (llama, Checkpointing(survey=Survey(), kept=frozenset({(0, 7), (1, 0), (1, 3), (3, 6)}))),
        (blocks, Checkpointing()),  # what it drops, it drops again
    ],
)
def test_a_checkpointed_step_needs_what_it_needs_when_it_runs(build: Build, how: Checkpointing) -> None:
    """To the byte and to the microsecond, on the simulated GPU with a host that takes no time."""
    trace = recorded(build, checkpointed=how).trace
    _, peak_bytes, us = simulated_step(build, "adamw-fused", checkpointed=how)
    assert peak_memory(trace).nbytes == peak_bytes
    assert trace.duration_us == pytest.approx(us, rel=1e-9)  # added up in another order


def test_it_is_what_a_user_gets_who_checkpoints_each_block() -> None:
    def by_hand() -> Workload:
        workload = llama()
        for block in workload.model.blocks:  # type: ignore[union-attr]  # it is a Llama
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False
            )
        return workload

    ours, theirs, plain = recorded(llama, checkpointed=Checkpointing()).trace, recorded(by_hand).trace, recorded(llama).trace
    assert (peak_memory(ours).nbytes, ours.duration_us) == (peak_memory(theirs).nbytes, theirs.duration_us)
    assert peak_memory(ours).nbytes < peak_memory(plain).nbytes
    assert ours.duration_us > plain.duration_us


def test_as_few_blocks_as_fit_are_checkpointed_and_selective_keeps_more_than_none() -> None:
    step = cache(lambda how: recorded(llama, checkpointed=how))

    def ways(how: Checkpointing | None, budget: int) -> Way:
        return with_checkpointing(predict(step(None), H200, budget, None), how, step).ways[-1]

    peaks = [peak_memory(step(Checkpointing(Fraction(n, 4)) if n else None).trace).nbytes for n in range(5)]
    assert sorted(peaks, reverse=True) == peaks
    for count in (1, 2, 3):  # all four need as much as three: the last block's own, in backward
        fitting = ways(None, peaks[count])
        assert (fitting.name, fitting.peak_bytes) == (Checkpointing(Fraction(count, 4)).name, peaks[count])
    selective, whole = ways(Checkpointing(selective=True), peaks[0]), ways(Checkpointing(), peaks[0])
    assert whole.peak_bytes < selective.peak_bytes < peaks[0]
    assert whole.step_us > selective.step_us
    filled = ways(Checkpointing(survey=Survey()), selective.peak_bytes)
    assert filled.name == selective.name
    assert whole.peak_bytes <= filled.peak_bytes <= selective.peak_bytes
    assert filled.step_us < whole.step_us


def test_the_costliest_results_that_run_again_are_kept_first() -> None:
    survey = Survey()
    recorded(llama, checkpointed=Checkpointing(survey=survey))
    levels = survey.levels()
    attention, down = 3, 7  # of the eight products and attentions of a block, by their order
    assert {number for _, number in survey.work} == set(range(8))
    assert {number for _, number in survey.again} == set(range(8)) - {down}  # its result is saved nowhere
    assert levels[0].kept == frozenset()
    assert [next(iter(levels[n].kept - levels[n - 1].kept)) for n in range(1, 5)] == [(block, attention) for block in range(4)]
    assert len(levels) == 1 + 4 * 7


def tried(peaks: list[int], budget: int) -> list[int]:
    """Levels that a search for the last one within `budget` tries, and its answer."""
    levels: list[int] = []

    def whole() -> Generator[int, int, None]:
        levels.append((yield from fullest(len(peaks) - 1, budget, peaks[0])))

    search = whole()
    with suppress(StopIteration):
        at = next(search)
        while True:
            levels.append(at)
            at = search.send(peaks[at])
    return levels


def test_the_last_level_that_fits_is_found_and_what_is_found_fits() -> None:
    for budget in range(2, 40):
        *trials, found = tried([*range(3, 30, 2)], budget)
        assert found == min(max(0, (budget - 3) // 2), 13)
        assert len(trials) == len(set(trials)) <= TRIALS
        for peaks in ([3, 3, 4, 9, 10, 30], [3, 20, 21, 22, 23, 24]):
            found = tried(peaks, budget)[-1]
            assert found == 0 or peaks[found] <= budget


# --- shards


def test_shards_are_a_share_of_what_one_rank_would_keep() -> None:
    whole, shard = recorded(llama), sharded(recorded(llama), Shards(ranks=4))
    for kind in (TensorKind.PARAMETER, TensorKind.GRADIENT):
        assert bytes_of(shard.trace, kind) * 4 == bytes_of(whole.trace, kind)
    assert bytes_of(shard.trace, TensorKind.ACTIVATION) == bytes_of(whole.trace, TensorKind.ACTIVATION)
    of_optimizer = whole.trace.op_phase == StepPhase.OPTIMIZER
    np.testing.assert_array_equal(shard.trace.op_us[~of_optimizer], whole.trace.op_us[~of_optimizer])
    np.testing.assert_allclose(shard.trace.op_us[of_optimizer] * 4, whole.trace.op_us[of_optimizer])
    wide = sharded(recorded(llama, dtype=torch.bfloat16), Shards(ranks=4, dtype=torch.float32))
    assert bytes_of(wide.trace, TensorKind.PARAMETER) == bytes_of(shard.trace, TensorKind.PARAMETER)


def test_a_block_is_whole_from_the_block_before_until_it_has_run() -> None:
    """Counted by hand, in weights. The two outside the blocks are whole all along, and so are their gradients once made."""
    step = recorded(blocks)
    weight = int(allocated_size(256 * 256 * 4))
    shard = sharded(step, Shards(ranks=2))
    held = (shard.trace.op_inner_bytes - step.trace.op_inner_bytes) // weight
    forward = shard.trace.op_phase == StepPhase.FORWARD
    products = [i for i, name in enumerate(shard.trace.op_name) if "mm" in shard.trace.op_names[name]]
    assert [int(held[i]) for i in products if forward[i]] == [2, 2 + 2, 2 + 2, 2 + 1, 2]
    assert int(held[forward].max()) == 4
    # A block's two products: its own gradient is there from the first on; what is reduced is the last block's, then its own too
    last, third, second, first = (3, 3), (2 + 2 + 1 + 1, 2 + 2 + 1 + 1 + 1), (2 + 2 + 1 + 1 + 1, 8), (2 + 1 + 1 + 1 + 1, 7)
    assert [int(held[i]) for i in products if not forward[i]] == [*last, *third, *second, *first, 2 + 2 + 1]


def test_ranks_that_do_not_divide_are_said_before_a_step_is_recorded() -> None:
    with pytest.raises(ModelUnusable, match=r"divides the rows of every parameter, got 3 and tokens\.weight of 128 rows"):
        shardable(llama, Shards(ranks=3))()
    mixed = lambda: Workload(about="x", model=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()), loss=torch.Tensor)  # noqa: E731 - two models of one line
    with pytest.raises(ModelUnusable, match="one dtype, got float16 and float32"):
        shardable(mixed, Shards(ranks=2, dtype=torch.float32))()
    shardable(mixed, Shards(ranks=2))()


# --- adapters, packed weights, moments of 8 bits


def test_adapters_cost_what_pefts_cost() -> None:
    peft = pytest.importorskip("peft")

    def theirs() -> Workload:
        workload = llama()
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q", "v"], lora_dropout=0.0)
        model = peft.get_peft_model(workload.model, config)
        model.get_input_embeddings = lambda: None
        workload.model.tokens.register_forward_hook(lambda module, args, out: out.requires_grad_())  # type: ignore[union-attr]  # it is a Llama
        return Workload(about="peft", model=model, loss=workload.loss)

    ours, peers = recorded(adapted(llama, Adapters(rank=8, modules=("q", "v")))), recorded(theirs)
    assert ours.num_parameters == peers.num_parameters
    for kind in (TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.ACTIVATION):
        assert bytes_of(ours.trace, kind) == bytes_of(peers.trace, kind)
    assert peak_memory(ours.trace).nbytes == peak_memory(peers.trace).nbytes
    assert ours.trace.duration_us == peers.trace.duration_us


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_weights_take_their_bits_and_a_scale_for_64_elements(bits: int) -> None:
    step, plain = (recorded(adapted(llama, Adapters(rank=8, bits=b))) for b in (bits, None))
    linear = sum(p.numel() for block in Llama(LLAMA).blocks for name, p in block.named_parameters() if "norm" not in name)
    assert step.parameters_by_dtype["uint8"] == linear * bits // 8
    less = bytes_of(plain.trace, TensorKind.PARAMETER) - bytes_of(step.trace, TensorKind.PARAMETER)
    assert less == linear * 4 - linear * bits // 8 - linear // 64 * 4
    assert bytes_of(step.trace, TensorKind.ACTIVATION) == bytes_of(plain.trace, TensorKind.ACTIVATION)  # never saved unpacked
    unpacked = [i for i, name in enumerate(step.trace.op_name) if "unpack" in step.trace.op_names[name]]
    in_backward = sum(step.trace.op_phase[unpacked] == StepPhase.BACKWARD)
    assert len(unpacked) - in_backward == 4 * 7  # each weight of each block, once
    assert in_backward == 4 * 7


def test_moments_of_8_bits_take_a_byte_and_a_scale_for_256_elements() -> None:
    step = recorded(blocks, optimizer="adamw-8bit")
    assert bytes_of(step.trace, TensorKind.OPTIMIZER) == 5 * 2 * (256 * 256 + 256 * 4)
    small = recorded(lambda: Workload(about="x", model=(m := nn.Linear(8, 8)), loss=lambda: m(torch.zeros(2, 8)).sum()),
                     optimizer="adamw-8bit")  # fmt: skip
    assert bytes_of(small.trace, TensorKind.OPTIMIZER) == 2 * 4 * (64 + 8)


# --- the command


GPU = {"name": "X", "hbm_bytes": "24GiB", "hbm_gbps": 1000, "bf16_tflops": 100, "fp32_tflops": 50, "h2d_gbps": 9, "d2h_gbps": 9}


def test_what_is_asked_for_is_in_the_table_and_the_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "gpu.json", tmp_path / "plan.json"
    path.write_text(json.dumps(GPU))
    spec = spec_from_file(path)
    assert (spec.name, spec.hbm_bytes, spec.duplex_gbps, spec.source) == ("X", 24 * GIB, 13.5, str(path))
    path.write_text(json.dumps({**GPU, "d2h_gbps": 1}))
    assert spec_from_file(path).duplex_gbps == 9.5  # 75 % of their sum would be less than one direction alone
    path.write_text(json.dumps(GPU))
    command = [
        "plan",
        "gpt2",
        "--seq",
        "64",
        "--gpu",
        str(path),
        "--checkpointing",
        "2",
        "--lora",
        "4:qkv",
        "--quantise",
        "4bit",
    ]
    assert main([*command, "--optimizer", "adamw-8bit", "--local-ranks", "2", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["ways"][-1]["name"] == "checkpointing 1/2"
    text = " ".join(capsys.readouterr().out.split())
    assert "full recomputation" not in text
    assert "copies run at 4.5 GB/s out, 4.5 back and 6.75 both ways together" in text
    assert "2 ranks share the link and host memory: rates and pinned bytes here are one rank's" in text
    assert "adapters of rank 4, without dropout; all else is frozen, frozen linear weights of 4 bits" in text


def test_shards_of_ones_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import torch\ndef tiny(batch): return torch.nn.Linear(64, 64), torch.zeros(batch, 64), lambda out, x: out.sum()"
    name = write_module("a_users_model", text, tmp_path, monkeypatch)
    assert main(["plan", f"{name}:tiny", "--batch", "4", "--fsdp", "8:float32"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one of 8 ranks, which keep shards in float32 of parameters, gradients and optimizer state" in text
    assert main(["plan", f"{name}:tiny", "--fsdp", "2", "--largest", "batch", "--hbm-budget", "1MiB"]) == 0


def test_a_budget_is_a_size_or_a_share_and_the_hosts_is_of_all_ranks_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "gpu.json", tmp_path / "plan.json"
    path.write_text(json.dumps({**GPU, "hbm_bytes": 2 * GIB}))
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 20 * GIB)

    def planned(*more: str) -> dict[str, Any]:
        command = ["plan", "gpt2", "--seq", "256", "--batch", "8", "--gpu", str(path), "--no-recompute", "--json", str(out)]
        assert main([*command, *more]) == 0, capsys.readouterr()
        told: dict[str, Any] = json.loads(out.read_text())
        return told

    for given, expected in (
        (["--host-budget", "30%"], 6 * GIB),
        (["--host-budget", "0.3", "--host-memory", "10GiB"], 3 * GIB),
        (["--host-budget", "30%", "--host-memory", "10GiB", "--local-ranks", "4"], 3 * GIB // 4),
        (["--host-budget", "4GiB", "--local-ranks", "4"], GIB),
        (["--host-budget", "auto"], 10 * GIB),
        (["--host-memory", "8GiB", "--local-ranks", "2"], 2 * GIB),
        (["--local-ranks", "2"], None),
    ):
        assert planned(*given)["host_budget_bytes"] == expected
    for share in ("75%", "0.75"):
        assert planned("--hbm-budget", share)["hbm_budget_bytes"] == 3 * GIB // 2
    one, four = (planned("--hbm-budget", "1.9GiB", "--host-budget", "2GiB", "--local-ranks", ranks) for ranks in ("1", "4"))
    assert one["smallest_budget_bytes"] < four["smallest_budget_bytes"]
    assert four["ways"][1]["host_bytes"] <= GIB // 2 < one["host_budget_bytes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", {**GPU, "hbm_gbps": None}], ["hbm_gbps as a number"]),
        (["--gpu", {**GPU, "watts": 3}], ["watts is unknown"]),
        (["--gpu", {**GPU, "hbm_gbps": "fast"}], ["hbm_gbps as a number", "'fast'"]),
        (["--gpu", {"name": "X"}], ["hbm_bytes is missing"]),
        (["--gpu", []], ["name is missing"]),
        (["--gpu", "absent.json"], ["absent.json"]),
        (["--gpu", {**GPU, "fp32_tflops": -1}], ["above 0, got -1"]),
        (["--gpu", {**GPU, "h2d_gbps": float("nan")}], ["h2d_gbps above 0, got nan"]),
        (["--gpu", {**GPU, "h2d_gbps": True}], ["h2d_gbps as a number"]),
        (["--fsdp", "3"], ["--fsdp", "divides", "got 3"]),
        (["--local-ranks", "0"], ["--local-ranks", "1 or more", "got 0"]),
        (["--fsdp", "1"], ["--fsdp", "2 or more", "'1'"]),
        (["--fsdp", "8:int8"], ["--fsdp", "'8:int8'"]),
        (["--fsdp", "2", "--swap-optimizer"], ["--fsdp", "leave those out"]),
        (["--checkpointing", "0"], ["--checkpointing", "1 or more", "'0'"]),
        (["--checkpointing", "some"], ["--checkpointing", "fit, selective", "'some'"]),
        (["--checkpointing", "--largest", "batch"], ["--checkpointing", "leave those out"]),
        (["--lora", "0"], ["--lora", "'0'"]),
        (["--lora", "8:"], ["--lora", "'8:'"]),
        (["--lora", "8:nothing"], ["--lora", "qkv", "'nothing'"]),
        (["--lora", "8", "--quantise", "3bit"], ["--quantise: expected one of 4bit, 8bit, got '3bit'"]),
        (["--hbm-budget", "1.2"], ["--hbm-budget", "1.2"]),
        (["--hbm-budget", "101%"], ["--hbm-budget", "at most 1 or 100 %", "'101%'"]),
        (["--host-budget", "101%"], ["--host-budget", "at most 1 or 100 %", "'101%'"]),
        (["--host-budget", "1.2", "--host-memory", "1GiB"], ["--host-budget", "'1.2'"]),
        (["--host-budget", "30%", "--host-memory", "0"], ["--host-budget", "'30%'", "none that is known"]),
        (["--host-memory", "30%"], ["--host-memory", "'30%'"]),
        (["--batch", "two"], ["--batch", "int", "'two'"]),
        (["--fdsp", "3"], ["--fdsp"]),
        (["--quantise", "4bit"], ["--quantise", "--lora"]),
    ],
)
def test_bad_options_are_one_line_and_exit_with_2(
    arguments: list[Any], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(next((told for told in arguments if not isinstance(told, str)), None)))
    assert main(["plan", "gpt2", *(told if isinstance(told, str) else str(path) for told in arguments)]) == 2
    captured = capsys.readouterr()
    assert [word for word in words if word not in captured.err] == []
    assert captured.out == ""
    assert captured.err.count("\n") == 1
