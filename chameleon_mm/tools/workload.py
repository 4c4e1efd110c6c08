"""Models whose step can be predicted: built in, or from a user's function.

build: Build = source_of(...)           # checked; nothing built yet
with ShapesAlone():
    workload = build()                  # weights and batch are fake: shapes without memory
    workload.loss().backward()

with told_as("models:tiny failed"):
    models.tiny()                       # ModelUnusable: models:tiny failed: TypeError: ... (models.py:12)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn import functional as F

from chameleon_mm.errors import ChameleonError
from chameleon_mm.tools.demo import GPT, GPTConfig
from chameleon_mm.tools.image_models import IMAGE_MODELS, ImageShape
from chameleon_mm.tools.shape_operators import gpu_autocast
from chameleon_mm.tools.video_models import VIDEO_MODELS, VideoShape

_NO_SUCH_DEVICE = re.compile(r"not (compiled|linked) with", re.IGNORECASE)
"""Pattern of torch's messages about devices that its build lacks. CUDA's name precedes or follows it."""

_MOST_SAID = 300
"""Maximum number of characters shown of another library's message, because some list every valid value."""

_OURS = Path(__file__).resolve().parents[1]
_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Turn any error in the context into a `ModelUnusable` that begins with `what` and gives a remedy, if one is known."""
    try:
        yield
    except ModelUnusable:
        raise
    except (Exception, SystemExit) as error:  # any failure is an answer about the model
        raise ModelUnusable(
            f"{what}: {type(error).__name__}: {said_by(error)}{_line_of_user(error)}{_way_out(error)}"
        ) from error


def like_built_in(text: str, *, cutoff: float) -> str | None:
    """Return the built-in model whose name is most similar to `text`, if at least `cutoff` (0 to 1); else None."""
    return next(iter(difflib.get_close_matches(text.lower(), BUILT_IN, n=1, cutoff=cutoff)), None)


def said_by(error: BaseException) -> str:
    """Message of an error as one line of at most `_MOST_SAID` characters."""
    return textwrap.shorten(str(error).strip().removesuffix("."), _MOST_SAID, placeholder=" ...") or "no message"


def _line_of_user(error: BaseException) -> str:
    """Innermost line of the user's own code in the traceback; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(folder) for folder in (_OURS, *_INSTALLED)):
            return f" ({path.name}:{frame.lineno})"
    return ""


def _way_out(error: BaseException) -> str:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return "; fake tensors have shapes and no values: a step whose operators depend on values cannot be planned ahead"
    if _NO_SUCH_DEVICE.search(str(error)):
        return "; build model and batch on the CPU: nothing is computed, and no GPU is needed"
    return ""


class ModelUnusable(ChameleonError, ValueError):
    """The requested model cannot be found, or cannot be built or run without a GPU and without values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Model and batch of one step. `loss()` runs forward and returns the scalar for backward."""

    about: str
    """Description of the model and its batch."""
    model: nn.Module
    loss: Callable[[], Tensor]
    notes: tuple[str, ...] = ()
    """Notes on the figures, one sentence each."""


Build = Callable[[], Workload]
"""Function that builds a workload on the CPU, in torch's default dtype. Call it under `ShapesAlone`."""


