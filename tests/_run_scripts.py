"""Scripts for `chameleon-mm run`, and processes that run them: plainly by Python, and by the command."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from chameleon_mm.device.sim import SimDevice
from chameleon_mm.swap.calibration import replayable_on

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a process."""

    code: int
    out: str
    err: str

    @property
    def own_err(self) -> str:
        """Lines of stderr that the script itself wrote: without the report, and without the line about the simulated GPU."""
        lines = self.err.partition("chameleon-mm run: ")[0].splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("chameleon_mm: no CUDA found: simulating"))


def environment(**more: str) -> dict[str, str]:
    """The environment of scripts: the library of this checkout, and one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **more}


def python(arguments: Sequence[str], folder: Path, stdin: str = "") -> Ended:
    """Run `python arguments` in `folder`, with no other code of ours than `arguments` name."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment(), input=stdin, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


_FORKS = """
import json, os, sys
for number, code in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if not pid:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{sys.argv[2]}/{number}.{name}", os.O_WRONLY | os.O_CREAT, 0o600), fd)
        sys.argv[1:] = []
        break
    status = os.waitpid(pid, 0)[1]
    with open(f"{sys.argv[2]}/{number}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(status)))
else:
    os._exit(0)
exec(code)
"""


def forks(begin: str, codes: Mapping[str, str], folder: Path, notes: Path) -> dict[str, Ended]:
    """Run each of `codes` in `folder`, in a process of its own: a fork of one that has run `begin`, which imports what takes
    long."""
    notes.mkdir()
    subprocess.run(
        [sys.executable, "-c", begin + _FORKS, json.dumps(list(codes.values())), str(notes)],
        cwd=folder, env=environment(), stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    ended = {}
    for number, name in enumerate(codes):
        code, out, err = ((notes / f"{number}.{what}").read_text(encoding="utf-8") for what in ("code", "out", "err"))
        ended[name] = Ended(int(code), out, err)
    return ended


def ready_to_fork() -> None:
    """Do what the first session of a process does and what all forks share: import dynamo, and find out in two seconds which
    products give the same bits each time. One thread runs those, and none is left: a fork may use any."""
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    replayable_on(SimDevice())


def runs(cases: Mapping[str, Sequence[str]], folder: Path, notes: Path, *, train: bool = True) -> dict[str, Ended]:
    """Run `chameleon-mm run arguments` for each of `cases`, which may `train`, in `folder`, each in a process of its own."""
    begin = "import sys, chameleon_mm.tools.cli, chameleon_mm.tools.run_command, tests.observed; tests.observed.observe_all()"
    if train:
        begin += "; from tests import _run_scripts; _run_scripts.ready_to_fork()"
    codes = {name: f"sys.exit(chameleon_mm.tools.cli.main({['run', *arguments]!r}))" for name, arguments in cases.items()}
    return forks(begin, codes, folder, notes)


EVERYTHING = """
import argparse, atexit, copy, pickle, sys, warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import beside  # a module beside the script


@dataclass
class Batch:
    x: torch.Tensor


class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((128,), float(index))


def collate(rows):
    return Batch(torch.stack(rows).repeat(256, 1) + torch.randn(4 * 256, 128))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    print(options, sys.argv[1:], beside.NAME, __name__, __file__, __spec__, __package__)
    print(sorted(name for name in globals() if name.startswith("__")), sys.path[0], sys.stdin.read())
    print(type(pickle.loads(pickle.dumps(Batch(torch.ones(1))))) is Batch, sys.modules["__main__"].Batch is Batch)
    warnings.warn("the script's own", DeprecationWarning)
    atexit.register(print, "at exit")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.no_grad():
        print(model(torch.ones(4, 128)).sum().item())  # evaluation first
    average = copy.deepcopy(model)
    for context in ("fork", "spawn"):
        for batch in DataLoader(Numbers(), 4, collate_fn=collate, num_workers=1, multiprocessing_context=context):
            for part in batch.x.chunk(2):  # micro-batches
                loss = model(part).square().mean()
                loss.backward()
            print(loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            average = copy.deepcopy(model)
    with open(options.out, "wb") as file:
        torch.save(model, file)
    with open(options.out + ".state", "wb") as file:
        torch.save([average.state_dict(), optimizer.state_dict(), torch.get_rng_state()], file)
    open("unclosed.txt", "w").write("flushed at the end")
    sys.exit(7)


if __name__ == "__main__":
    main()
"""
"""A script that looks at what it is run as, loads data in forked and spawned workers, trains, and writes files."""

ENDINGS = {
    "status": "import sys; print('out'); sys.exit(300)",
    "no status": "import sys; sys.exit()",
    "text": "import sys; sys.exit('words')",
    "error": """
def f():
    raise ValueError("deep")

try:
    f()
except ValueError as error:
    raise KeyError("shallow") from error
""",
    "syntax": "x = = 1",
    "interrupt": """
import atexit
atexit.register(print, "at exit")
file = open("left.txt", "w")
file.write("x")
raise KeyboardInterrupt
""",
    "at once": "import os; os._exit(5)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "own hook": "import sys\nsys.excepthook = lambda *told: print('hooked', told[0].__name__)\n1 / 0",
    "thread": """
import threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
""",
    "child": """
import os, sys
if not os.fork():
    sys.exit(4)
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
}
"""Scripts without torch, by how they end."""

VARIANTS = """
import os, signal, sys, threading, warnings
import torch
import torch.nn.functional as F
from torch import nn


def net():
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))


