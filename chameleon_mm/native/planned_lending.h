// Lending what is on its way out to the device's allocator: reclaim.py's `Lending` and saved/device_copy.py, with the helper `reclaim`.
#pragma once

#include "planned_device.h"

#include <algorithm>

namespace swap {

constexpr double SHORT_SHARE = 0.5;             // as in reclaim.py
constexpr long long SEGMENT_BYTES = 20LL << 20;  // as in device/cuda/cuda_allocator_hook.py: a test compares both

// DeviceCopy.take_back, of a storage that is lent: its device copy again; or it is noted that the allocator has reclaimed it.
inline void take_back(const Parts& p, PyObject* saved) {
  PyObject* last = field(saved, Storage.last_save);
  Ref lent(Py_NewRef(field(saved, Storage._lent)));
  set(saved, Storage._lent, Py_None), set(last, LastSave.lent, Py_None);
  Ref storage(call_method(lent.it, n_withdraw));
  set(saved, Storage._device, storage.it);
  if (storage.it != Py_None) return;
  const long long nbytes = field_number(saved, Storage.nbytes);
  add_number(p.totals, Totals.bytes_reclaimed, nbytes), add_number(p.totals, Totals.bytes_reclaimed_by_allocator, nbytes);
  set(saved, Storage.state, field(saved, Storage._block) == Py_None ? State.retired : State.on_host);
}

// The allocator's hook of one session, and what is lent to it. Nothing of it is done where the device has none.
class Lending {
 public:
  explicit Lending(const Parts& p) : p_(p) {}

  // Lending.settle
  void settle() const {
    if (p_.lending == Py_None || get_number(p_.raw_hook, n_reclaimed) == field_number(p_.lending, LendingOf._num_reclaimed)) return;
    call_method(p_.lending, n_settle);
  }

  bool memory_is_short() const { return p_.lending != Py_None && (field(p_.lending, LendingOf.memory_is_short) == Py_True); }

  void add(PyObject* saved) const {
    if (p_.lending != Py_None) append(field(p_.lending, LendingOf._waiting), saved);
  }

  // Lending.lend, where one stream alone works with what is lent, and no recorder runs.
  void lend() const {
    if (p_.lending == Py_None) return;
    Ref lent(Py_NewRef(field(p_.lending, LendingOf._lent))), waiting(Py_NewRef(field(p_.lending, LendingOf._waiting)));
    while (size_of(lent.it)) {
      Ref oldest(front_of(lent.it));
      if (Storage.made(oldest.it) ? field(oldest.it, Storage._lent) != Py_None : get_truth(oldest.it, n_is_lent)) break;
      call_method(lent.it, n_popleft);
    }
    if (!size_of(waiting.it)) return;
    if (is_true(call(p_.history_is_on).it) != (field(p_.hook, AllocatorHook._history) == Py_True)) {  // the hook is to be told of it first
      call_method(p_.lending, n_lend);
      return;
    }
    while (size_of(waiting.it)) {
      Ref next(front_of(waiting.it));
      if (!Storage.made(next.it)) {
        call_method(p_.lending, n_lend);
        return;
      }
      PyObject* out = field(next.it, Storage._out);
      const bool is_over = out == Py_None || field(out, Move.done) != Py_None || field(out, Move.cancelled) == Py_True ||
                           field(out, Move.failed) == Py_True;
      if (!is_over) return;
      call_method(waiting.it, n_popleft);
      if (field(next.it, Storage.state) == State.swapping_out && lend_one(next.it)) call_method(lent.it, n_append, next.it);
    }
  }

  // Lending.set_limits, of growth that is known.
  void set_limits(PyObject* limit, PyObject* growth, PyObject* allocated) const {
    if (p_.lending == Py_None) return;
    const long long most = as_number(limit), grows = as_number(growth);
    set(p_.lending, LendingOf.memory_is_short, (double)as_number(allocated) > (double)most * SHORT_SHARE ? Py_True : Py_False);
    Ref asked(Py_NewRef(field(p_.hook, AllocatorHook._asked))), now(need(PyTuple_Pack(2, limit, growth)));
    if (is_true(call(p_.history_is_on).it) != (field(p_.hook, AllocatorHook._history) == Py_True)) {
      call_method(p_.hook, n_set_limits, limit, growth);
    } else if (!same(asked.it, now.it)) {  // CudaAllocatorHook.set_limits
      swap::set(p_.hook, AllocatorHook._asked, now.it);
      const double share = PyFloat_AsDouble(call(p_.memory_fraction, p_.index).it);
      const long long total = field_number(p_.hook, AllocatorHook._total_bytes), bound = std::min(most, (long long)(share * (double)total));
      Ref before(Py_NewRef(field(p_.hook, AllocatorHook._set))), set(need(Py_BuildValue("(LL)", bound, std::max(SEGMENT_BYTES, grows))));
      if (same(before.it, set.it)) return;
      swap::set(p_.hook, AllocatorHook._set, set.it);
      call_method(p_.raw_hook, n_set_limits, PyTuple_GET_ITEM(set.it, 0), PyTuple_GET_ITEM(set.it, 1), field(p_.hook, AllocatorHook._history));
    }
  }

 private:
  static bool same(PyObject* one, PyObject* other) {
    const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
    need(equal);
    return equal;
  }

  // DeviceCopy.lend. Returns whether it is lent.
  bool lend_one(PyObject* saved) const {
    PyObject *storage = field(saved, Storage._device), *out = field(saved, Storage._out), *last = field(saved, Storage.last_save);
    if (field(saved, Storage.form) != whole_form || storage == Py_None || out == Py_None || field(out, Move.done) == Py_None) return false;
    if (field(out, Move.failed) == Py_True || field_number(last, LastSave.num_claims) > 1) return false;
    PyObject *done = field(out, Move.done), *owner = field(saved, Storage.alloc_stream);
    void* event = event_of(done);
    if (!event || !Stream.made(owner)) return false;
    Ref handle(need(PyLong_FromVoidPtr(event))), id(get(field(owner, Stream.raw), n_stream_id));
    Ref held(call_method(p_.raw_hook, n_hold, storage, field(done, Event.raw), handle.it, field(owner, Stream._handle), id.it));
    set(saved, Storage._lent, held.it);
    if (held.it == Py_None) return false;
    set(saved, Storage._device, Py_None);
    give(last, LastSave.lent, PyWeakref_NewRef(saved, nullptr));
    return true;
  }

  const Parts& p_;
};

}  // namespace swap
