"""What people put around a model to tune it on several ranks: peft's adapters under FSDP2, and DeepSpeed. Run once for each rank.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests._rank_stack FOLDER fsdp_lora
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from tests._rank_programs import ROWS, Training, batch, blocks, loss_of, sharded
from tests._rank_runs import main
from tests.observed import observe_all


class Tuned(Training):
    """A model of which the adapters are trained."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in super().parameters() if p.requires_grad)


def fsdp_lora() -> Training:
    model: Any = blocks().requires_grad_(False)
    return Tuned(sharded(inject_adapter_in_model(LoraConfig(r=4, target_modules=["up", "down"]), model), reshard=True))


PROGRAMS = {"fsdp_lora": fsdp_lora}


if __name__ == "__main__":
    observe_all()
    main(sys.argv[1], sys.argv[2:], PROGRAMS)
