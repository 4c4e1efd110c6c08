// The way of one saved storage out and back, as saved/saved_storage.py and transfer/copy_queue.py have it, without the interpreter.
//
// Each function stands for the Python function that its comment names. One that returns a truth value has changed nothing where that
// is false: then the Python function is called. All rules of order are those of Python, and are said at the same places.
#pragma once

#include "planned_lending.h"
#include "planned_pool.h"

#include <ATen/SequenceNumber.h>

#include <algorithm>

namespace swap {

// Whether the error that is set is one of `kind`, which is forgotten then. Another one is thrown.
inline void forgive(PyObject* kind) {
  if (!PyErr_ExceptionMatches(kind)) throw Raised{};
  PyErr_Clear();
}

// ----------------------------------------------------------------------------------------------------------------- copy queues

// CopyQueue._hand_over_piece, of a move that is not timed and whose source's counters nobody watches.
inline bool hand_over_piece(const Queue& q, PyObject* move) {
  PyObject *dst = field(move, Move.dst), *src = field(move, Move.src);
  if (field(move, Move.timed) != Py_False || field(move, Move.written) != Py_None) return false;
  if (!THPVariable_Check(dst) || !THPVariable_Check(src)) return false;
  const long long begin = field_number(move, Move.next_byte), nbytes = field_number(move, Move.nbytes);
  const long long end = std::min(begin + q.piece_bytes, nbytes);
  Ref done;
  try {
    PyObject* after = field(move, Move.after);
    for (Py_ssize_t i = 0; begin == 0 && i < PyTuple_GET_SIZE(after); i++)
      wait(q.stream, PyTuple_GET_ITEM(after, i));  // orders the copy after its source was written and its destination's last use
    char* to = (char*)THPVariable_Unpack(dst).data_ptr() + begin;
    const char* from = (const char*)THPVariable_Unpack(src).data_ptr() + begin;
    if (end > begin) copy(q.stream, to, from, end - begin);
    done.it = record(q.stream);  // orders the reuse of both buffers after this piece
  } catch (const Raised&) {
    forgive(PyExc_RuntimeError);  // Python asks the device again, and does what is to be done when it refuses
    return false;
  }
  if (begin == 0) give(move, Move.after, PyTuple_New(0));
  set_number(move, Move.next_byte, end);
  append(q.running, done.it);
  if (end < nbytes) return true;
  set(move, Move.done, done.it);
  if (size_of(q.queued) && front_of(q.queued).it == move) {
    set(move, Move.dst, Py_None), set(move, Move.src, Py_None);
    call_method(q.queued, n_popleft);
  } else {
    call_method(q.it, n__dequeue, move);
  }
  return true;
}

// CopyQueue._hand_over_front
inline void hand_over_front(const Queue& q) {
  Ref front(front_of(q.queued));
  if (!hand_over_piece(q, front.it)) call_method(q.it, n__hand_over_front);
}

// CopyQueue.hand_over
inline void hand_over(const Queue& q) {
  while (size_of(q.queued)) {
    while (size_of(q.running) && is_complete(front_of(q.running).it)) call_method(q.running, n_popleft);
    if (size_of(q.running) >= q.limit) return;
    hand_over_front(q);
  }
}

// CopyQueue.hand_over_all
inline void hand_over_all(const Queue& q) {
  while (size_of(q.queued)) hand_over_front(q);
}

// CopyQueue.submit, of a new move between these buffers, once these events are complete.
inline Ref submit(const Parts& p, const Queue& q, PyObject* dst, PyObject* src, PyObject* after, long long nbytes) {
  Ref move(Move.make());
  set(move.it, Move.dst, dst), set(move.it, Move.src, src), set(move.it, Move.after, after), set_number(move.it, Move.nbytes, nbytes);
  set_number(move.it, Move.next_byte, 0), set(move.it, Move.timed, Py_False), set(move.it, Move.done, Py_None);
  set(move.it, Move.written, Py_None);
  set(move.it, Move.cancelled, Py_False), set(move.it, Move.failed, Py_False), give(move.it, Move.pieces, PyObject_CallNoArgs(p.deque));
  Locked lock(p.copy_lock);
  append(q.queued, move.it);
  try {
    hand_over(q);
  } catch (...) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Ref failed(PyObject_CallMethodOneArg(q.it, n__fail, move.it));  // the caller never learns of it, and gives both buffers to others
    if (!failed) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    throw;
  }
  return move;
}

// CopyQueue.issue, and `issue_in_order` of a move that is next or handed over.
inline Ref issue(const Parts& p, const Queue& q, PyObject* move, bool in_order) {
  if (field(move, Move.failed) == Py_False && field(move, Move.done) != Py_None) return Ref(Py_NewRef(field(move, Move.done)));
  Locked lock(p.copy_lock);
  if (in_order && field(move, Move.done) == Py_None && (!size_of(q.queued) || front_of(q.queued).it != move))
    return call_method(q.it, n_issue_in_order, move);
  if (field(move, Move.failed) != Py_False) return call_method(q.it, n_issue, move);
  while (field(move, Move.done) == Py_None)
    if (!hand_over_piece(q, move)) call_method(q.it, n__hand_over_piece, move);
  return Ref(Py_NewRef(field(move, Move.done)));
}

