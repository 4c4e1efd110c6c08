"""Trains a Llama with Liger's norms, embeddings of positions, feed-forwards and loss, without us and with.

    TRITON_INTERPRET=1 python -m tests._liger

Writes JSON: the kernels that ran, and what was swapped. Fails if a bit differs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from liger_kernel.ops import rms_norm
from liger_kernel.transformers import apply_liger_kernel_to_llama
from torch import nn
from triton import language
from triton.runtime import interpreter

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
    """An argument as kernels get it. The interpreter leaves a float as Python's, without the `.to` that a compiled one has."""
    if not isinstance(argument, float):
        return convert(argument)
    return language.tensor(interpreter.TensorHandle(np.array([argument], np.float32), language.float32), language.float32)


convert = interpreter._implicit_cvt


def reciprocal_root(x: Any) -> Any:
    return language.rsqrt(x)  # looked up while a kernel runs: the interpreter has replaced it


def main() -> None:
    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = reciprocal_root  # libdevice's is not for the interpreter
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

    report = check_same(plain, swapped, 270, program.steps)
    sys.stdout.write(json.dumps({"kernels": kernels, "bytes_swapped_out": report.bytes_swapped_out}))


if __name__ == "__main__":
    main()