def train(model, steps=5, call=None, parameters=None):
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = (call or model)(torch.randn(1024, 128)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def plain():
    return train(net())


def gan():
    made, judge = net(), net()
    of_made, of_judge = torch.optim.Adam(made.parameters(), lr=1e-4), torch.optim.Adam(judge.parameters(), lr=1e-4)
    for step in range(5):
        fake = made(torch.randn(512, 128))
        loss = judge(torch.randn(512, 128)).mean() - judge(fake.detach()).mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        of_made.zero_grad()
        judge(fake).square().mean().backward()
        of_made.step()
    return [*made.parameters(), *judge.parameters()]


def thread():
    found = []
    other = threading.Thread(target=lambda: found.extend(train(net())))
    other.start()
    other.join()
    return found


def functional():
    weights = nn.ParameterList([nn.Parameter(torch.randn(128, 128) / 8) for _ in range(4)])
    def call(x):
        for weight in weights:
            x = F.gelu(F.linear(x, weight))
        return x
    return train(weights, steps=7, call=call)


def checkpointed():
    from torch.utils.checkpoint import checkpoint
    model = net()
    return train(model, call=lambda x: checkpoint(model, checkpoint(model, x, use_reentrant=False).tanh(), use_reentrant=False))


def compiled_in_place():
    model = net()
    model.compile(backend="aot_eager")
    return train(model, steps=7)


def own_session():
    import chameleon_mm as cm
    model = net()
    with cm.SwapSession("6MiB", model=model, min_bytes="64KiB") as session:
        def call(x):
            return model(x)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            with session.step():
                model(torch.randn(1024, 128)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    print(session.report().bytes_swapped_out > 0)
    return list(model.parameters())


def foreign_hooks():
    with torch.autograd.graph.save_on_cpu():
        return train(net())


def interrupted():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(5):
        loss = model(torch.randn(1024, 128)).square().mean()
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("the interrupt did not come")


def in_backward():
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(5):
        model(torch.randn(1024, 128)).square().mean().backward()
    return list(model.parameters())


def traced():
    model = net()
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    train(torch.jit.script(net()), steps=1)
    torch.jit.trace(model, torch.randn(4, 128))
    torch.export.export(model, (torch.randn(4, 128),))
    return train(model)


def transforms():
    model = net()
    train(model, steps=2)
    given = dict(model.named_parameters())
    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, x).square().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        found = torch.func.grad(loss)({name: p.detach() for name, p in given.items()}, torch.randn(1024, 128))
        model(torch.randn(1024, 128)).square().mean().backward()
        for name, p in given.items():
            p.grad += found[name]
        optimizer.step()
        optimizer.zero_grad()
    return list(given.values())


def own_session_later():
    import chameleon_mm as cm
    model = net()
    train(model, steps=2)
    model(torch.randn(1024, 128)).square().mean().backward()
    with cm.SwapSession("6MiB", model=model, min_bytes="64KiB") as session:
        for step in range(3):
            with session.step():
                train(model, steps=1)
    return list(model.parameters())


def failing():
    model = net()
    train(model)
    model(torch.ones(3, 5))


def no_training():
    with torch.no_grad():
        print(net()(torch.ones(2, 128)).shape)
    return []


if __name__ == "__main__":
    for name in sys.argv[2:]:
        torch.manual_seed(1)
        torch.set_num_threads(1)
        values = globals()[name]()
        torch.save([v.detach() for v in values], f"{sys.argv[1]}_{name}.pt")
        print(name, [v.detach().double().sum().item() for v in values])
"""
"""Ways to train, each a function of a script that is given the beginning of its files' names and which of them to run."""

TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (48, 32))]
arguments = TrainingArguments(output_dir="out", use_cpu=True, max_steps=6, per_device_train_batch_size=4, eval_strategy="steps",
                              gradient_accumulation_steps=2, eval_steps=3, save_strategy="no", report_to=[], disable_tqdm=True,
                              logging_strategy="no")
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, eval_dataset=rows[:8])
print(trainer.train().training_loss)
print(trainer.evaluate()["eval_loss"])
torch.save(trainer.model.state_dict(), sys.argv[1] + ".pt")
"""

RANKS = """
import os, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(4):
    with model.no_sync():
        model(torch.randn(1024, 128)).square().mean().backward()
    loss = model(torch.randn(1024, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save([p.detach() for p in model.parameters()], f"{sys.argv[1]}{rank}.pt")
os.write(1, f"{rank} {loss.item()}\\n".encode())
dist.destroy_process_group()
"""