// ------------------------------------------------------------------------------------------------------------- saved storages

inline bool moves_whole(const Parts& p, PyObject* saved) {
  return Storage.made(saved) && field(saved, Storage._lent) == Py_None && field(saved, Storage.form) == whole_form &&
         field(saved, Storage.alloc_stream) == p.main;
}

inline long long version_of(PyObject* t) {
  if (!THPVariable_Check(t)) throw Raised{};
  return THPVariable_Unpack(t)._version();
}

inline bool has_moved(PyObject* probe) {  // VersionProbe.moved
  return version_of(field(probe, Probe.alias)) != field_number(probe, Probe.expected);
}

inline const c10::Storage& storage_of(PyObject* storage) { return THPStorage_Unpack(storage); }

inline bool is_copyable(PyObject* saved) {  // SavedStorage.is_copyable
  PyObject* device = field(saved, Storage._device);
  if (device == Py_None || (long long)storage_of(device).nbytes() != field_number(saved, Storage.nbytes)) return false;
  PyObject* all = field(saved, Storage._saved_bytes);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); i++)
    if (!has_moved(field(PyList_GET_ITEM(all, i), Bytes.probe))) return true;
  return false;
}

// calling_thread.call_site
inline Ref call_site(const Parts& p) {
  PyFrameObject* frame = PyEval_GetFrame();
  if (!frame) return Ref(Py_NewRef(Py_None));
  Ref code((PyObject*)PyFrame_GetCode(frame));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p.of_hooks); i++) {
    const Py_ssize_t starts = PyUnicode_Tailmatch(
        ((PyCodeObject*)code.it)->co_filename, PyTuple_GET_ITEM(p.of_hooks, i), 0, PY_SSIZE_T_MAX, -1);
    if (starts) return call(p.call_site);
  }
  Ref id(need(PyLong_FromVoidPtr(frame))), instruction(new_number(PyFrame_GetLasti(frame)));
  return Ref(need(PyTuple_Pack(2, id.it, instruction.it)));
}

inline Ref current_operator(const Parts& p) { return Ref(need(Py_BuildValue("(LL)", p.thread, p.operators))); }

// Whether a save covers a storage of so many bytes, and none of them was written since: SavedStorage.swap_out asks the same.
inline bool is_all_of(PyObject* bytes, long long nbytes) {
  return field(bytes, Bytes.is_dense) == Py_True && field_number(bytes, Bytes.begin) == 0 &&
         field_number(bytes, Bytes.end) >= nbytes && !has_moved(field(bytes, Bytes.probe));
}

// SwapOuts.swap_out_planned, of a storage that moves as it is and was saved whole, in a step that is not timed.
inline bool swap_out_planned(const Parts& p, PyObject* saved, long long last_bytes) {
  if (!moves_whole(p, saved)) return false;
  const bool may = field(saved, Storage.state) == State.on_device && field(saved, Storage.op_is_over) == Py_True;
  if (!may || !is_copyable(saved)) return true;
  const long long nbytes = field_number(saved, Storage.nbytes);
  if (last_bytes < nbytes || !is_all_of(PyList_GET_ITEM(field(saved, Storage._saved_bytes), 0), nbytes)) return false;
  Ref block(allocate(p.pool, p.ledger, field(saved, Storage.nbytes)));
  if (!block) return false;  // Python reserves more, or does what is to be done where the host has no more
  const at::Tensor& memory = THPVariable_Unpack(field(block.it, Block._memory));
  const long long start = memory.storage_offset() + field_number(block.it, Block._start);
  Ref dst(flat(memory.storage(), c10::DispatchKey::CPU, start, nbytes));
  Ref src(flat(storage_of(field(saved, Storage._device)), c10::DispatchKey::CUDA, 0, nbytes));
  // Note [Swap-out]: the source was written by compute; Note [Host block]: the block's last use may still be running.
  PyObject* pending = field(block.it, Block.pending_events);
  Ref after(need(PyTuple_New(1 + PyTuple_GET_SIZE(pending))));
  PyTuple_SET_ITEM(after.it, 0, record(p.main));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pending); i++) PyTuple_SET_ITEM(after.it, i + 1, Py_NewRef(PyTuple_GET_ITEM(pending, i)));
  Ref out(submit(p, p.out, dst.it, src.it, after.it, nbytes));
  if (field(out.it, Move.failed) != Py_False) {
    call_method(block.it, n_release);
    Ref words(need(PyUnicode_FromFormat("a saved tensor of %lld bytes could not be swapped out; it stays on the device", nbytes)));
    call_method(p.outs, n__note_refusal, call(transfer_failed, words.it).it);
    return true;
  }
  set(saved, Storage._block, block.it), set(saved, Storage._out, out.it);
  add_number(p.totals, Totals.bytes_swapped_out, nbytes);
  Ref operator_(current_operator(p)), site(call_site(p));
  give(saved, Storage._began_in, PyTuple_Pack(2, operator_.it, site.it));
  set(saved, Storage.state, State.swapping_out);
  append(field(p.planned_queue, ReclaimQueue.entries), saved);
  add_number(p.planned_queue, ReclaimQueue.pending_bytes, nbytes);
  Lending(p).add(saved);
  return true;
}

