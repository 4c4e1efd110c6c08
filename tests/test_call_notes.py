"""Call notes in C++ note what the watch in Python notes, and make way for it where they cannot.

story(watch, program)     # how each storage that the program returns was made: calls, arguments, writes, back to what was there
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from chameleon_mm.device import Device, native, resolve_device
from chameleon_mm.plan.trace import BirthPlace
from chameleon_mm.record import call_notes
from chameleon_mm.record import calls as kernel_settings
from chameleon_mm.record.call_notes import AnyWatch, CallNotes, watch_calls
from chameleon_mm.record.calls import Argument, CallWatch, Value, map_leaves
from tests._fakes import Unwatched
from tests._mixes import Mix, Proofs, executor_of, mixed, totals_of
from tests._native import helper, unnoted
from tests._programs import on_a_thread
from tests._run_scripts import python

Program = Callable[[], list[Tensor]]


@pytest.fixture(autouse=True)
def notes(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = helper("notes", monkeypatch)
    monkeypatch.setattr(call_notes, "frames_compiled", lambda: 0)
    return module


def nothing(value: Value) -> None:
    pass


@pytest.fixture
def watched() -> Iterator[AnyWatch]:
    with watch_calls(Unwatched(), nothing) as watch:
        yield watch
    watch.end()


# --- the same as the watch


def story(watch: AnyWatch, program: Program) -> list[Any]:
    """Return the notes of `watch` on each tensor that `program` returns. Operators whose names differ below a mode are one."""
    torch.manual_seed(3)
    with watch:
        results = program()
    seen: dict[int, int] = {}

    def told(value: Value | None) -> Any:
        if value is None:
            return None
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
        known = value.nbytes, value.writes, value.is_latest, value.result
        if value.call is None:
            return known
        operation = value.call.operation
        state = None if operation.random_state is None else operation.random_state[1].tolist()
        made = operation.func.name(), operation.grad_enabled, operation.settings, operation.made_bytes, state
        if value.call.args is None:
            return *known, *made
        args, kwargs = (map_leaves(given, Argument, lambda one: (told(one.value), one.geometry)) for given in value.call[1:])
        return *known, *made, *by_name(operation.func, args, kwargs)

    stories = [told(watch.value_of(t.untyped_storage())) for t in results]
    watch.end()
    return stories


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that are not the default ones. A dtype, a layout and a format are numbers below autograd."""
    schema = func._schema.arguments
    given = {**{one.name: value for one, value in zip(schema, args, strict=False)}, **kwargs}
    of = {one.name: one for one in schema}
    kinds = torch.dtype, torch.layout, torch.memory_format, torch.Generator
    told = []
    for name, value in given.items():
        default = of[name].default_value if of[name].has_default_value() else None
        is_kind = isinstance(value, kinds) or name in ("dtype", "layout", "memory_format", "generator")
        if not is_kind and value is not None and value != default:
            told.append((name, value))
    return sorted(told, key=lambda one: one[0])


def block() -> list[Tensor]:
    x = torch.randn(4, 6, 16, requires_grad=True)
    w, b = torch.randn(16, 48), torch.randn(48)
    q, k, v = torch.addmm(b, F.layer_norm(x, (16,)).view(24, 16), w).view(4, 6, 3, 16).unbind(2)
    mixed = (q @ k.transpose(1, 2) / 4).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf")).softmax(-1) @ v
    gelu = F.gelu(torch.cat([mixed, x]) * 2.5)
    return [mixed, gelu, gelu.half() * 2.5, torch.arange(6) / 4, gelu.sum((0, 1))]


def in_place() -> list[Tensor]:
    x = torch.randn(8, 8)
    y = x * 2
    y[:4].neg_()
    y.t()[3:5].mul_(0.5)
    many = [x * 1, x * 3]
    torch._foreach_add_(many, [y, y])
    out = torch.empty(8, 8)
    torch.add(x, y, out=out)
    torch.add(out, 1, out=out)
    return [x, y, *many, out, out.clamp_(min=0)]


