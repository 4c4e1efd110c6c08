"""Training of the demo, in plain PyTorch and on a device of the library, and the comparison of its bits.

program = Program(config, rows, where)                  # the same lines with and without swapping
plain = train_plain(config, rows, torch_device)         # every loss and gradient norm, the final weights, the random state
unswapped = train(config, rows, device)
swapped = train(config, rows, device, {"hbm_budget": "20GiB"})
first_difference(plain, swapped.values)
"""

from __future__ import annotations

import gc
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import get_device_states

from chameleon_mm.api.session import SwapSession
from chameleon_mm.device.protocols import Device
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.report.report import SwapReport

# --- Model of the demo: a small GPT over bytes

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of a `GPT`. Raises `ValueError` for a shape that cannot be built."""

    layers: int
    width: int
    heads: int
    """Attention heads; each is `width / heads` wide."""
    context: int
    """Context length of the model in bytes, and length of a training row."""
    vocabulary: int = VOCABULARY
    dropout: float = 0.1
    """Share of values dropped after the embedding and after each residual branch, 0 <= dropout < 1."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if self.width % self.heads:
            raise ValueError(f"width: expected a multiple of heads ({self.heads}), got {self.width}")


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [b, t, 3w] -> three of [b, heads, t, w / heads], views of one storage
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return cast(Tensor, self.out(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Transformer block: attention, then an MLP, each with a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config.width, config.heads, causal=True)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x))))))


class GPT(nn.Module):
    """A GPT, over bytes by default: `forward` maps ids [batch, length], int64, to logits [batch, length, vocabulary].

    Weights are drawn from torch's default generator of `device`: seed it first.
    """

    def __init__(self, config: GPTConfig, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.config = config
        with device or torch.get_default_device():
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Parameter(torch.zeros(config.context, config.width))
            self.dropout = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:  # torch's default for an embedding is too wide for a head with the same weight
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x)))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy per token, in nats (a scalar)."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


Rows = Sequence[tuple[Tensor, Tensor]]


def read_text() -> bytes:
    """Return the contents of the `*.py` files of Python's standard library, in the order of their names."""
    return b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def draw_rows(text: bytes, *, steps: int, batch: int, context: int) -> Rows:
    """`steps` pairs of ids and targets, int64 [batch, context] on the CPU, cut from `text` at random places.

    A separate generator draws the places, so no other random state changes. Raises `ValueError` for fewer than one step or row,
    and for a row longer than the text.
    """
    if steps < 1 or batch < 1:
        raise ValueError(f"--steps, --batch: expected 1 or more, got {steps} steps of {batch} rows")
    if context >= len(text):
        raise ValueError(
            f"--context: expected less than the {len(text)} bytes of *.py files in Python's library, got {context}"
        )
    source = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        row = source[starts + torch.arange(context + 1)].long()
        rows.append((row[:, :-1].contiguous(), row[:, 1:].contiguous()))
    return rows


