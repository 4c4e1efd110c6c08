"""Other libraries' offloading inside a session: torch's `save_on_cpu` is a hint, others of activations are refused by name.

model without offload, in plain PyTorch   ==   model with offload=True, in a session, within the budget
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import checkpoint

import chameleon_mm as cm
from chameleon_mm.record.dispatch_state import saved_tensor_hooks_on_top
from chameleon_mm.units import KIB
from tests._plain_models import llama

pytestmark = pytest.mark.usefixtures("no_gc")

STEPS = 4


@pytest.fixture(autouse=True)
def _torchs_own_is_back() -> Iterator[None]:
    yield
    cm.uninstall()


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


class Offloads(nn.Module):
    """`save_on_cpu` around each checkpoint, as in Hugging Face's `activation_checkpointing_enable(offload=True)`."""

    def __init__(self, inner: nn.Module, *, offload: bool, checkpointed: bool = True) -> None:
        super().__init__()
        self.inner, self.offload = inner, offload
        self.call = partial(checkpoint, inner, use_reentrant=False) if checkpointed else inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu() if self.offload else nullcontext():
            y: Tensor = self.call(x)
            return y


WAYS: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "around checkpoints": lambda one, offload: Offloads(one, offload=offload),
    "around modules": lambda one, offload: Offloads(one, offload=offload, checkpointed=False),
    "torch's wrapper": lambda one, offload: offload_wrapper(one) if offload else one,
    "Accelerate's, with FSDP": lambda one, offload: (offload_wrapper if offload else nn.Sequential)(checkpoint_wrapper(one)),
    "one in another": lambda one, offload: Offloads(Offloads(one, offload=offload), offload=offload, checkpointed=False),
}


def train(
    way: str, *, offload: bool, session: cm.SwapSession | None = None, device: cm.SimDevice | None = None
) -> list[Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(*(WAYS[way](block(), offload) for _ in range(12)))
    batches = [torch.randn(2048, 64) for _ in range(STEPS)]
    losses = []
    with session or (device.compute() if device else nullcontext()):
        for x in batches:
            with session.step() if session else nullcontext():
                loss = model(x).square().mean()
                loss.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(p.grad * 0.1 if p.grad is not None else 0)
                        p.grad = None
                losses.append(loss.item())
    return [torch.tensor(losses), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.ci
@pytest.mark.parametrize("installed", [False, True], ids=["torch's", "ours in its place"])
@pytest.mark.parametrize("way", WAYS)
def test_offload_true_is_within_the_budget_where_offload_false_is(way: str, installed: bool) -> None:
    plain = cm.SimDevice()
    train(way, offload=False, device=plain)
    expected = train(way, offload=False)
    if installed:
        cm.install(device="sim")
    reports = []
    for offload in (False, True):
        session = cm.SwapSession(plain.peak_allocated_bytes() * 7 // 8, "64MiB", cm.SimDevice(), min_bytes=4 * KIB)
        got = train(way, offload=offload, session=session)
        assert all(map(torch.equal, expected, got))
        reports.append(session.report())
        assert session.pool.stats().num_live == 0
    without, hinted = reports
    assert (without.budget_held, hinted.budget_held) == (True, True)
    assert hinted.steps_by_phase == without.steps_by_phase
    assert hinted.steps_by_phase["planned"] > 0
    assert hinted.bytes_swapped_out == without.bytes_swapped_out > 0
    assert hinted.problems == ()


@pytest.mark.skipif(not hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable"), reason="an older one")
def test_hugging_faces_offload_is_a_hint() -> None:
    seen: list[Tensor] = []
    for offload in (None, False, True):
        torch.manual_seed(5)
        model: Any = llama(2)()
        model.activation_checkpointing_enable(offload=bool(offload))
        session = None if offload is None else cm.SwapSession("64MiB", "64MiB", cm.SimDevice(), min_bytes=256)
        ids = torch.arange(32).reshape(2, 16)
        with session or nullcontext(), session.step() if session else nullcontext():
            model(input_ids=ids, labels=ids).loss.backward()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert session is None or (session.report().bytes_swapped_out > 0 and session.report().problems == ())
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_hooks_that_are_entered_again_after_the_session_are_their_own() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    hooks = torch.autograd.graph.save_on_cpu()
    session = cm.SwapSession("64MiB", "64MiB", cm.SimDevice(), min_bytes=256)
    own = vars(saved_tensors_hooks).copy()
    with session:
        top = saved_tensor_hooks_on_top()
        with hooks:
            assert saved_tensor_hooks_on_top() == top
        with saved_tensors_hooks(lambda t: t, lambda t: t):  # not for offloading: they act, as ever
            assert saved_tensor_hooks_on_top() != top
            with hooks:
                assert saved_tensor_hooks_on_top() == (hooks.pack_hook, hooks.unpack_hook)
    with hooks:
        assert saved_tensor_hooks_on_top() == (hooks.pack_hook, hooks.unpack_hook)
        y = (x * 2).exp()
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad((x * 2).exp().sum(), x)[0])
    assert vars(saved_tensors_hooks) == own or set(vars(saved_tensors_hooks)) == set(own)


class OffloadActivations(saved_tensors_hooks):
    """Stands for TRL's and torchtune's of this name, which ask for an accelerator: the same base class, entered as they are."""

    def __init__(self) -> None:
        super().__init__(lambda t: t.clone(), lambda t: t)


def test_offload_activations_is_refused_before_a_step_and_works_without_a_session() -> None:
    model = block()
    refused = pytest.raises(ValueError, match=r"got tests\.test_other_offloading\.OffloadActivations, which moves the same")
    with cm.attach(model, device=cm.SimDevice()) as handle, refused, OffloadActivations():
        model(torch.randn(8, 64)).sum().backward()
    assert handle.report().steps == 0
    assert saved_tensor_hooks_on_top() is None
    with OffloadActivations():
        model(torch.randn(8, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# --- DeepSpeed's checkpoints on the host. These have the attributes that are read of it

CONFIG = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}


def by_transformers(config: Any) -> None:
    swap = cm.integrations.transformers.SwapCallback(device=cm.SimDevice())
    args = SimpleNamespace(hf_deepspeed_config=SimpleNamespace(config=config))
    swap.on_train_begin(args, object(), None, optimizer=None, model=block())
    swap.detach()


def by_lightning(config: Any) -> None:
    swap = cm.integrations.lightning.SwapCallback(device=cm.SimDevice())
    trainer = SimpleNamespace(strategy=SimpleNamespace(config=config), optimizers=[])
    swap.on_train_start(trainer, block())
    swap.on_train_end(trainer, None)


def by_accelerate(config: Any) -> None:
    accelerator = cm.integrations.accelerate.accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(block())
    plugin = SimpleNamespace(deepspeed_config=config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(accelerator.state), "deepspeed_plugin", plugin)
        cm.integrations.accelerate.attach(accelerator, model, device=cm.SimDevice()).detach()


@pytest.mark.parametrize("begin", [by_transformers, by_lightning, by_accelerate])
def test_deepspeeds_checkpoints_on_the_host_are_refused_before_training(begin: Callable[[Any], None]) -> None:
    with pytest.raises(ValueError, match="expected cpu_checkpointing=False in DeepSpeed's activation_checkpointing, got True"):
        begin(CONFIG)
    assert saved_tensor_hooks_on_top() is None
    for fine in ({"activation_checkpointing": {"cpu_checkpointing": False}}, {"zero_optimization": {"stage": 2}}, None):
        begin(fine)
