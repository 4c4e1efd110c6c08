"""Made-up steps for the planner: the shape of a decoder's training step, with as many operators as asked for.

layer_chain(LayerShape(...), layers)       a dense decoder: what its layers save, how long their operators take
pipeline_chain(LayerShape(...), 8, 4)      the same for micro-batches in GPipe's order: all forwards, then all backwards
step_of(operators)                         any number of operators, 25 saved storages and 150 hook calls in each 1000

No model is run. Times are FLOPs over a sustained rate, and bytes over the memory's: what a plan comes to is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from chameleon_mm.plan.trace import StepPhase, TensorKind, Trace, TraceBuilder
from chameleon_mm.units import MIB

FORWARD, BACKWARD, OPTIMIZER = StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER

SAVED_PER_1000, HOOKS_PER_1000 = 25, 150
"""Counts per 1,000 operators of a dense decoder in eager mode, over forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Decoder layer on one GPU. The defaults are those of a 7B model, with two bytes a value."""

    tokens: int = 4096
    hidden: int = 4096
    ffn: int = 11008
    flops_per_us: float = 400e6
    """Sustained by matrix products."""
    bytes_per_us: float = 3.5e6
    """Sustained by everything else, of device memory."""

    def parts(self) -> list[tuple[str, float, int]]:
        """Forward's operators: name, microseconds, bytes saved."""
        row, wide = 2 * self.tokens * self.hidden, 2 * self.tokens * self.ffn
        square = 2.0 * self.tokens * self.hidden * self.hidden / self.flops_per_us
        mlp = 2.0 * self.tokens * self.hidden * self.ffn / self.flops_per_us
        attention = 2.0 * self.tokens * self.tokens * self.hidden / self.flops_per_us  # causal: half of both products
        norm, gate = 3 * row / self.bytes_per_us, 3 * wide / self.bytes_per_us
        return [
            ("norm", norm, row), ("query", square, row), ("key", square, row), ("value", square, row),
            ("attention", attention, row), ("output", square, row), ("norm", norm, row),
            ("gate", mlp, wide), ("up", mlp, wide), ("silu", gate, wide), ("product", gate, wide), ("down", mlp, row),
        ]  # fmt: skip


def layer_chain(shape: LayerShape, layers: int) -> Trace:
    """Step in which each operator of each layer saves its result. Backward takes twice as long and runs in reverse."""
    return pipeline_chain(shape, 1, layers)


def pipeline_chain(shape: LayerShape, micro_batches: int, layers: int) -> Trace:
    """Variant of `layer_chain` with `micro_batches` of the shape: all forwards, then all backwards in the same order."""
    step = _Step(start_bytes=64 * MIB)
    parts = shape.parts() * layers
    for _ in range(micro_batches):
        for name, us, nbytes in parts:
            step.forward(name, us, nbytes)
    for first in range(0, micro_batches * len(parts), len(parts)):
        for place, (name, us, _) in reversed(list(enumerate(parts))):
            step.backward(name, 2 * us, first + place)
    return step.finish()


def step_of(operators: int) -> Trace:
    """Step of `operators` operators, with as many hooks and saved storages as a dense decoder has for that number."""
    step = _Step(start_bytes=64 * MIB)
    saves = max(1, operators * SAVED_PER_1000 // 1000)
    others = operators * HOOKS_PER_1000 // 1000 - 2 * saves
    fillers = operators - 2 * saves
    done = 0
    for i in range(2 * saves):
        while done < (i + 1) * fillers // (2 * saves):
            step.filler(hooked=(done + 1) * others // fillers > done * others // fillers, forward=i < saves)
            done += 1
        if i < saves:
            step.forward("product", 8.0 + i % 7, (2 + i % 5) * MIB)
        else:
            step.backward("product", 16.0)
    return step.finish()


class _Step:
    """Step being built: its saved storages that were not used yet."""

    def __init__(self, start_bytes: int) -> None:
        self._builder = TraceBuilder(start_bytes=start_bytes)
        self._builder.tensor(start_bytes, TensorKind.PARAMETER, born=-1)
        self._saved: list[int] = []
        self._held: list[int] = []
        """Saved storages whose writer or next reader has not ended."""
        self._fresh: list[int] = []
        """Saved, and no hook came since."""

    def forward(self, name: str, us: float, nbytes: int) -> None:
        b = self._builder
        made = b.tensor(nbytes, TensorKind.ACTIVATION)
        b.op(f"aten::{name}", FORWARD, us, reads=self._saved[-1:], writes=(made,))
        self._release()
        b.save(made)
        self._sendable()
        self._fresh.append(made)
        self._held.append(made)
        self._saved.append(made)

    def backward(self, name: str, us: float, which: int = -1) -> None:
        """`which`: index of a saved storage. Default: the last unused one; after a default, only defaults may follow."""
        b = self._builder
        used = self._saved[which] if which >= 0 else self._saved.pop()
        self._release()
        b.use(used)
        self._sendable()
        b.op(f"aten::{name}_backward", BACKWARD, us, reads=(used,))
        b.dies(used)

    def filler(self, *, hooked: bool, forward: bool) -> None:
        """Add an operator of 1 us whose result dies after it and, if `hooked`, a hook call without a storage."""
        b = self._builder
        made = b.tensor(MIB)
        b.op("aten::view", FORWARD if forward else BACKWARD, 1.0, writes=(made,))
        b.dies(made)
        if hooked and forward:
            b.save(-1)
            self._sendable()
        elif hooked:
            b.use(-1)
            self._sendable()

    def finish(self) -> Trace:
        return self._builder.finish(fingerprint=1)

    def _release(self) -> None:
        while self._held:
            self._builder.released(self._held.pop())

    def _sendable(self) -> None:
        while self._fresh:
            self._builder.sendable(self._fresh.pop(), self._builder.num_hooks - 1)