class Program:
    """Training from a fixed seed, one step for each element of `rows`. Seeds torch's default generators.

    The model is built on the CPU. With `stays` it stays there, for a session that moves it to `where` part by part.
    """

    def __init__(self, config: GPTConfig, rows: Rows, where: torch.device, *, stays: bool = False) -> None:
        torch.manual_seed(0)
        self.model = GPT(config)
        if not stays:
            self.model.to(where)
        # fused: one kernel, on a GPU and on the CPU that the simulator prices. Torch's default on the CPU takes a dozen small
        # operators for each parameter: launching those would dominate a simulated step of a small model.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._where, self._rows = where, rows
        self._values: dict[str, Tensor] = {}

    def place(self) -> None:
        """Copy all rows to the device before the first step: a copy from pageable memory makes the host wait."""
        # copy=True: the simulator's device is the CPU, and a row must become device memory there too.
        self._rows = [(ids.to(self._where, copy=True), targets.to(self._where, copy=True)) for ids, targets in self._rows]

    def step(self, number: int) -> None:
        """Enqueue step `number`, from 0 on."""
        loss = self.model.loss(*self._rows[number])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Kept on the device: reading a value here would make the host wait, which would hide the host's cost of swapping.
        self._values |= {f"loss of step {number + 1}": loss.detach(), f"gradient norm of step {number + 1}": norm}

    def values(self) -> dict[str, Tensor]:
        """Copy every value that the steps so far computed to the CPU, by name and in order. The host waits for the device."""
        weights = {f"weight {name}": weight for name, weight in self.model.state_dict().items()}
        values = {name: value.detach().to("cpu", copy=True) for name, value in (self._values | weights).items()}
        states = (torch.get_rng_state(), *get_device_states(next(self.model.parameters()))[1])
        names = ("CPU", "device")
        return values | {f"random state of the {name}'s generator": state for name, state in zip(names, states, strict=False)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of one run."""

    values: Mapping[str, Tensor]
    """`Program.values()` after the last step."""
    step_us: list[float]
    """Time of each step on the compute stream, by device events (simulated time on the simulator)."""
    peak_bytes: int
    """Peak of device memory, before and during the steps."""
    report: SwapReport | None

    def to_dict(self) -> dict[str, Any]:
        """Dictionary of the figures and the losses, ready for JSON."""
        losses = [value.item() for name, value in self.values.items() if name.startswith("loss")]
        return {"step_us": self.step_us, "peak_bytes": self.peak_bytes, "losses": losses}


def train_plain(config: GPTConfig, rows: Rows, where: torch.device) -> Mapping[str, Tensor]:
    """Train in eager PyTorch on `where`, without the library. Returns the reference values for the swapped run.

    Uses torch's deterministic kernels, as every run of the demo does.
    """
    with reproducible():
        program = Program(config, rows, where)
        program.place()
        for number in range(len(rows)):
            program.step(number)
        return program.values()


def train(config: GPTConfig, rows: Rows, device: Device, swap: Mapping[str, Any] | None = None) -> RunResult:
    """Train on `device`, one step per element of `rows`, in a `SwapSession(**swap)` if `swap` is given.

    With `parameters="swap"` the optimizer's state moves, too; of the model, only the part in use is on the device. Resets the
    device's peaks. Raises what the session raises, and `torch.OutOfMemoryError` if the run does not fit.
    """
    stays = swap is not None and swap.get("parameters") == "swap"
    gc.collect()  # a reference cycle in torch may keep the last run's optimizer and model alive
    device.reset_peaks()
    with reproducible():
        with nullcontext() if stays else device.compute():  # tensors made within it are the device's
            program = Program(config, rows, device.torch_device, stays=stays)
        with device.compute():
            program.place()
            optimizer = program.optimizer if stays else None
            session = None if swap is None else SwapSession(device=device, model=program.model, optimizer=optimizer, **swap)
            marks = [device.current_stream().record(timed=True)]
            with session or nullcontext():
                for number in range(len(rows)):
                    with nullcontext() if session is None else session.step():
                        program.step(number)
                    marks.append(device.current_stream().record(timed=True))
                peak_bytes = device.peak_allocated_bytes()  # before the session's end, which brings all swapped tensors back
        device.synchronize()
    return RunResult(
        values=program.values(),  # outside compute(): the simulator must not count these copies
        step_us=[end.elapsed_us(start) for start, end in pairwise(marks)],
        peak_bytes=peak_bytes,
        report=None if session is None else session.report(),
    )


def first_difference(reference: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """Return a line that names the first value in which `other` differs from `reference` by a bit; None if none does.

    Bits are compared, not numbers: two NaNs of the same bits are equal, 0.0 and -0.0 are not.
    """
    for name in dict.fromkeys((*reference, *other)):
        a, b = reference.get(name), other.get(name)
        if a is None or b is None:
            return f"{name}: only in the {'second' if a is None else 'first'} run"
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{name}: {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
        one, two = (tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (a, b))  # a row of bytes per value
        if differing := (one != two).any(dim=1).nonzero().flatten().tolist():
            return f"{name}: {len(differing)} of {a.numel()} values differ, the first at flat index {differing[0]}"
    return None
