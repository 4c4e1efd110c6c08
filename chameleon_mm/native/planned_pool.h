// A block of pinned memory out of what is reserved and free: pinned/pool.py, ledger.py and free_list.py at one request.
#pragma once

#include "planned_objects.h"

namespace swap {

#define LEDGER_FIELDS(X) X(_free_list) X(_live) X(_serial) X(chunks) X(closed) X(lock) X(returned) X(shrinking)
SLOTTED(LedgerClass, "pinned.ledger", "Ledger", LEDGER_FIELDS)

#define FREE_LIST_FIELDS(X) X(_free_units) X(_live) X(_newest) X(_shift) X(_sizes)
SLOTTED(FreeListClass, "pinned.free_list", "FreeList", FREE_LIST_FIELDS)

#define SPAN_FIELDS(X) X(above) X(below) X(free) X(newer) X(older) X(start) X(units)
SLOTTED(SpanClass, "pinned.free_list", "_Span", SPAN_FIELDS)

#define BLOCK_FIELDS(X) X(_memory) X(_met) X(_owner) X(_start) X(_take_turn) X(_views) X(nbytes) X(pending_events)
SLOTTED(BlockClass, "pinned.block", "PinnedBlock", BLOCK_FIELDS)

inline LedgerClass Ledger;
inline FreeListClass FreeList;
inline SpanClass Span;
inline BlockClass Block;

inline void load_pool_classes() {
  if (!Block.type) Ledger.load(), FreeList.load(), Span.load(), Block.load();
}

// The number of items of a sorted list that are below a number; `or_equal`: below it or equal.
inline Py_ssize_t bisect(PyObject* list, long long number, bool or_equal) {
  Py_ssize_t low = 0, high = PyList_GET_SIZE(list);
  while (low < high) {
    const Py_ssize_t middle = (low + high) / 2;
    const long long there = as_number(PyList_GET_ITEM(list, middle));
    if (there < number || (or_equal && there == number)) low = middle + 1;
    else high = middle;
  }
  return low;
}

// FreeList.allocate: the offset of a block of so many units; null: there is none.
inline Ref take_span(PyObject* list, long long units) {
  PyObject *sizes = field(list, FreeList._sizes), *newest = field(list, FreeList._newest);
  const Py_ssize_t at = bisect(sizes, units, false);
  if (at == PyList_GET_SIZE(sizes)) return Ref();
  Ref found(Py_NewRef(PyList_GET_ITEM(sizes, at))), span(Py_XNewRef(PyDict_GetItemWithError(newest, found.it)));
  if (!span) return Ref();
  PyObject* older = field(span.it, Span.older);
  if (older == Py_None) {
    need(PyDict_DelItem(newest, found.it));
    need(PyList_SetSlice(sizes, at, at + 1, nullptr));
  } else {
    need(PyDict_SetItem(newest, found.it, older));
    set(older, Span.newer, Py_None);
  }
  const long long left = as_number(found.it) - units;
  if (left) {
    Ref rest(Span.make()), size(new_number(left));
    const long long start = field_number(span.it, Span.start) + (units << field_number(list, FreeList._shift));
    PyObject* above = field(span.it, Span.above);
    set_number(rest.it, Span.start, start), set(rest.it, Span.below, span.it), set(rest.it, Span.above, above);
    set(rest.it, Span.units, size.it), set(rest.it, Span.free, Py_True), set(rest.it, Span.newer, Py_None);
    if (above != Py_None) set(above, Span.below, rest.it);
    set(span.it, Span.above, rest.it), set_number(span.it, Span.units, units);
    Ref before(Py_XNewRef(PyDict_GetItemWithError(newest, size.it)));
    set(rest.it, Span.older, before ? before.it : Py_None);
    if (before) set(before.it, Span.newer, rest.it);
    else need(PyList_Insert(sizes, bisect(sizes, left, true), size.it));
    need(PyDict_SetItem(newest, size.it, rest.it));
  }
  Ref offset(Py_NewRef(field(span.it, Span.start)));
  set(span.it, Span.free, Py_False);
  need(PyDict_SetItem(field(list, FreeList._live), offset.it, span.it));
  add_number(list, FreeList._free_units, -units);
  return offset;
}

// Ledger.allocate, for `pool`, under the ledger's lock; null: no free block is large enough, or something else is to be done first.
inline Ref take_block(PyObject* pool, PyObject* ledger, PyObject* nbytes) {
  if (field(ledger, Ledger.closed) != Py_False || field(ledger, Ledger.shrinking) != Py_False) return Ref();
  if (size_of(field(ledger, Ledger.returned))) call_method(ledger, n_drain);
  PyObject *list = field(ledger, Ledger._free_list), *chunks = field(ledger, Ledger.chunks);
  const long long shift = field_number(list, FreeList._shift), units = (as_number(nbytes) + (1LL << shift) - 1) >> shift;
  Ref offset(take_span(list, units)), bases(get(chunks, n__bases)), all(get(chunks, n__chunks));
  if (!offset) return Ref();
  const long long start = as_number(offset.it);
  PyObject* chunk = PyList_GET_ITEM(all.it, bisect(bases.it, start, true) - 1);
  Ref pending(get(chunk, n_pending)), memory(get(chunk, n_memory)), events(need(PyTuple_New(0)));
  if (is_true(get(pending.it, n_starts).it)) {
    Ref end(new_number(start + (units << shift)));
    events.it = call_method(pending.it, n_take, offset.it, end.it).taken();
  }
  add_number(ledger, Ledger._serial, 1);
  PyObject* serial = field(ledger, Ledger._serial);
  need(PyDict_SetItem(field(ledger, Ledger._live), serial, nbytes));
  Ref block(Block.make()), ticket(need(PyTuple_Pack(2, serial, offset.it))), turn(need(PyList_New(0)));
  need(PyList_Append(turn.it, ticket.it));
  set(block.it, Block._owner, pool), set(block.it, Block._memory, memory.it), set(block.it, Block.nbytes, nbytes);
  set_number(block.it, Block._start, start - get_number(chunk, n_base)), set(block.it, Block.pending_events, events.it);
  give(block.it, Block._met, PyTuple_New(0)), set(block.it, Block._views, Py_None), set(block.it, Block._take_turn, turn.it);
  return block;
}

// PinnedPool.allocate, of what is reserved and free; null: there is none.
inline Ref allocate(PyObject* pool, PyObject* ledger, PyObject* nbytes) {
  Ref block;
  {
    Locked lock(field(ledger, Ledger.lock));
    block.it = take_block(pool, ledger, nbytes).taken();
  }
  if (block && PyTuple_GET_SIZE(field(block.it, Block.pending_events))) call_method(block.it, n_forget_complete);
  return block;
}

}  // namespace swap
