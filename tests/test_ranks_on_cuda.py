"""Data parallel and sharded training of two ranks, each with a session of its own: every rank has the bits it has without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
import torch

from tests._ranks import LAYERS, WIDTH
from tests.cuda_stand_in import control

RANKS = 2
PARAMETER_BYTES = 4 * LAYERS * (8 * WIDTH * WIDTH + 5 * WIDTH)


def outputs(ranks: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Return the output of all ranks. The first that fails ends the others, which would wait for it."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        ends = {threads.submit(rank.communicate): rank for rank in ranks}
        try:
            next((end for end in as_completed(ends) if ends[end].returncode), None)
        finally:
            for rank in ranks:
                rank.kill()
        return [end.result() for end in ends]


@pytest.mark.gpu
@pytest.mark.timeout(3000)  # of a test that hangs
@pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp_offload"])
def test_each_rank_has_the_bits_that_it_has_without_swapping(way: str, tmp_path: Path) -> None:
    """Uses gloo: the stand-in does not have NVIDIA's library NCCL."""
    if not control.is_loaded() and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests._ranks", str(rank), str(tmp_path / "meeting"), way],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "CUDA_STAND_IN_DEVICES": str(RANKS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for rank, (out, error) in zip(ranks, outputs(ranks), strict=True):
        assert rank.returncode == 0, error
        said = re.search(
            r"^same bits, (.*) bytes swapped out, (.*) violations, (.*) bytes out by itself, (.*) back$", out, re.MULTILINE
        )
        assert said is not None, out
        swapped_bytes, violations, out_bytes, back_bytes = map(int, said.groups())
        assert swapped_bytes > 0
        assert violations == 0
        # FSDP2 moves its shard of each parameter to the device twice, forward and backward, and its shard of each gradient out.
        shards = PARAMETER_BYTES // RANKS if way == "fsdp_offload" else 0
        assert out_bytes >= shards and back_bytes >= 2 * shards
        assert out_bytes + back_bytes < 4 * shards + 1024  # besides: the losses