# --- Built-in models, which need only torch: a Llama in plain eager code, and a GPT-2
#
# The Llama has the operators of Hugging Face's. The GPT-2 differs from Hugging Face's, as its notes say (`_GPT2_SAVES`).


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    """Heads of keys and of values, a divisor of `heads`."""
    ffn: int
    """Width inside the SwiGLU."""
    vocabulary: int
    context: int
    """Default number of tokens in a row of its training."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, all but the last product in float32."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; heads / kv_heads heads of q share each head of k and v."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        kv_width = shape.kv_heads * self.head_width
        self.grouped = shape.kv_heads < shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, kv_width, bias=False)
        self.v = nn.Linear(shape.width, kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # [b, s, heads * d] -> [b, heads, s, d]
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Attention, then SwiGLU, each on a normalised copy of the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + cast(Tensor, self.down(F.silu(self.gate(h)) * self.up(h)))


class Llama(nn.Module):
    """`loss` maps ids int64 [b, s] to the mean cross-entropy of each next token, a float32 scalar."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        cos, sin = _rotation(ids.shape[1], self.head_width, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, ids: Tensor) -> Tensor:
        logits = self(ids).float()
        targets = F.pad(ids, (0, 1), value=-100)[:, 1:]  # the last token has no next token
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def _turned(x: Tensor) -> Tensor:
    """Rotate the halves (a, b) of the last dimension by a right angle, to (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotation(seq: int, head_width: int, like: Tensor, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [seq, head_width] each, in the dtype of `like`."""
    rates = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angles = torch.arange(seq, dtype=torch.float32)[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


_gpt2 = partial(GPTConfig, vocabulary=50257, context=1024)
"""Sizes of a GPT-2. Its positions are learned, so it cannot read a row longer than its context."""

BUILT_IN: dict[str, LlamaShape | GPTConfig | ImageShape | VideoShape] = {
    "llama-7b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=32, ffn=11008, vocabulary=32000, context=4096),
    "llama-13b": LlamaShape(layers=40, width=5120, heads=40, kv_heads=40, ffn=13824, vocabulary=32000, context=4096),
    "llama-70b": LlamaShape(layers=80, width=8192, heads=64, kv_heads=8, ffn=28672, vocabulary=32000, context=4096),
    "llama-3-8b": LlamaShape(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, context=8192),
    "gpt2": _gpt2(layers=12, width=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, width=1024, heads=16),
    "gpt2-large": _gpt2(layers=36, width=1280, heads=20),
    "gpt2-xl": _gpt2(layers=48, width=1600, heads=25),
    **IMAGE_MODELS,
    **VIDEO_MODELS,
}
"""Sizes from the papers on Llama 2 (arXiv 2307.09288) and Llama 3 (arXiv 2407.21783), and from GPT-2's configurations."""

_GPT2_SAVES = (
    "this gpt2 has the fused GELU, and its loss in the dtype of its logits; Hugging Face's, with GELU written out and the loss "
    "in float32, saves more"
)


def built_in(name: str, *, batch: int, seq: int | None, layers: int | None = None) -> Build:
    """Builder of the model `name`: `batch` rows of `seq` tokens (None: its context), `layers` layers (None: its own number).
    Rows of an image model are images of one size, of a video model videos.

    Raises `ModelUnusable` for a row that the model cannot read, and for sizes that it does not have.
    """
    found = BUILT_IN[name]
    if isinstance(found, (ImageShape, VideoShape)) and seq is not None:
        raise ModelUnusable(f"--seq: expected none for {name}, each row of which has {found.about}, got {seq}; leave it out")
    if layers is not None and found.layers is None:
        raise ModelUnusable(f"--largest layers: expected a model of equal layers, got {name}; search for the largest batch")
    shape = found if layers is None else replace(found, layers=layers)
    of_layers = f"{name}{'' if layers is None else f' of {layers} layers'}, {batch} x "
    if isinstance(shape, (ImageShape, VideoShape)):
        return partial(_images, shape, batch, of_layers + shape.about)
    tokens = shape.context if seq is None else seq
    if isinstance(shape, GPTConfig) and tokens > shape.context:
        raise ModelUnusable(f"--seq: expected {shape.context} tokens at most, all that {name} can read, got {tokens}")

    def build() -> Workload:
        about = f"{of_layers}{tokens} tokens"
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        if isinstance(shape, LlamaShape):
            llama = Llama(shape)
            return Workload(about=about, model=llama, loss=lambda: llama.loss(ids))
        gpt = GPT(shape)
        return Workload(about=about, model=gpt, loss=lambda: gpt.loss(ids, ids), notes=(_GPT2_SAVES,))

    return build


def _images(shape: ImageShape | VideoShape, rows: int, about: str) -> Workload:
    model, batch = shape.model(), shape.batch(rows)
    return Workload(about=about, model=model, loss=lambda: model.loss(*batch))


# --- User's models: a function returns the model and a batch
#
# A tuple or list is a batch of several arguments, a mapping a batch of keyword arguments, anything else one argument.
# `loss_fn(output, batch)` gets the model's output and the returned batch. It returns the scalar tensor for backward.

_RETURNS = "(model, batch) or (model, batch, loss_fn)"


def own_function(text: str, *, batch: int | None, seq: int | None, layers: int | None = None) -> Build:
    """Builder by the function that `text` names as `module:function`. Its module may be in the working directory.

    The function gets those of `batch`, `seq` and `layers` that are not None. Raises `ModelUnusable` if there is no such
    function or it lacks such a parameter; `build` raises it if the function fails or returns something else.
    """
    function = _find(text)
    given = _arguments(text, function, {"batch": batch, "seq": seq, "layers": layers})

    def build() -> Workload:
        with told_as(f"{text} failed under fake tensors"):
            returned = function(**given)
        model, data, loss_fn = _checked(text, returned)

        def loss() -> Tensor:
            return _scalar(text, _called(model, data), data, loss_fn)

        said = "".join(f", {name} {value}" for name, value in given.items())
        return Workload(about=f"{text}{said}", model=model, loss=loss)

    return build


def _find(text: str) -> Callable[..., Any]:
    module_name, _, function_name = text.partition(":")
    if not module_name or not function_name:
        raise ModelUnusable(f"MODEL: expected module:function, got {text!r}")
    imported = told_as(f"MODEL: expected a module that can be imported, got {module_name!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # `python -m` adds it, a console script does not
    with gpu_autocast(), imported:  # an autocast decorator is made at import
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a {type(function).__name__}"
        raise ModelUnusable(f"MODEL: expected a function {function_name!r} in module {module_name!r}, found {found}")
    return function  # type: ignore[no-any-return]  # a module's attribute has any type


def _arguments(text: str, function: Callable[..., Any], known: Mapping[str, int | None]) -> dict[str, int]:
    parameters = inspect.signature(function).parameters
    for name, value in known.items():
        if value is not None and name not in parameters:
            raise ModelUnusable(f"--{name}: expected {text} to have a parameter {name!r} for it, found none; leave it out")
    given = {name: value for name, value in known.items() if value is not None}
    for name, parameter in parameters.items():
        plain = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if plain and parameter.default is parameter.empty and name not in given:
            say = f"say --{name}" if name in known else "give it a default"
            raise ModelUnusable(f"MODEL: expected all that {text} needs, got nothing for its parameter {name!r}; {say}")
    return given


def _checked(text: str, returned: Any) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise ModelUnusable(f"{text}: expected it to return {_RETURNS}, got {_described(returned)}")
    model, batch, loss_fn = (*returned, None)[:3]
    if not isinstance(model, nn.Module):
        raise ModelUnusable(f"{text}: expected it to return {_RETURNS} with a torch.nn.Module first, got {_described(model)}")
    if loss_fn is not None and not callable(loss_fn):
        raise ModelUnusable(f"{text}: expected loss_fn(output, batch), got {_described(loss_fn)}")
    return model, batch, loss_fn


def _called(model: nn.Module, data: Any) -> Any:
    if isinstance(data, Mapping):
        return model(**data)
    return model(*data) if isinstance(data, (tuple, list)) else model(data)


def _scalar(text: str, output: Any, data: Any, loss_fn: Callable[..., Any] | None) -> Tensor:
    if loss_fn is not None:
        loss = loss_fn(output, data)
    else:
        loss = output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ModelUnusable(
            f"{text}: expected a scalar tensor to go backward from, got {_described(loss)}; return a third value, "
            f"loss_fn(output, batch)"
        )
    return loss


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, requires_grad {value.requires_grad}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
