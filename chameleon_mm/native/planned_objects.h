// Python objects that the hooks of a planned step read and write: attributes by name, fields of the classes that have slots.
#pragma once

#include "python_objects.h"
#include "saved_origin.h"

namespace swap {

using python_objects::Ref;
using python_objects::slot;
using python_objects::to_number;

struct Raised {};  // an error of Python's is set

inline PyObject* need(PyObject* owned) {
  if (!owned) throw Raised{};
  return owned;
}

inline void need(int status) {
  if (status < 0) throw Raised{};
}

// Names of attributes and methods, interned once.
#define SWAP_NAMES(X)                                                                                                        \
  X(_OF_HOOKS) X(__contains__) X(_advance) X(_bases) X(_chunks) X(_count_use) X(_counted)              \
  X(_cuda_getMemoryFraction) X(_cuda_isHistoryEnabled) X(_current) X(_current_autograd_node) X(_dequeue) X(_fail)            \
  X(_growing) X(_hand_over_front) X(_hand_over_piece) X(_hook) X(_in) X(_known) X(_last_saves) X(_least_bytes) X(_ledger)    \
  X(_limit) X(_lock) X(_make_room) X(_note_refusal) X(_out) X(_pack_waiting) X(_piece_bytes) X(_plan_forecast)               \
  X(_profiler_is_on) X(_read_allocated) X(_retire_ended) X(_running) X(_saved_any) X(_scale) X(_seen) X(_storages)           \
  X(_used_any) X(acquire) X(advance_to) X(again) X(allocated_until) X(append) X(base) X(budget) X(by_storage) X(call_site)   \
  X(check_memory) X(claims) X(context) X(cuda_event) X(cuda_stream) X(device) X(device_bytes) X(differs) X(director)         \
  X(drain) X(drop_restored) X(empty) X(ended) X(entries) X(errors) X(forget_complete) X(get) X(get_eval_frame_callback)      \
  X(hbm_budget_bytes) X(hold) X(hook_counts) X(hook_lock) X(index) X(ins) X(is_lent) X(is_over) X(issue) X(issue_in_order)   \
  X(kept_by_reason) X(leaf) X(leaving_bytes) X(lend) X(lending) X(light) X(lock) X(margin_bytes) X(memory) X(metrics)        \
  X(nbytes) X(next_index) X(note_allocated) X(number) X(on_claim_end) X(on_save) X(on_use) X(order) X(out_at) X(outs)        \
  X(parameter) X(parts) X(pending) X(persistent) X(planned) X(pool) X(popleft) X(predicted_by) X(prefetch_after)             \
  X(prefetch_planned) X(protected) X(query) X(queued) X(raise_oldest) X(rebuild) X(reclaim) X(reclaim_complete) X(reclaimed) \
  X(recompute) X(record) X(recording) X(refs) X(registry) X(release) X(restore) X(retire_if_idle) X(saves) X(set_limits)     \
  X(settle) X(shape) X(small) X(starts) X(stream) X(stream_id) X(streams) X(swap_out) X(swap_out_planned) X(take) X(tensor)  \
  X(this_thread) X(timed) X(totals) X(transfer) X(type) X(uses) X(wait) X(withdraw)
#define DECLARE(name) inline PyObject* n_##name = nullptr;
SWAP_NAMES(DECLARE)
#undef DECLARE

inline bool intern_names() {
#define INTERN(name) \
  if (!n_##name && !(n_##name = PyUnicode_InternFromString(#name))) return false;
  SWAP_NAMES(INTERN)
#undef INTERN
  return true;
}

// --- attributes

inline Ref get(PyObject* of, PyObject* name) { return Ref(need(PyObject_GetAttr(of, name))); }

inline void put(PyObject* of, PyObject* name, PyObject* value) { need(PyObject_SetAttr(of, name, value)); }

inline long long as_number(PyObject* number) {
  long long value = 0;
  if (!to_number(number, value)) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "planned hooks: expected a whole number, got %R", number);
    throw Raised{};
  }
  return value;
}