def at_random() -> list[Tensor]:
    generator = torch.Generator()
    generator.manual_seed(3)
    x = torch.rand(8, 8, generator=generator)
    return [x, torch.empty(8).bernoulli_(0.5, generator=generator), torch.randperm(8), F.dropout(x, 0.3), torch.normal(x)]


def normalised() -> list[Tensor]:
    norm = nn.BatchNorm1d(8)
    return [norm(torch.randn(4, 8) + 1), *(b for b in norm.buffers() if b.dtype == torch.float32)]


def odd_kinds() -> list[Tensor]:
    values = torch.ones(9) * 2
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor(torch.arange(9)[None], values, (9,), is_coalesced=True)
    sparse.mul_(3)
    turned = torch.view_as_complex(torch.randn(4, 2)).conj()
    found = torch.randn(8)[torch.tensor([1, 2])]
    return [values, sparse.to_dense(), turned * turned, torch._neg_view(torch.ones(9) * 2) + 1, found]


def settings() -> list[Tensor]:
    a = torch.randn(8, 8)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    b = torch.arange(3) / 2
    c = a @ a
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        return [b, c, a @ a, torch.arange(3) / 2]


def written_unseen() -> list[Tensor]:
    """Write with modes and notes off, through an alias that is gone afterwards."""
    a, b = torch.randn(8) * 2, torch.randn(8) * 2
    for t in (a, b):
        with _disable_current_modes(), unnoted():
            t.detach().add_(1)
    return [a.sin(), b.sin()]


@pytest.mark.parametrize(
    "program",
    [block, in_place, at_random, normalised, odd_kinds, settings, written_unseen],
    ids=lambda one: one.__name__,
)
def test_what_is_noted_is_what_the_watch_notes(program: Program) -> None:
    expected, got = (story(watch(Unwatched(), nothing), program) for watch in (CallWatch, watch_calls))
    assert got == expected


def test_births_at_the_places_of_a_plan() -> None:
    places = {BirthPlace(1, "aten::mul.Tensor", 2, 0): 7, BirthPlace(1, "aten::_foreach_mul.Scalar", 1, 1): 8}

    def born(watch: AnyWatch) -> list[tuple[int, int]]:
        with watch:
            watch.hold(places)
            x = torch.ones(4) * 2
            watch.at_hook(1)
            y, z = x * 3, x * 4
            torch._foreach_mul([x, y], 2.0)
            del z
            assert [value.call is not None and value.storage() is it for _, value, it in watch.births.born] == [True, True]
            found = [(number, int(torch.empty(0).set_(storage, 0, (4,), (1,))[0])) for number, _, storage in watch.births.born]
            watch.at_hook(2)
            _ = x * 3, x * 4
            assert len(watch.births.born) == 2
        watch.end()
        return found

    assert born(CallWatch(Unwatched(), nothing)) == born(watch_calls(Unwatched(), nothing)) == [(7, 8), (8, 12)]


def test_a_write_to_what_somebody_relies_on_is_told_of_before_and_an_error_then_is_the_writers() -> None:
    told: list[float] = []

    def before_write(value: Value) -> None:
        storage = value.storage()
        assert storage is not None
        told.append(float(torch.empty(0).set_(storage, 0, (4,), (1,))[0]))
        if told[-1] == 5.0:
            raise torch.OutOfMemoryError("of ours")

    for watch in (CallWatch(Unwatched(), before_write), watch_calls(Unwatched(), before_write)):
        with watch:
            x, y, z = torch.ones(4) * 2, torch.ones(4), torch.ones(4) * 5
            for relied_on in (x, z):
                watch.given(relied_on).relied_on().dependents.append(weakref.ref(told.__class__))
            x.sin()
            y.add_(1)
            torch._foreach_add_([y, x.view(2, 2)], 1.0)
            x.detach().add_(1)  # a new value, which no recipe relies on
            with pytest.raises(torch.OutOfMemoryError, match="of ours"):
                z.add_(1)
            assert float(z[0]) == 5
            assert (z * 2).sum() == 40  # goes on
        watch.end()
    assert told == [2.0, 5.0] * 2


