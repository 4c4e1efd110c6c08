"""Ways to write over a tensor unknown or hardly known to torch, as kernels, extensions and aliases do.

    overwrite(x, new)                   # through pointers: no operator, no version counter; on CUDA in stream order
    OPERATORS.scale_unsaid(x, 0.5)      # an operator whose schema says that it reads x
    OPERATORS.scale_said_(x, 0.5)       # an operator whose schema says that it writes x

Each is as right as what it stands for: in eager PyTorch the bytes are there for the next operator on the same stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICE_TO_DEVICE = 3

LIBRARY = torch.library.Library("relied_on", "FRAGMENT")
LIBRARY.define("scale_unsaid(Tensor x, float by) -> Tensor")
LIBRARY.define("scale_said_(Tensor(a!) x, float by) -> ()")
OPERATORS: Any = torch.ops.relied_on


def overwrite(x: Tensor, new: Tensor) -> None:
    """Copy the bytes of `new` over those of `x`, both dense, without an operator of torch's."""
    assert x.is_contiguous() and new.is_contiguous() and (x.dtype, x.shape) == (new.dtype, new.shape)
    nbytes = x.numel() * x.element_size()
    if x.is_cuda:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        to, source = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(new.data_ptr())
        runtime = ctypes.CDLL("libcudart.so.13")
        code = runtime.cudaMemcpyAsync(to, source, ctypes.c_size_t(nbytes), DEVICE_TO_DEVICE, stream)
        assert code == 0, f"cudaMemcpyAsync answers {code}"
    else:
        ctypes.memmove(x.data_ptr(), new.data_ptr(), nbytes)


def scale(x: Tensor, by: float) -> None:
    """Multiply `x` through its pointer."""
    overwrite(x, (x.detach() * by).contiguous())


def on_another_thread(work: Callable[[], object]) -> threading.Thread:
    """Start `work` on a thread of its own. Torch's modes and hooks are the calling thread's alone."""

    def run() -> None:
        with torch.no_grad():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _scale_unsaid(x: Tensor, by: float) -> Tensor:
    scale(x, by)
    return x.mean()


LIBRARY.impl("scale_unsaid", _scale_unsaid, "CompositeExplicitAutograd")
LIBRARY.impl("scale_said_", scale, "CompositeExplicitAutograd")


@torch.library.custom_op("relied_on::custom_unsaid", mutates_args=())
def custom_unsaid(x: Tensor, by: float) -> Tensor:
    """Write an argument that the schema declares as read."""
    scale(x, by)
    return x.mean()


@torch.library.custom_op("relied_on::custom_said", mutates_args={"x"})
def custom_said(x: Tensor, by: float) -> None:
    """Write an argument that the schema declares as written."""
    scale(x, by)


class Embed(torch.autograd.Function):
    """Product in float16 with a scatter, so its result is never recomputed. Saves `x` alone, which needs no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        product = (x @ w).half()
        return torch.zeros_like(product).index_add_(0, torch.arange(len(x), device=x.device), product)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        return None, x.t() @ grads[0].float()


class ScaleUnmarked(torch.autograd.Function):
    """Writes its input through a pointer and says nothing. Returns a copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        scale(x, by)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.by, None


class ScaleMarked(torch.autograd.Function):
    """Writes its input through a pointer and marks it dirty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        scale(x, by)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.by, None


class Rotary(torch.autograd.Function):
    """Rotates the halves of q and k in place, through pointers, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        for x in (q, k):
            overwrite(x, rotated(x.detach(), cos, sin))
        ctx.mark_dirty(q, k)
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        q, k = (rotated(g, cos, -sin) for g in grads)
        return q, k, None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class AddOver(torch.autograd.Function):
    """residual += x by a pointer, as fused add-and-norm kernels do; the residual is marked dirty where `marked`."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, marked: bool) -> Tensor:
        overwrite(residual, residual.detach() + x.detach())
        if marked:
            ctx.mark_dirty(residual)
            return residual
        return residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], grads[0], None


class FusedCrossEntropy(torch.autograd.Function):
    """Computes its gradient in forward and, where `over`, writes it over the logits, which it then saves."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, over: bool, pointer: bool) -> Tensor:
        logs = torch.log_softmax(logits.detach(), -1)
        gradient = logs.exp()
        rows = torch.arange(len(target), device=target.device)
        gradient[rows, target] -= 1
        gradient /= len(target)
        if over and pointer:
            overwrite(logits, gradient)
        elif over:
            logits.data.copy_(gradient)
        ctx.save_for_backward(logits if over else gradient)
        return -logs[rows, target].mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None


class Gate(torch.autograd.Function):
    """silu(a) * b. If `over`, its backward writes the gradients over its saved tensors: by pointer, or by operators."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, over: bool, pointer: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.over, ctx.pointer = over, pointer
        return torch.nn.functional.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        share = torch.sigmoid(a)
        to_a, to_b = grads[0] * b * (share + a * share * (1 - share)), grads[0] * a * share
        if not ctx.over:
            return to_a, to_b, None, None
        if ctx.pointer:
            overwrite(a, to_a)
            overwrite(b, to_b)
        else:
            with torch.no_grad():
                a.copy_(to_a)
                b.copy_(to_b)
        return a, b, None, None


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)
