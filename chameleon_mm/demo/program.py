"""The training that the demo runs: plain PyTorch, the same lines whatever is around them.

    seed; model; AdamW; rows to the device
    step:     training:    forward; backward; clip the gradient; optimizer step; gradients dropped
              evaluation:  forward
    numbers:  every loss, every gradient norm, the final weights and the random state, on the CPU

    11 steps, rows of 8192 bytes:    5 of 8192 bytes    an evaluation    3 of 4096 bytes    2 of 8192 bytes

`train` runs it on a device of the library, swapped or not; `train_plain` runs it with nothing of the library around it. The
sequence of steps changes in the middle, as it does where rows differ in length or a model is evaluated.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states

from chameleon_mm.demo.model import GPT, GPTConfig
from chameleon_mm.device.reproducible import reproducible
from chameleon_mm.errors import ChameleonError
from chameleon_mm.units import MIB

TEXT_BYTES = 2 * MIB
"""Bytes of text that are read: a few epochs' worth for a demo, and no wait for the disk."""


class NoTextFound(ChameleonError, ValueError):
    """A folder has no text to train on, or less than one row of it."""


def read_text(folder: Path | None = None, *, limit_bytes: int = TEXT_BYTES) -> bytes:
    """The `*.py` files of `folder` in the order of their names, joined and cut at `limit_bytes`.

    `folder` None means the standard library of the running Python. Raises `NoTextFound` (a `ValueError`) where there is
    none, as in a Python that keeps its library in a zip file.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        if size >= limit_bytes:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if size == 0:
        raise NoTextFound(f"text: expected *.py files with text in {folder}, found none; name another with --text")
    return b"".join(parts)[:limit_bytes]


def draw_batches(text: bytes, *, steps: int, batch: int, context: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """`steps` pairs of ids and targets, int64 [batch, context] on the CPU, cut from `text` at random places.

    The places come from a generator of their own, so that drawing them moves no other random state. Raises `NoTextFound`
    for a text shorter than one row.
    """
    if len(text) <= context:
        raise NoTextFound(
            f"text: expected more than {context} bytes (a row of --context), got {len(text)}; name another --text"
        )
    source = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    rows = []
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        row = source[starts + offsets].long()
        rows.append((row[:, :-1].contiguous(), row[:, 1:].contiguous()))
    return rows


Rows = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """Steps of one kind run the same operators on the same shapes."""

    length: int
    """Bytes per row."""
    training: bool = True
    """Whether it trains; else an evaluation: forward alone, without a graph."""

    @property
    def name(self) -> str:
        return f"{self.length:,} bytes" if self.training else "evaluation"


def schedule(steps: int, context: int) -> tuple[StepKind, ...]:
    """The kinds of `steps` steps: half of them on whole rows, an evaluation, half of the rest on half rows, then whole ones.

    Fewer than five leave the evaluation out, fewer than three the half rows too.
    """
    whole, half = StepKind(length=context), StepKind(length=max(1, context // 2))
    first = max(1, steps // 2)
    rest = steps - first
    evaluations = [StepKind(length=context, training=False)] if rest > 2 else []
    halves = rest // 2
    return (*[whole] * first, *evaluations, *[half] * halves, *[whole] * (rest - len(evaluations) - halves))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of one run; the text is given apart. Raises `ValueError` for what cannot be run."""

    model: GPTConfig
    steps: int
    batch: int
    """Rows per step."""
    seed: int = 0
    """Seed of weights, dropout and rows."""
    lr: float = 1e-3
    max_norm: float = 1.0
    """The gradient is scaled down to this norm where it is longer."""
    built_on_host: bool = False
    """Whether the model is built on the CPU, whatever it is trained on: a session may move it, and never all of it is there."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed: expected 0 to 2**63 - 1, got {self.seed}")
        if not 0.0 < self.lr < float("inf"):
            raise ValueError(f"lr: expected a finite rate above 0, got {self.lr}")

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        """Kinds of the steps, in order."""
        return schedule(self.steps, self.model.context)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Numbers that a training computed. Tensors are on the CPU."""

    kinds: tuple[StepKind, ...]
    """Kinds of the steps, in order."""
    losses: Tensor
    """[steps], in the loss's own dtype."""
    grad_norms: Tensor
    """[training steps], before clipping."""
    weights: dict[str, Tensor]
    """Every parameter and buffer after the last step."""
    random_states: tuple[Tensor, ...]
    """State of the CPU's generator and of the device's, after the last step."""


class Program:
    """A training from `config.seed` on `where`, one step for each element of `rows`.

    Seeds torch's default generators. Raises `ValueError` for another number of rows than of steps.
    """

    def __init__(self, config: TrainConfig, rows: Rows, where: torch.device, *, on_host: bool = False) -> None:
        """`on_host`: the model is built on the CPU and stays there, for a session that moves it; `place` places the rows."""
        torch.manual_seed(config.seed)
        self._config = config
        self._where = where
        built = torch.device("cpu") if config.built_on_host else where
        self.model = GPT(config.model, device=built)
        if not on_host:
            self.model.to(where)
        # fused: one kernel, on a GPU and on the CPU that the simulator prices. By default torch would take a dozen small
        # operators for every parameter there, and a simulated step of a small model would be about launching those.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, fused=True)
        self._rows = list(zip(config.kinds, rows, strict=True))
        self._batches: list[tuple[StepKind, Tensor, Tensor]] = []
        self._losses: list[Tensor] = []
        self._grad_norms: list[Tensor] = []

    def place(self) -> None:
        """Copy all rows to the device."""
        # Before the first step, for a copy out of pageable memory makes the host wait. copy=True: the simulator's device is
        # the CPU, and a row must become device memory there too.
        self._batches = [
            (kind, _to_device(ids, kind, self._where), _to_device(targets, kind, self._where))
            for kind, (ids, targets) in self._rows
        ]

    def step(self, number: int) -> None:
        """Enqueue the step of that number, from 0 on. All of them in order are the training."""
        kind, ids, targets = self._batches[number]
        if kind.training:
            loss = self.model.loss(ids, targets)
            loss.backward()
            self._grad_norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), self._config.max_norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            loss = self._evaluate(ids, targets)
        # Kept on the device: reading a loss here would make the host wait and hide what swapping costs it.
        self._losses.append(loss.detach())

    def numbers(self) -> Numbers:
        """Numbers that the steps so far computed. The host waits for them."""
        return Numbers(
            kinds=self._config.kinds,
            losses=torch.stack([_to_host(loss) for loss in self._losses]),
            grad_norms=torch.stack([_to_host(norm) for norm in self._grad_norms]),  # the first step is always a training one
            weights={name: _to_host(value) for name, value in self.model.state_dict().items()},
            random_states=(torch.get_rng_state(), *get_device_states(next(self.model.parameters()))[1]),
        )

    def _evaluate(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            loss = self.model.loss(ids, targets)
        self.model.train()
        return loss


def train_plain(config: TrainConfig, rows: Rows, where: torch.device, *, on_step: Callable[[], None] = lambda: None) -> Numbers:
    """The training in eager PyTorch on `where`, with nothing of the library around it: what every other run is judged by.

    torch's deterministic kernels are used, as in every run of the demo. Raises what `Program` and torch raise.
    """
    with reproducible():
        program = Program(config, rows, where)
        program.place()
        for number in range(config.steps):
            program.step(number)
            on_step()
        return program.numbers()


def _to_device(rows: Tensor, kind: StepKind, where: torch.device) -> Tensor:
    """The first bytes of each row, as many as steps of this kind have."""
    return rows[:, : kind.length].contiguous().to(where, copy=True)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