@pytest.mark.parametrize("number", range(len(kernel_settings._OF_PRODUCTS)))
def test_each_setting_of_products_is_noted_as_it_changes(number: int) -> None:
    setting = kernel_settings._OF_PRODUCTS[number]
    before = [one.read() for one in kernel_settings._OF_PRODUCTS]
    value = before[number]
    others: list[Any] = [torch._C._BlasBackend.Cublaslt]
    if isinstance(value, bool):
        others = [not value]
    elif isinstance(value, tuple):
        others = [(not value[0], *value[1:])]
    elif isinstance(value, str):
        others = ["ieee", "tf32", "bf16"]
    x, seen = torch.randn(4, 4), 0
    with watch_calls(Unwatched(), nothing) as watch:
        y = x @ x
        for other in others:
            try:
                setting.write(other)
                now = kernel_settings.settings_now(is_product=True)
                z = x @ x
            except RuntimeError:
                continue  # not a value of this one, or of this machine
            finally:
                for one, old in zip(kernel_settings._OF_PRODUCTS, before, strict=True):
                    if one.read() != old:
                        one.write(old)
            calls = [known.call for t in (y, z) if (known := watch.value_of(t.untyped_storage())) is not None]
            assert calls[0] is not None
            assert calls[1] is not None
            assert calls[1].operation.settings == now
            seen += calls[0].operation.settings != now
    watch.end()
    if not seen:
        pytest.skip(f"no other value than {value!r} may be written here")


# --- events without a note


def test_pauses_backwards_and_what_comes_after_the_end_are_not_noted(watched: AnyWatch) -> None:
    x = torch.randn(8, requires_grad=True)
    with watched.paused(), watched.paused():
        aside = x * 2
    seen: list[Tensor] = []
    y = x.exp()
    y.register_hook(lambda g: seen.append(g * 3))
    y.sum().backward()
    for t in (aside, seen[0]):
        assert watched.value_of(t.untyped_storage()) is None
    value = watched.value_of(y.untyped_storage())
    assert value is not None
    assert value.call is not None
    watched.end()
    after = x * 2
    assert watched.value_of(after.untyped_storage()) is None


def test_fake_tensors_are_not_noted(watched: AnyWatch) -> None:
    from torch._subclasses import FakeTensorMode

    assert isinstance(watched, CallNotes)
    with FakeTensorMode():
        fake = torch.ones(4) * 2
    meta = torch.ones(4, device="meta") * 2
    del fake, meta
    assert (torch.ones(4) * 2).sum() == 8
    with FakeTensorMode() as mode:
        other = mode.from_tensor(torch.ones(4)).add_(1)
    assert other.shape == (4,)


def test_other_threads_operators_are_not_noted_and_their_questions_are_answered(watched: AnyWatch) -> None:
    found: list[Any] = []
    x = torch.ones(4) * 2

    def other() -> None:
        y = torch.ones(4) * 3
        known = watched.value_of(x.untyped_storage())
        found.append((watched.value_of(y.untyped_storage()), known is not None and known.call is not None))

    on_a_thread(other)
    assert found == [(None, True)]


