"""Trains a Llama with Liger's kernels in place of its norms, embeddings of positions, feed-forwards and loss, without us and with.

TRITON_INTERPRET=1 python -m tests._liger         # writes JSON: what differs, and whether kernels ran
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import triton.language as language
import triton.runtime.interpreter as interpreter
from liger_kernel.transformers import apply_liger_kernel_to_llama
from torch import nn

from tests._frameworks import Program, check_same
from tests._plain_models import language as predicting
from tests._plain_models import llama
from tests.observed import observe_all

launched: list[Any] = []


def fused() -> nn.Module:
    model = llama(1)()
    apply_liger_kernel_to_llama(model=model)
    return model


def converted(argument: Any) -> Any:
    """An argument as kernels get it: the interpreter leaves a float as Python's, which has no `.to` as a compiled kernel's has."""
    if not isinstance(argument, float):
        return convert(argument)
    return language.tensor(interpreter.TensorHandle(np.array([argument], np.float32), language.float32), language.float32)


convert = interpreter._implicit_cvt


def main() -> None:
    interpreter._implicit_cvt = converted
    launch = interpreter.GridExecutor.__call__

    def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(executor.fn.__name__)
        return launch(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted
    torch.set_num_threads(1)
    observe_all()
    program = Program(fused, predicting(2, 8), steps=4)
    plain, _ = program(None)
    kernels = sorted(set(launched))

    def swapped(budget: str) -> Any:
        outcome, swap = program(budget)
        return outcome, swap.report()

    report = check_same(plain, swapped, 60, program.steps)
    print(json.dumps({"kernels": kernels, "out": report.bytes_swapped_out, "steps": report.steps}))


if __name__ == "__main__":
    main()