// SavedStorage.reclaim in the plan's order, in a step that is not timed.
inline bool reclaim(const Parts& p, PyObject* saved) {
  if (!Storage.made(saved) || field(saved, Storage.form) != whole_form || field(saved, Storage.alloc_stream) != p.main) return false;
  if (field(saved, Storage._lent) != Py_None) {
    take_back(p, saved);
    if (field(saved, Storage.state) != State.swapping_out) return true;
  }
  PyObject* out = field(saved, Storage._out);
  if (!Move.made(out)) return false;
  try {
    Ref done(issue(p, p.out, out, true));
    wait(p.main, done.it);  // Note [Reclaim]: the next owner of the device memory comes after the copy
  } catch (const Raised&) {
    forgive(PyExc_RuntimeError);
    return false;
  }
  set(saved, Storage._device, Py_None);
  add_number(p.totals, Totals.bytes_reclaimed, field_number(saved, Storage.nbytes));
  set(saved, Storage.state, field(saved, Storage._block) == Py_None ? State.retired : State.on_host);
  return true;
}

constexpr long long ALLOCATION_UNIT_BYTES = 512;  // as in Python, which a test compares

inline long long allocated_size(long long nbytes) {  // units.allocated_size
  return (nbytes + ALLOCATION_UNIT_BYTES - 1) / ALLOCATION_UNIT_BYTES * ALLOCATION_UNIT_BYTES;
}

// SwapIns.prefetch: SavedStorage.swap_in and what is noted of it.
inline bool prefetch(const Parts& p, PyObject* saved) {
  PyObject *block = field(saved, Storage._block), *out = field(saved, Storage._out);
  if (!PyObject_TypeCheck(block, Block.type) || !Move.made(out) || field(out, Move.done) == Py_None) return false;
  const long long nbytes = field_number(saved, Storage.nbytes);
  at::Tensor whole;
  try {
    const Unlocked others_go_on;  // the allocator may wait for the device
    whole = at::empty({nbytes}, at::TensorOptions(at::kByte).device(at::kCUDA, p.device_index));
  } catch (const c10::OutOfMemoryError&) {
    return true;  // nobody needs it yet
  }
  Ref dst(need(THPVariable_Wrap(whole))), storage(need(THPStorage_Wrap(whole.storage())));
  const at::Tensor& memory = THPVariable_Unpack(field(block, Block._memory));
  Ref src(flat(memory.storage(), c10::DispatchKey::CPU, memory.storage_offset() + field_number(block, Block._start), nbytes));
  // Note [Swap-in]: an earlier owner of the device memory may still be running on compute; and the copy out must be complete before
  // the host copy is read.
  Ref owner_is_done(record(p.main)), after(need(PyTuple_Pack(2, owner_is_done.it, field(out, Move.done))));
  Ref back(submit(p, p.in, dst.it, src.it, after.it, nbytes));
  if (field(back.it, Move.failed) != Py_False) return true;  // nobody needs it yet
  set(saved, Storage._in, back.it), set(saved, Storage._device, storage.it), set(saved, Storage.alloc_stream, p.main);
  give(saved, Storage.latest, PyWeakref_NewRef(storage.it, nullptr)), set(saved, Storage._arrived_on, Py_None);
  set_number(saved, Storage.swap_in_number, field_number(saved, Storage.swap_in_number) + 1);
  set(saved, Storage.uses_left, field(saved, Storage.views));
  set(saved, Storage.state, State.swapping_in);
  add_number(p.totals, Totals.bytes_swapped_in, nbytes), add_number(p.totals, Totals.prefetches, 1);
  add_number(p.budget, Budget._taken, allocated_size(nbytes)), add_number(p.budget, Budget._allocated, allocated_size(nbytes));
  return true;
}

// SwapIns._restore_held, of what is on the device or on its way there: SavedStorage.arrive. Null: it is Python's.
inline Ref restore(const Parts& p, PyObject* saved) {
  if (!moves_whole(p, saved)) return Ref();
  PyObject *state = field(saved, Storage.state), *device = field(saved, Storage._device);
  if (device == Py_None) return Ref();
  if (state == State.swapping_in || state == State.restored) {
    PyObject* move = field(saved, Storage._in);
    if (!Move.made(move) || field(move, Move.failed) != Py_False || field(saved, Storage._block) == Py_None) return Ref();
    Ref arrived(issue(p, p.in, move, false));
    set(saved, Storage._read, arrived.it);
    if (field(saved, Storage._arrived_on) != p.main) {
      if (!is_complete(arrived.it)) wait(p.main, arrived.it);  // Note [Swap-in]: use after the bytes are there
      set(saved, Storage._arrived_on, p.main);
    }
    set(saved, Storage.state, State.restored);
  } else if (state != State.on_device) {
    return Ref();
  }
  add_number(p.totals, Totals.uses_on_device, 1);
  return Ref(Py_NewRef(device));
}

}  // namespace swap