def test_questions_of_another_thread_while_operators_run(watched: AnyWatch) -> None:
    x, stop = torch.ones(4) * 2, threading.Event()
    known: list[bool] = []

    def ask() -> None:
        while not stop.is_set():
            value = watched.value_of(x.untyped_storage())
            known.append(value is not None and value.call is not None and value.call.args is not None)

    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(3_000):
        _ = x * number + torch.cat([x, x])[0]
    stop.set()
    thread.join()
    assert all(known)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_notes_nothing(watched: AnyWatch) -> None:
    child = os.fork()
    if child == 0:
        y = torch.ones(4) * 2
        os._exit(0 if watched.value_of(y.untyped_storage()) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.gpu
def test_a_capture_is_not_noted() -> None:
    device = resolve_device("cuda")
    watch = watch_calls(device, nothing)
    assert isinstance(watch, CallNotes)
    with watch:
        x, graph = torch.ones(4, device="cuda") * 2, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        z = x * 2
        assert watch.value_of(y.untyped_storage()) is None
        assert watch.value_of(z.untyped_storage()) is not None
    watch.end()


@pytest.mark.gpu
def test_a_gpus_own_generator_is_noted() -> None:
    watch = watch_calls(resolve_device("cuda"), nothing)
    with watch:
        x = F.dropout(torch.ones(64, device="cuda"), 0.5)
        value = watch.value_of(x.untyped_storage())
        while value is not None and value.call is not None and value.call.operation.random_state is None:
            value = value.call.arguments()[-1].value
    assert value is not None
    assert value.call is not None
    state = value.call.operation.random_state
    assert state is not None
    assert state[0].device.type == "cuda"
    watch.end()


# --- where the watch stands in


def kind_of(device: Device | None = None) -> type:
    watch = watch_calls(device or Unwatched(), nothing)
    kind = type(watch)
    watch.end()
    return kind


def test_the_watch_stands_in_where_notes_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of() is CallNotes
    with watch_calls(Unwatched(), nothing) as outer:
        assert kind_of() is CallWatch  # of another session, within its step
    outer.end()
    assert kind_of() is CallNotes
    monkeypatch.setattr(call_notes, "frames_compiled", lambda: 1)
    assert kind_of() is CallWatch
    monkeypatch.setattr(call_notes, "frames_compiled", lambda: 0)
    monkeypatch.setattr(native, "load", lambda name: None)
    assert kind_of() is CallWatch


TAKEN = """
import logging
from pathlib import Path
import torch
from chameleon_mm.device import native
logging.basicConfig(format="%(message)s")
native.CACHE = Path({cache!r})
other = torch.library.Library("_", "IMPL")
other.fallback(lambda op, *args, **kwargs: None, dispatch_key="Fake")
assert native.load("notes") is native.load("notes") is None
print(native.status("notes"))
"""


def test_a_key_that_somebody_has_is_left_to_them_and_said_once(tmp_path: Path) -> None:
    done = python(["-c", TAKEN.format(cache=str(native.CACHE))], tmp_path)
    why = "does not load: torch, or somebody else, uses the dispatch key Fake"
    assert (done.code, done.out) == (0, f"{why}\n")
    assert done.err == f"chameleon_mm: the C++ helper 'notes' {why}; all works without it\n"


def test_notes_and_values_go_without_the_collector(no_gc: None) -> None:
    session = mixed(Mix(1, drop=1.0, held=0.5, proofs=Proofs.NEVER), device=Unwatched())
    x = torch.randn(64, 64, requires_grad=True)
    refs = []
    with session:
        for _ in range(3):
            with session.step():
                F.dropout((x * 2).sin().exp(), 0.3).tanh().sum().backward()
                watch = executor_of(session).recomputing.watch
                assert isinstance(watch, CallNotes)
                refs.append(weakref.ref(watch))
                del watch
    assert totals_of(session).recomputed > 0
    assert refs[0]() is None
    watch = watch_calls(Unwatched(), nothing)  # never ended explicitly
    with watch:
        value = watch.given(x * 2)
    dropped = weakref.ref(watch)
    del watch, value
    gc.collect()
    assert dropped() is None


def test_a_step_that_recomputes_leaves_the_key_off() -> None:
    session = mixed(Mix(1, drop=1.0, held=0.0, proofs=Proofs.NEVER), device=Unwatched())
    x = torch.randn(64, 64, requires_grad=True)

    def is_on() -> bool:
        return torch._C._dispatch_tls_is_dispatch_key_included("Fake")

    seen: list[bool] = []
    with session:
        with session.step():
            y = (x * 2).sin().exp()
            seen.append(is_on())
            y.register_hook(lambda g: seen.append(is_on()))
            y.tanh().sum().backward()
            seen.append(is_on())
        seen.append(is_on())
        with session.step():
            (x * 2).sin()
            executor_of(session).recording.leave_all()
            seen.append(is_on())
    assert seen[0]
    assert not any(seen[3:]), seen
