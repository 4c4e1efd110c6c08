"""Names of modules on the stack: right for nested, shared and unknown ones, and looking changes nothing."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chameleon_mm.record.recorder import ModuleNames


class Asks(nn.Module):
    """Record its name as given by the stack."""

    def __init__(self, names: list[ModuleNames]) -> None:
        """`names`: one, once there is a model to name modules of."""
        super().__init__()
        self.names = names
        self.said: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.said.append(self.names[0].here().module)
        return x


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]  # torch does not say what a module returns


def test_a_module_has_its_path_in_the_model_or_in_what_runs_it() -> None:
    names: list[ModuleNames] = []
    asks = Asks(names)
    model, x = nn.Sequential(nn.Identity(), Holder(Holder(asks))), torch.ones(1)
    names[:] = [ModuleNames(model)]
    model(x)
    model[1](x)  # called without the model around it
    assert asks.said == ["1.inner.inner", "1.inner.inner"]
    names[:] = [ModuleNames(nn.Linear(1, 1))]  # of another model
    Holder(asks)(x)
    names[:] = [ModuleNames(None)]
    nn.Sequential(Holder(asks))(x)
    Holder(asks)(x)
    asks(x)
    assert asks.said[2:] == ["inner", "0.inner", "inner", "Asks"]
    assert ModuleNames(None).here().module == ModuleNames(nn.Linear(1, 1)).here().module == ""


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_named_in_both_runs(reentrant: bool) -> None:
    names: list[ModuleNames] = []
    asks = Asks(names)
    block = nn.Sequential(nn.Identity(), Holder(asks), nn.Linear(2, 2), nn.Tanh())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=reentrant)  # type: ignore[no-any-return]  # nor this

    model = Model()
    names.append(ModuleNames(model))
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert asks.said == ["block.1.inner"] * 2


@pytest.mark.usefixtures("no_gc")
def test_looking_keeps_no_tensor_and_no_module_alive() -> None:
    names: list[ModuleNames] = []
    gone: list[bool] = []
    seen: list[weakref.ref[Tensor]] = []

    class Rebinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.asks = Asks(names)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            seen.append(weakref.ref(y))
            self.asks(y)
            y = y + 1
            gone.append(seen[-1]() is None)
            return y

    model = nn.Sequential(Rebinds())
    names.append(ModuleNames(model))
    model(torch.ones(1))
    assert gone == [True]
    watched = weakref.ref(model)
    del model
    assert watched() is None
    hooks = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
    assert not any(hooks)


def test_the_line_is_the_programs_own() -> None:
    """The line is that of the innermost frame that is neither torch's nor of compiled code: here the module's forward."""
    names, said = ModuleNames(None), list[str]()

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
                return x.exp()

    def save(t: Tensor) -> Tensor:
        said.append(names.here().line)
        return t

    x = torch.ones(1, requires_grad=True)
    nn.Sequential(Own())(x)
    assert len(said) == 1 and said[0].startswith("test_module_names.py:")