inline long long get_number(PyObject* of, PyObject* name) { return as_number(get(of, name).it); }

inline PyObject* new_number(long long value) { return need(PyLong_FromLongLong(value)); }

inline void put_number(PyObject* of, PyObject* name, long long value) { put(of, name, Ref(new_number(value)).it); }

inline void add_to(PyObject* of, PyObject* name, long long more) { put_number(of, name, get_number(of, name) + more); }

inline bool is_true(PyObject* it) {
  const int truth = PyObject_IsTrue(it);
  need(truth);
  return truth != 0;
}

inline bool get_truth(PyObject* of, PyObject* name) { return is_true(get(of, name).it); }

// --- calls

template <typename... Arguments>
Ref call(PyObject* function, Arguments... arguments) {
  PyObject* all[] = {nullptr, arguments...};
  return Ref(need(PyObject_Vectorcall(function, all + 1, sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)));
}

template <typename... Arguments>
Ref call_method(PyObject* of, PyObject* name, Arguments... arguments) {
  PyObject* all[] = {of, arguments...};
  return Ref(need(PyObject_VectorcallMethod(name, all, (1 + sizeof...(arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)));
}

// --- fields of classes with slots: the class, and where in an object each is

inline Py_ssize_t offset_of(PyObject* type, const char* name) {
  Py_ssize_t at = 0;
  if (!python_objects::slot_offset(type, name, at)) throw Raised{};
  return at;
}

inline PyObject* class_of(const char* module, const char* name) {
  Ref found(need(PyImport_ImportModule(module)));
  return need(PyObject_GetAttrString(found.it, name));
}

#define SLOTTED(Name, module, name, FIELDS)                                \
  struct Name {                                                            \
    PyTypeObject* type = nullptr;                                          \
    FIELDS(SLOTTED_OFFSET)                                                 \
    void load() {                                                          \
      PyObject* found = class_of("chameleon_mm." module, name);            \
      FIELDS(SLOTTED_FIND)                                                 \
      type = (PyTypeObject*)found;                                         \
    }                                                                      \
    bool made(PyObject* it) const { return Py_TYPE(it) == type; }          \
    PyObject* make() const { return need(type->tp_alloc(type, 0)); }       \
  };
#define SLOTTED_OFFSET(field) Py_ssize_t field = 0;
#define SLOTTED_FIND(field) field = offset_of(found, #field);

#define STORAGE_FIELDS(X)                                                                                                      \
  X(_arrived_on) X(_began_in) X(_block) X(_checksum) X(_context) X(_device) X(_in) X(_lent) X(_noted_in) X(_out) X(_read)     \
  X(_saved_bytes) X(_saved_nbytes) X(alloc_stream) X(copies) X(relied) X(dtype) X(epoch) X(first) X(form) X(index)        \
  X(is_held_for_recipes) X(last_save) X(latest) X(nbytes) X(op_is_over) X(planned) X(proof) X(state) X(storage_id)             \
  X(swap_in_number) X(traced) X(uses_left) X(views)
SLOTTED(StorageClass, "saved.saved_storage", "SavedStorage", STORAGE_FIELDS)

#define LAST_SAVE_FIELDS(X) X(epoch) X(hook) X(lent) X(num_claims) X(storage)
SLOTTED(LastSaveClass, "saved.save_record", "LastSave", LAST_SAVE_FIELDS)

#define PROBE_FIELDS(X) X(_origin) X(_what) X(alias) X(expected)
SLOTTED(ProbeClass, "saved.version", "VersionProbe", PROBE_FIELDS)

#define ORIGIN_FIELDS(X) X(_name) X(_node_number) X(_output_nr) X(_ref)
SLOTTED(OriginClass, "saved.version", "Origin", ORIGIN_FIELDS)

#define BYTES_FIELDS(X) X(_counter) X(_geometry) X(begin) X(end) X(is_dense) X(probe)
SLOTTED(BytesClass, "saved.version", "SavedBytes", BYTES_FIELDS)

#define CLAIM_FIELDS(X) X(_end) X(saved)
SLOTTED(ClaimClass, "saved.claims", "Claim", CLAIM_FIELDS)

#define END_FIELDS(X) X(retire) X(saved)
SLOTTED(EndClass, "saved.claims", "_End", END_FIELDS)

#define VIEW_FIELDS(X) X(_conj) X(_dtype) X(_neg) X(_offset) X(_shape) X(_stride) X(claim) X(probe) X(saved_at) X(swap_in_number)
SLOTTED(ViewClass, "saved.handles", "SwappedView", VIEW_FIELDS)

#define KEPT_FIELDS(X) X(expected) X(saved_at) X(tensor)
SLOTTED(KeptClass, "saved.handles", "KeptTensor", KEPT_FIELDS)

#define MOVE_FIELDS(X) X(after) X(cancelled) X(done) X(dst) X(failed) X(nbytes) X(next_byte) X(pieces) X(src) X(timed) X(written)
SLOTTED(MoveClass, "transfer.copy_queue", "Move", MOVE_FIELDS)

#define EVENT_FIELDS(X) X(raw) X(timed)
SLOTTED(EventClass, "device.cuda.cuda_stream", "CudaEvent", EVENT_FIELDS)

#define STREAM_FIELDS(X) X(_handle) X(raw)
SLOTTED(StreamClass, "device.cuda.cuda_stream", "CudaStream", STREAM_FIELDS)

#define CURSOR_FIELDS(X) X(_at) X(_due) X(_hooks) X(next_hook)
SLOTTED(CursorClass, "adaptive.hook_schedule", "ScheduleCursor", CURSOR_FIELDS)

#define LIGHT_FIELDS(X) X(_features) X(_last_used) X(_number) X(num_hooks)
SLOTTED(LightClass, "profiler.light", "LightProfiler", LIGHT_FIELDS)

#define FOLLOWER_FIELDS(X)                                                                                                   \
  X(_checked_at) X(_cursor) X(_diverged) X(_due) X(_epoch) X(_first_saves) X(_growth_bytes) X(_had_plan) X(_memory)           \
  X(_planned) X(_reached) X(_recorder) X(_schedule) X(_steps) X(_storages) X(at_rest_until) X(followed)
SLOTTED(FollowerClass, "adaptive.plan_follower", "PlanFollower", FOLLOWER_FIELDS)

#define BUDGET_FIELDS(X)                                                                                                     \
  X(_allocated) X(_cumulative) X(_cumulative_at_begin) X(_limits) X(_taken) X(_unused) X(forecast) X(headroom)                \
  X(highest_forecast) X(peak_seen_bytes) X(reclaim)
SLOTTED(BudgetClass, "executor.budget", "Budget", BUDGET_FIELDS)

#define FORECAST_FIELDS(X) X(growth_bytes)
SLOTTED(ForecastClass, "executor.forecasts", "PlanForecast", FORECAST_FIELDS)

#define LENDING_FIELDS(X) X(_hook) X(_lent) X(_num_reclaimed) X(_waiting) X(memory_is_short)
SLOTTED(LendingClass, "reclaim", "Lending", LENDING_FIELDS)

#define ALLOCATOR_HOOK_FIELDS(X) X(_asked) X(_history) X(_hook) X(_set) X(_total_bytes)
SLOTTED(AllocatorHookClass, "device.cuda.cuda_allocator_hook", "CudaAllocatorHook", ALLOCATOR_HOOK_FIELDS)

#define RECLAIM_QUEUE_FIELDS(X) X(entries) X(pending_bytes)
SLOTTED(ReclaimQueueClass, "reclaim", "ReclaimQueue", RECLAIM_QUEUE_FIELDS)

#define SCHEDULE_FIELDS(X) X(growth) X(storage_actions)
SLOTTED(ScheduleClass, "adaptive.hook_schedule", "HookSchedule", SCHEDULE_FIELDS)

#define OUTS_FIELDS(X) X(_small) X(fresh) X(waiting_bytes)
SLOTTED(OutsClass, "executor.swap_outs", "SwapOuts", OUTS_FIELDS)

#define REGISTRY_FIELDS(X) X(epoch) X(next_index) X(of_epoch)
SLOTTED(RegistryClass, "saved.claims", "StorageRegistry", REGISTRY_FIELDS)

#define TOTALS_FIELDS(X)                                                                                                     \
  X(bytes_reclaimed) X(bytes_reclaimed_by_allocator) X(bytes_swapped_in) X(bytes_swapped_out) X(prefetches) X(uses_on_device)
SLOTTED(TotalsClass, "saved.metrics", "Totals", TOTALS_FIELDS)

struct States {
  PyObject *on_device, *swapping_out, *on_host, *swapping_in, *restored, *retired;
  void load() {
    Ref state(class_of("chameleon_mm.saved.state", "State"));
    auto find = [&](const char* name) { return need(PyObject_GetAttrString(state.it, name)); };
    on_device = find("ON_DEVICE"), swapping_out = find("SWAPPING_OUT"), on_host = find("ON_HOST");
    swapping_in = find("SWAPPING_IN"), restored = find("RESTORED"), retired = find("RETIRED");
  }
};

inline StorageClass Storage;
inline LastSaveClass LastSave;
inline ProbeClass Probe;
inline OriginClass Origin;
inline BytesClass Bytes;
inline ClaimClass Claim;
inline EndClass End;
inline ViewClass View;
inline KeptClass Kept;
inline MoveClass Move;
inline EventClass Event;
inline StreamClass Stream;
inline CursorClass Cursor;
inline LightClass Light;
inline TotalsClass Totals;
inline FollowerClass Follower;
inline BudgetClass Budget;
inline ForecastClass Forecast;
inline RegistryClass Registry;
inline LendingClass LendingOf;
inline AllocatorHookClass AllocatorHook;
inline ReclaimQueueClass ReclaimQueue;
inline ScheduleClass Schedule;
inline OutsClass Outs;
inline States State;
inline PyObject *whole_form = nullptr, *nothing_due = nullptr, *out_of_memory = nullptr, *transfer_failed = nullptr;
inline PyObject *in_plan_order = nullptr, *check_memory_at_hook = nullptr, *by_reference = nullptr;  // names of arguments, for calls

inline void load_classes() {
  if (whole_form) return;
  Storage.load(), LastSave.load(), Probe.load(), Origin.load(), Bytes.load(), Claim.load(), End.load(), View.load(), Kept.load();
  Move.load(), Event.load(), Stream.load(), Cursor.load(), Light.load(), Totals.load(),
  Follower.load(), Budget.load(), Forecast.load(), Registry.load(),
  LendingOf.load(), AllocatorHook.load(), ReclaimQueue.load(), Schedule.load(), Outs.load(), State.load();
  nothing_due = class_of("chameleon_mm.adaptive.hook_schedule", "NO_ACTIONS");
  transfer_failed = class_of("chameleon_mm.errors", "TransferFailed"), out_of_memory = class_of("torch", "OutOfMemoryError");
  in_plan_order = need(Py_BuildValue("(s)", "in_plan_order")), by_reference = need(Py_BuildValue("(s)", "by_reference"));
  check_memory_at_hook = need(Py_BuildValue("(ss)", "check_memory", "at_hook"));
  whole_form = class_of("chameleon_mm.saved.form", "WHOLE");
}

// A field that is set; borrowed.
inline PyObject* field(PyObject* of, Py_ssize_t at) {
  PyObject* it = slot(of, at);
  if (!it) {
    PyErr_Format(PyExc_AttributeError, "planned hooks: expected a %s that is whole, got one with an empty slot", Py_TYPE(of)->tp_name);
    throw Raised{};
  }
  return it;
}

inline long long field_number(PyObject* of, Py_ssize_t at) { return as_number(field(of, at)); }

// Set a field; takes the reference.
inline void give(PyObject* to, Py_ssize_t at, PyObject* owned) {
  PyObject* before = slot(to, at);
  slot(to, at) = need(owned);
  Py_XDECREF(before);
}

inline void set(PyObject* of, Py_ssize_t at, PyObject* value) { give(of, at, Py_NewRef(value)); }

inline void set_number(PyObject* of, Py_ssize_t at, long long value) { give(of, at, PyLong_FromLongLong(value)); }

inline void add_number(PyObject* of, Py_ssize_t at, long long more) { set_number(of, at, field_number(of, at) + more); }

#define SWAP_PARTS(X)                                                                                                       \
  X(executor) X(director) X(device) X(counts) X(recording) X(acquire) X(release) X(hook_lock) X(ended) X(errors) X(outs) X(registry)    \
  X(storages) X(by_storage) X(last_saves) X(budget) X(metrics) X(totals) X(context) X(pool) X(ledger) X(copy_lock)          \
  X(streams) X(order) X(ins) X(light) X(on_claim_end) X(read_allocated) X(protected_refs) X(is_protected) X(plan_forecast)  \
  X(planned_queue) X(reclaim_entries) X(this_thread) X(call_site) X(of_hooks) X(current_node) X(profiler_is_on) X(compiler) \
  X(history_is_on) X(memory_fraction) X(index) X(lending) X(hook) X(raw_hook) X(deque) X(main)

// A copy queue, and what of it stays the same.
struct Queue {
  PyObject *it = nullptr, *queued = nullptr, *running = nullptr, *stream = nullptr;
  long long limit = 0, piece_bytes = 0;

  void load(PyObject* queue) {
    it = Py_NewRef(queue), queued = get(queue, n_queued).taken(), running = get(queue, n__running).taken();
    stream = get(queue, n_stream).taken(), limit = get_number(queue, n__limit);
    piece_bytes = get_number(queue, n__piece_bytes);
  }
};

// What the hooks of one session work with.
struct Parts {
#define PART(name) PyObject* name = nullptr;
  SWAP_PARTS(PART)
#undef PART
  Queue out, in;
  bool reads_here = false;  // whether the helper `memory` reads what torch's allocator has handed out: then so do the hooks
  long long least_bytes = 0;
  int device_index = 0;
  int64_t main_id = 0;        // torch's number of the only compute stream that was seen, `main`
  long long thread = 0, operators = 0;  // of the hook that runs: as `current_operator` has them

  template <typename Visit>
  void each(Visit visit) {
#define EACH(name) visit(name);
    SWAP_PARTS(EACH)
#undef EACH
    for (Queue* q : {&out, &in})
      for (PyObject** part : {&q->it, &q->queued, &q->running, &q->stream}) visit(*part);
  }
};

class Unlocked {  // without the GIL
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

class Locked {  // a lock, waited for
 public:
  explicit Locked(PyObject* lock) : lock_(lock) { call_method(lock, n_acquire); }
  ~Locked() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Ref done(PyObject_CallMethodNoArgs(lock_, n_release));
    if (!done) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyObject* lock_;
};

inline Py_ssize_t size_of(PyObject* container) {
  const Py_ssize_t size = PyObject_Size(container);
  if (size < 0) throw Raised{};
  return size;
}

inline Ref front_of(PyObject* deque) { return Ref(need(PySequence_GetItem(deque, 0))); }

inline void append(PyObject* deque, PyObject* it) { call_method(deque, n_append, it); }

}  // namespace swap
