"""A model of torch's caching allocator on one stream, and the replay of a plan through it.

    CachingAllocator(expandable=False)      # segments of their own sizes, as by default
    CachingAllocator(expandable=True)       # one growing segment for each pool
    replay(trace, plan, allocator)          # allocator.reserved_bytes: the most that it takes from the device

The rules are those of c10/cuda/CUDACachingAllocator.cpp. Left out: streams, graphs, and a retry after memory ran out.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from chameleon_mm.plan.recipes import Recipes
from chameleon_mm.plan.rewrite import rewritten_for
from chameleon_mm.plan.swap_plan import BACK, OUT, USE, ActionColumns, SwapPlan, in_order
from chameleon_mm.plan.trace import Trace
from chameleon_mm.units import MIB, allocated_size, round_up

_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _LARGE, _PAGE = MIB, 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    size: int
    address: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """Allocates the smallest free block that is large enough, splits it, and joins free neighbours."""

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.allocated_bytes = self.peak_bytes = self.reserved_bytes = 0
        self._address = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._last: dict[bool, Block | None] = {True: None, False: None}
        """The block at the end of the growing segment of each pool."""

    def alloc(self, nbytes: int) -> Block | None:
        size = allocated_size(nbytes)
        if not size:
            return None
        small = size <= _SMALL
        block = self._found(size, small) or self._grown(size, small)
        rest = block.size - size
        if rest >= 512 if small or self.expandable else rest > _SMALL:
            left = Block(rest, block.address + size, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = left
            block.after, block.size = left, size
            if self._last[small] is block:
                self._last[small] = left
            self._put(left)
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        if block is None:
            return
        self.allocated_bytes -= block.size
        if (before := block.before) is not None and before.free:
            self._take(before)
            block = self._joined(before, block)
        if (after := block.after) is not None and after.free:
            self._take(after)
            block = self._joined(block, after)
        self._put(block)

    def _found(self, size: int, small: bool) -> Block | None:
        at = next((i for i, (free, _, _) in enumerate(self._free[small]) if free >= size), None)
        if at is None:
            return None
        block = self._free[small].pop(at)[2]
        block.free = False
        return block

    def _grown(self, size: int, small: bool) -> Block:
        """A block of a new segment, or at the end of the growing one."""
        if not self.expandable:
            segment = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _LARGE else round_up(size, _PAGE)
            self.reserved_bytes += segment
            self._address += segment
            return Block(segment, self._address, small)
        page, last = _SMALL_SEGMENT if small else _LARGE_SEGMENT, self._last[small]
        there = last.size if last is not None and last.free else 0
        more = round_up(size - there, page)
        self.reserved_bytes += more
        if last is not None and last.free:
            self._take(last)
            last.size += more
            return last
        address = 0 if last is None else last.address + last.size
        block = self._last[small] = Block(more, address, small, before=last)
        if last is not None:
            last.after = block
        return block

    def _joined(self, one: Block, other: Block) -> Block:
        one.size += other.size
        one.after = other.after
        if other.after is not None:
            other.after.before = one
        if self._last[one.small] is other:
            self._last[one.small] = one
        return one

    def _put(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _take(self, block: Block) -> None:
        self._free[block.small].remove((block.size, block.address, block))
        block.free = False


def replay(trace: Trace, plan: SwapPlan, allocator: CachingAllocator) -> None:
    """Allocate and free what the step of `trace` does under `plan`, in its order."""
    rewritten = rewritten_for(Recipes.of(trace, None), plan)
    trace, moves = rewritten.trace, rewritten.moves_of(plan.swaps)
    _Replay(trace, moves, [action.tensor for action in plan.swaps], allocator).run()


class _Replay:
    def __init__(self, trace: Trace, moves: ActionColumns, tensors: list[int], allocator: CachingAllocator) -> None:
        self._trace, self._moves, self._tensors, self._allocator = trace, moves, tensors, allocator
        self._blocks: dict[int, Block | None] = {}
        self._heads: dict[int, Block | None] = {}

    def run(self) -> None:
        trace, allocator = self._trace, self._allocator
        born: dict[int, list[int]] = {}
        dies: dict[int, list[int]] = {}
        for j, (begin, end) in enumerate(zip(trace.tensor_born.tolist(), trace.tensor_dies.tolist(), strict=True)):
            if end >= max(begin, 0):
                born.setdefault(begin, []).append(j)
                dies.setdefault(end, []).append(j)
        beside = trace.start_bytes - sum(int(allocated_size(trace.tensor_bytes[j])) for j in born.get(-1, ()))
        allocator.alloc(beside)
        inner = dict(zip(trace.op_tick.tolist(), trace.op_inner_bytes.tolist(), strict=True))
        at_tick: dict[int, list[tuple[int, int]]] = {}
        for hook, kind, row in zip(*(column.tolist() for column in in_order(self._moves)), strict=True):
            at_tick.setdefault(int(trace.hook_tick[hook]), []).append((kind, row))
        for tick in range(-1, trace.num_ticks):
            for j in born.get(tick, ()):
                self._blocks[j] = allocator.alloc(int(trace.tensor_bytes[j]))
            for kind, row in at_tick.get(tick, ()):
                self._act(kind, row)
            allocator.free(allocator.alloc(inner.get(tick, 0)))
            for j in dies.get(tick, ()):
                allocator.free(self._blocks.pop(j))

    def _act(self, kind: int, row: int) -> None:
        moves, allocator, j = self._moves, self._allocator, self._tensors[row]
        head = int(moves.head[row])
        if kind == OUT or (kind == USE and moves.in_at[row] != moves.use_at[row]):
            return
        if kind in (USE, BACK):
            self._blocks[j] = allocator.alloc(int(self._trace.tensor_bytes[j]))
            allocator.free(self._heads.pop(j, None))
        else:
            self._heads[j] = allocator.alloc(head)
            allocator.free(self._blocks[j])
            self._blocks[j] = None
