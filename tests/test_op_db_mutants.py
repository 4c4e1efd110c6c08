"""The sweep of torch's operators fails for wrong results, on any CPU, regardless of its rounding."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import chameleon_mm as cm
from chameleon_mm.device import Device, operators
from chameleon_mm.device import operators as op_call
from chameleon_mm.swap.handles import Handle
from tests import _op_sweep
from tests._fakes import Unwatched
from tests._op_samples import OPS, run
from tests._op_sweep import (
    IN_SIMULATOR,
    InCompute,
    Swapped,
    SweepingExecutor,
    Way,
    differs_under_a_mode,
    opened,
    plain_varies,
    sweep,
)

pytestmark = pytest.mark.usefixtures("no_gc")


def operator_of(f: Callable[..., Any], x: Tensor) -> Any:
    """An entry of the database for `f`, with one sample."""
    sample = SimpleNamespace(input=x.requires_grad_(), args=(), kwargs={}, output_process_fn_grad=None)
    return SimpleNamespace(
        get_op=lambda: f,
        gradcheck_wrapper=lambda op, *args, **kwargs: op(*args, **kwargs),
        supports_autograd=True,
        supported_backward_dtypes=lambda kind: {x.dtype},
        sample_inputs=lambda *args, **kwargs: [sample],
    )


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> str:
    """Add an operator whose gradient has the strides of its saved tensor."""
    name = "norms of columns"
    monkeypatch.setitem(OPS, name, operator_of(lambda x: torch.linalg.vector_norm(x.t(), 1, dim=0), torch.randn(4, 6)))
    return name


def swept(name: str, make: Callable[[], Way], dtype: torch.dtype = torch.float32) -> int:
    with opened({"it": make}) as ways:
        return sweep(name, ways, dtypes=(dtype,), samples=2, twice=0)


# --- rules that were taken away


def test_the_rule_that_asks_for_a_composite_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a chain of operators rounds after each of them, a kernel of one's own once."""
    kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setattr(operators, "composite_on", lambda name, _: kernel(name, "CompositeImplicitAutograd"))
    with pytest.raises(AssertionError, match=r"nn_functional_silu, torch.bfloat16, sample \d, it: neither what eager gives"):
        swept("nn_functional_silu", lambda: InCompute(cm.SimDevice), torch.bfloat16)


def test_lazy_bits_forgotten_inside_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not conjugated: wrong in the first digit."""
    monkeypatch.setattr(op_call, "may_have_lazy_bits", lambda tensors: False)
    with pytest.raises(
        AssertionError, match=r"linalg_pinv, torch.complex128, sample 0, it: what a bare dispatch mode gives, but"
    ):
        swept("linalg_pinv", lambda: InCompute(cm.SimDevice), torch.complex128)


def test_a_formula_of_torchs_own_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op_sweep, "OTHER_UNDER_A_MODE", {})
    with pytest.raises(AssertionError, match="but of an operator that is not listed"):
        swept("ormqr", lambda: InCompute(cm.SimDevice))


def test_an_operator_that_is_listed_for_nothing() -> None:
    assert not differs_under_a_mode("tanh", (torch.float32, torch.complex128), at_most=3)


# --- executors with a fault


class FlipsOneBit(SweepingExecutor):
    """The sign's: nothing rounds it away."""

    def use(self, handle: Handle) -> Tensor:
        wrong = super().use(handle).detach().clone()
        wrong.view(torch.int32).bitwise_xor_(torch.iinfo(torch.int32).min)
        return wrong


class LosesStrides(SweepingExecutor):
    def use(self, handle: Handle) -> Tensor:
        return super().use(handle).contiguous()


class NeverLetsGo(SweepingExecutor):
    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.handles: list[Handle] = []

    def save(self, t: Tensor) -> Handle:
        self.handles.append(super().save(t))
        return self.handles[-1]


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        (FlipsOneBit, "not what eager gives"),
        (LosesStrides, "not what eager gives"),
        (NeverLetsGo, "blocks of host memory live on"),
    ],
)
def test_a_faulty_executor(faulty: type[SweepingExecutor], said: str, norms: str) -> None:
    assert swept(norms, lambda: Swapped(Unwatched)) == 1
    way = Swapped(Unwatched, faulty)
    with pytest.raises(AssertionError, match=f"{norms}, torch.float32, sample 0, it: .*{said}"):
        swept(norms, lambda: way)
    if isinstance(way.executor, NeverLetsGo):
        way.executor.handles.clear()  # while its pool is there


# --- the sweep itself


def test_every_way_that_swaps_moves_what_is_saved(norms: str) -> None:
    """Or it would compare eager with eager."""
    with opened(IN_SIMULATOR) as ways:
        assert sweep(norms, ways, dtypes=(torch.float32,), samples=1, twice=1)
        assert {label for label, way in ways.items() if way.moved_bytes()} == set(IN_SIMULATOR) - {"compute", "recorded"}


def test_a_session_records_and_follows_a_plan(norms: str) -> None:
    with opened({"session": IN_SIMULATOR["session"]}) as ways:
        assert sweep(norms, ways, dtypes=(torch.float32,), samples=1, twice=0)
        (way,) = ways.values()
        report = way.session.report()  # type: ignore[attr-defined]  # of this way
        assert (report.detailed_steps, report.plan_cache_hits) == (1, 1)


def test_what_eager_does_not_give_again_is_found() -> None:
    drawn = iter(range(100))
    unsteady = operator_of(lambda x: x * next(drawn), torch.ones(3))
    steady = operator_of(lambda x: x * 3, torch.ones(3))
    for op, varies in ((unsteady, True), (steady, False)):
        (sample,) = op.sample_inputs()
        assert plain_varies(op, sample, run(op, sample), twice=False) is varies
