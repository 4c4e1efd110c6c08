"""A call that `ShapesAlone` knows by its kind gives what torch's own fake tensors give: shapes, strides, dtypes, storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from chameleon_mm.tools.shape_operators import ShapesAlone

Program = Callable[[], Any]


def given() -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty(4, 6), torch.empty(3, 6, dtype=torch.bfloat16).t(), torch.empty(4, 6, dtype=torch.bool)


def of_views() -> Any:
    a, b, _ = given()
    return a, a.t(), a[1:, ::2], a.view(2, 12).unflatten(1, (3, 4)), b.t().contiguous(), a.split(2), a.detach(), a.unbind(1)


def of_products() -> Any:
    a, b, _ = given()
    return a @ b.float(), torch.nn.functional.linear(b.t(), b.t()), a.sum(1, keepdim=True), a.max(dim=0), a.to(torch.float16)


def of_numbers() -> Any:
    _, _, c = given()
    return c + 1, c + True, torch.arange(0.0, 3.0, 0.5), torch.arange(0.0, 3.0, 0.25), c.float().softmax(0)


def of_writes() -> Any:
    a, b, c = given()
    a.add_(1).mul_(2)[2:].zero_()
    b.t_().transpose_(0, 1)
    a.mul_(a)
    same = torch.ops.aten.mul_.Tensor(a, torch.empty(4, 6))
    torch._foreach_add_([a, b], 1)
    return a, b, c, same, torch._foreach_mul([a, b], 2), a.contiguous(), torch.empty(3).resize_(2, 5)


def of_values() -> Any:
    one = torch.tensor(3.0)
    one += 1
    return one.item(), torch.ones(()) * one, (one * 2).item()


def told(out: Any) -> list[Any]:
    """What is known of the leaves of `out`, with the place of the first that shares each storage."""
    found: list[Any] = []
    storages: dict[int, int] = {}
    for i, t in enumerate(tree_leaves(out)):
        if not isinstance(t, Tensor):
            found.append(t)
            continue
        storage = t.untyped_storage()
        shared = storages.setdefault(storage._cdata, i)
        form = type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device
        found.append((*form, storage.nbytes(), shared, t._is_view()))
    return found


@pytest.mark.parametrize("program", [of_views, of_products, of_numbers, of_writes, of_values])
def test_it_gives_what_torchs_own_fake_tensors_give(program: Program) -> None:
    with FakeTensorMode():
        expected = told(program())
    with ShapesAlone():
        assert [told(program()) for _ in range(3)] == [expected] * 3


def test_a_known_call_does_not_ask_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    whole = FakeTensorMode._dispatch_impl

    def noted(self: FakeTensorMode, func: Any, *args: Any) -> Any:
        asked.append(str(func))
        return whole(self, func, *args)

    monkeypatch.setattr(FakeTensorMode, "_dispatch_impl", noted)
    with ShapesAlone():
        of_products()
        assert asked
        asked.clear()
        of_products()
    assert asked == []


def test_values_are_missing_as_in_torchs_own() -> None:
    with ShapesAlone():
        for _ in range(2):
            with pytest.raises(DataDependentOutputException):
                torch.empty(3).sum().item()


def test_another_default_dtype_is_another_kind() -> None:
    with ShapesAlone():
        wide = torch.ones(4)
        torch.set_default_dtype(torch.bfloat16)
        try:
            narrow = torch.ones(4)
        finally:
            torch.set_default_dtype(torch.float32)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
