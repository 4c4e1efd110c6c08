"""Records the traces of `bench/traces`: what training steps save for backward, and when they let go of it.

    with FakeTensorMode(): model at full size; for each step: with recorder.hooks(): loss = ...; loss.backward()
    on_save: a storage not yet held -> ["+", block, nbytes]       the last handle on it goes -> ["-", block]

    python3 -m chameleon_mm.bench.pinned.record --out bench/traces

Nothing is scaled: shapes are those of the real model, on fake tensors, which have storages and lifetimes and no bytes. A block
is one storage, whole, of every size, parameters and leaves excepted, as the executor holds them; operators are the CPU's. What
no fake tensor can know is recorded from what is real: lengths are those of functions and classes in Python's own library, and
tokens are routed by the gates of a narrow mixture of experts that trains on the same files.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.nn import functional as F

from chameleon_mm.bench._environment import versions
from chameleon_mm.bench._llama import Block, Rope, Shape
from chameleon_mm.bench.pinned.models import GPT, GPTShape, MoE, MoEShape, ResNet50
from chameleon_mm.bench.pinned.traces import STEP, Entry, Trace, write_trace
from chameleon_mm.units import format_size

_BF16 = torch.bfloat16


class _Claim:
    """One held storage: alive as long as autograd holds a handle on a tensor of it."""

    def __init__(self, recorder: Recorder, block: int) -> None:
        self._recorder = recorder
        self._block = block

    def __del__(self) -> None:
        self._recorder.entries.append(Entry(block=self._block))


class _Handle:
    __slots__ = ("claim", "tensor")

    def __init__(self, claim: _Claim | None, tensor: Tensor) -> None:
        self.claim = claim
        self.tensor = tensor


class Recorder:
    """Writes down what the hooks see."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._born = 0
        self._claims: weakref.WeakValueDictionary[int, _Claim] = weakref.WeakValueDictionary()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: forward and backward go inside."""
        self.entries.append(Entry(block=STEP))
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda handle: handle.tensor):
            yield

    def _save(self, t: Tensor) -> _Handle:
        moves = not (isinstance(t, Parameter) or isinstance(t._base, Parameter) or (t.is_leaf and t.requires_grad))
        return _Handle(self._claim(t.untyped_storage()) if moves and t.untyped_storage().nbytes() else None, t)

    def _claim(self, storage: torch.UntypedStorage) -> _Claim:
        # By the storage's own address: a handle holds a tensor of it, so nobody else has that address while the claim lives.
        claim = self._claims.get(storage._cdata)
        if claim is None:
            claim = self._claims[storage._cdata] = _Claim(self, self._born)
            self.entries.append(Entry(block=self._born, nbytes=storage.nbytes()))
            self._born += 1
        return claim


def llama(recorder: Recorder) -> str:
    """Fixed shapes: four equal steps of two micro-batches each."""
    shape = Shape(layers=32, width=4096, heads=32, ffn=14336, seq=4096, batch=1, dtype="bfloat16")
    rope = Rope(shape.seq, shape.width // shape.heads)
    rope.cos, rope.sin = rope.cos.to(_BF16), rope.sin.to(_BF16)
    blocks = [Block(shape) for _ in range(shape.layers)]
    for _ in range(4):
        with recorder.step():
            for _ in range(2):
                x, target = (torch.empty(shape.batch, shape.seq, shape.width) for _ in range(2))
                for block in blocks:
                    x = block(x, rope)
                F.mse_loss(x.float(), target.float()).backward()
    return "Llama-like, 32 layers, width 4096, ffn 14336, bf16; 4 steps of 2 micro-batches of 1 row of 4096 tokens"


def varlen(recorder: Recorder) -> str:
    """Variable lengths: eight rows a micro-batch, padded to the longest, each as long as a definition in Python's library."""
    longest, rows, steps = 2048, 8, 8
    shape = GPTShape()
    model = GPT(shape, longest)
    lengths = random.Random(0).choices(_definition_bytes(), k=2 * rows * steps)
    for _ in range(steps):
        with recorder.step():
            for _ in range(2):
                # Four bytes a token, as tokenizers of source code come to; cut where the model's context ends.
                length = min(longest, max(1, max(lengths.pop() for _ in range(rows)) // 4))
                tokens, targets = (torch.zeros(rows, length, dtype=torch.long) for _ in range(2))
                model.loss(tokens, targets).backward()
    return (
        f"GPT-2 large ({shape.layers} layers, width {shape.width}, dropout), bf16; {steps} steps of 2 micro-batches of {rows} "
        f"rows, padded to the longest of them, at most {longest} tokens; lengths: definitions in Python's library"
    )


def moe(recorder: Recorder, routed: Sequence[Sequence[Sequence[int]]], tokens: int) -> str:
    """Sizes that follow the data: how many tokens each expert gets is `routed[step][layer][expert]`."""
    shape = MoEShape()
    model = MoE(shape)
    for counts in routed:
        with recorder.step():
            x, target = (torch.empty(tokens, shape.width) for _ in range(2))
            model.loss(x, target, counts).backward()
    return (
        f"Mixtral-like, {shape.layers} layers, width {shape.width}, {shape.chosen} of {shape.experts} experts of {shape.ffn}, "
        f"bf16; {len(routed)} steps of {tokens} tokens; routed as the gates of a narrow model in training did"
    )


def resnet(recorder: Recorder) -> str:
    """Many sizes, fixed: the end of an epoch of ImageNet, whose last batch is smaller, and the start of the next."""
    model = ResNet50()
    batches = (256, 256, 1_281_167 % 256, 256, 256)
    for batch in batches:
        with recorder.step():
            model.loss(torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)).backward()
    return f"ResNet-50, bf16, 224 x 224 pixels; {len(batches)} steps of {', '.join(map(str, batches))} images"


def routing(shape: MoEShape, tokens: int, steps: int) -> list[list[list[int]]]:
    """Tokens for each expert, `[step][layer][expert]`, by the gates of a real model of width 32 that trains meanwhile.

    It reads bytes of Python's source files and predicts the next one; its layers, experts and tokens are those of `shape`.
    """
    text = torch.tensor(list(b"".join(path.read_bytes() for path in _sources()[:60])), dtype=torch.long)
    model = _NarrowMoE(shape)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    drawn = random.Random(0)
    answer = []
    for _ in range(steps):
        start = drawn.randrange(len(text) - tokens - 1)
        loss, counts = model(text[start : start + tokens], text[start + 1 : start + tokens + 1])
        answer.append(counts)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return answer


class _NarrowMoE(nn.Module):
    def __init__(self, shape: MoEShape, width: int = 32) -> None:
        super().__init__()
        self.shape = shape
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.mix, self.gates = (
            nn.ModuleList(nn.Linear(width, out, bias=False) for _ in range(shape.layers)) for out in (width, shape.experts)
        )
        self.experts = nn.ParameterList(torch.randn(shape.experts, width, width) / width**0.5 for _ in range(shape.layers))

    def forward(self, text: Tensor, following: Tensor) -> tuple[Tensor, list[list[int]]]:
        x = self.embed(text)
        counts = []
        for mix, gate, experts in zip(self.mix, self.gates, self.experts, strict=True):
            x = x + torch.tanh(mix(x.roll(1, 0)))  # a look at the token before
            weights, chosen = gate(x).softmax(-1).topk(self.shape.chosen)
            counts.append(torch.bincount(chosen.flatten(), minlength=self.shape.experts).tolist())
            outcomes = torch.tanh(torch.einsum("tw,ewv->tev", x, experts))
            picked = outcomes.gather(1, chosen[..., None].expand(-1, -1, x.shape[1]))
            x = x + (picked * weights[..., None]).sum(1)
        return F.cross_entropy(self.head(x), following), counts


def _sources() -> list[Path]:
    """The modules of the running Python's standard library, without its tests."""
    library = Path(random.__file__).parent
    return sorted(path for path in library.glob("*.py") if path.stat().st_size)


def _definition_bytes() -> list[int]:
    """Bytes of each function and class at the top of those modules."""
    trees = (ast.parse(path.read_bytes()) for path in _sources())
    kinds = (ast.FunctionDef, ast.ClassDef)
    named = (node for tree in trees for node in tree.body if isinstance(node, kinds))
    return [len(ast.unparse(node).encode()) for node in named]


def record(name: str, write: Callable[[Recorder], str]) -> Trace:
    """The trace that `write` leaves in a recorder, on fake tensors; it returns what the trace is about."""
    recorder = Recorder()
    usual = torch.get_default_dtype()
    torch.set_default_dtype(_BF16)  # models are born in it: casting their fake parameters afterwards is not supported
    try:
        with FakeTensorMode():
            about = write(recorder)
    finally:
        torch.set_default_dtype(usual)
    return Trace(name=name, about=about, entries=tuple(recorder.entries), versions=versions())


def main(arguments: Sequence[str] | None = None) -> int:
    """Record every trace into `--out`."""
    parser = argparse.ArgumentParser(prog="python3 -m chameleon_mm.bench.pinned.record", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder for the traces")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    tokens, steps = 8192, 6
    routed = routing(MoEShape(), tokens, steps)
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = {"llama": llama, "varlen": varlen, "moe": lambda recorder: moe(recorder, routed, tokens), "resnet": resnet}
    for name, write in jobs.items():
        trace = record(name, write)
        target = args.out / f"{name}.jsonl.gz"
        write_trace(target, trace)
        peak = format_size(trace.peak[0])
        console.print(f"{name}: {len(trace.sizes)} blocks, peak {peak}, {format_size(target.stat().st_size)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
