// Autograd's two hooks for what moves by a plan, without the interpreter: executor/executor.py and adaptive/plan_follower.py, of a
// step on a GPU that follows its plan hook for hook and only swaps.
//
//   save, use = hooks(save, use, executor)         // the two that do what is not done here
//
// The state stays where it is, in the Python objects: both ways read and write the same attributes, so each hook may take either.
// A hook is Python's, with nothing noted, where anything about the step, the thread or the tensor is not usual; so is, within a hook,
// the single thing that is not usual: a form, a part, a refusal, a queue of small moves. So every rule is Python's, and said there.
//
// The GIL is held but for copies. A finaliser may run Python code, and with it another thread, wherever an object goes: so the hooks'
// lock is taken here as there, and what the functions use is held by references of their own, or by what the lock guards.

#include "swap_moves.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <pthread.h>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds have the hooks in Python alone"
#endif

using namespace swap;

namespace {

constexpr long long NO_HOOK = -1, EARLIER_STEP = -2, NEW_STORAGE = 0;  // as in Python, which a test compares

unsigned forks = 0;  // between the process that imported this and the one that runs: a parent's device is no child's

struct Hooks {
  PyObject_HEAD
  Parts p;
  PyObject *save, *use;
  unsigned forks;  // when they were made
};

class TriedLock {  // the hooks' lock, taken if it is free; what waited for it is done before it is given back, and after
 public:
  explicit TriedLock(const Parts& p) : p_(p) { taken_ = call(p.acquire, Py_False).it == Py_True; }
  ~TriedLock() {
    if (taken_) release();
  }
  TriedLock(const TriedLock&) = delete;
  TriedLock& operator=(const TriedLock&) = delete;
  bool taken() const { return taken_; }

  // Give the lock back, and do what HookLock.run does then.
  void finish() {
    release();
    if (PyErr_Occurred()) throw Raised{};
    if (!size_of(p_.ended) && !size_of(p_.errors)) return;
    call_method(p_.hook_lock, n_retire_if_idle);
    call_method(p_.hook_lock, n_raise_oldest);
  }

 private:
  void release() {
    taken_ = false;
    PyObject *type, *value, *traceback, *late = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyObject_IsTrue(p_.ended)) {
      Ref done(PyObject_CallMethodNoArgs(p_.hook_lock, n__retire_ended));  // its error comes before one that there is
      late = done ? nullptr : Py_None;
    }
    PyObject *late_type = nullptr, *late_value = nullptr, *late_traceback = nullptr;
    if (late) PyErr_Fetch(&late_type, &late_value, &late_traceback);
    Ref done(PyObject_CallNoArgs(p_.release));
    if (!done) PyErr_Clear();
    if (late) {
      Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
      PyErr_Restore(late_type, late_value, late_traceback);
    } else {
      PyErr_Restore(type, value, traceback);
    }
  }

  const Parts& p_;
  bool taken_;
};

// --------------------------------------------------------------------------------------------------- whether all is as usual

// Note the only compute stream that has been seen. False: there are several.
bool note_main(Parts& p) {
  Ref seen(get(p.streams, n__seen));
  if (!PyList_CheckExact(seen.it) || PyList_GET_SIZE(seen.it) != 1) return false;
  PyObject* stream = PyList_GET_ITEM(seen.it, 0);
  if (stream == p.main) return true;
  if (!Stream.made(stream)) return false;
  p.main_id = as_number(Ref(need(PyObject_GetAttrString(field(stream, Stream.raw), "stream_id"))).it);
  Py_XSETREF(p.main, Py_NewRef(stream));
  return true;
}

// Whether the calling thread may swap here and now: its device, stream, modes and process are those of a plain step.
bool is_here(Hooks* h) {
  Parts& p = h->p;
  if (forks != h->forks || c10::impl::TorchDispatchModeTLS::stack_len() != 0 || c10::InferenceMode::is_enabled()) return false;
  if (!get_truth(p.recording, n_is_over) || is_true(call(p.profiler_is_on).it) || !note_main(p)) return false;
  if (call(p.compiler).it != Py_None) return false;  // dynamo would compile what is called from here
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  const auto device = guard.getDevice();
  if (device.index() != p.device_index || guard.getStream(device).id() != p.main_id) return false;
  int status = 0;
  if (cudaStreamIsCapturing(handle_of(p.main), &status) != 0) {
    cudaGetLastError();
    return false;
  }
  return status == 0;
}

// Whether the step follows its plan hook for hook, and nothing of it is recorded, timed, predicted or made again.
struct Step {
  Ref schedule, planned, cursor;
  long long hook = 0;

  bool follows(const Parts& p) {
    PyObject* d = p.director;
    if (get(d, n__steps).it == Py_None || get(d, n__recorder).it != Py_None || get_truth(d, n__diverged)) return false;
    if (get_number(d, n__epoch) != get_number(p.registry, n_epoch)) return false;
    if (get(d, n__due).it != nothing_due || get_truth(p.metrics, n_timed)) return false;
    if (get(p.budget, n_forecast).it != p.plan_forecast || get(p.budget, n_memory_limit).it != Py_None) return false;
    schedule.it = get(d, n__schedule).taken();
    planned.it = get(d, n__planned).taken();
    cursor.it = get(d, n__cursor).taken();
    if (schedule.it == Py_None || planned.it == Py_None || !Cursor.made(cursor.it)) return false;
    if (get(planned.it, n_predicted_by).it != Py_None || get(get(d, n_followed).it, n_recompute).it != Py_None) return false;
    hook = field_number(p.light, Light.num_hooks);
    return hook > 0;
  }
};

PyObject* feature_at(const Parts& p, long long hook) {  // borrowed; null: not known
  PyObject* features = field(p.light, Light._features);
  if (!PyList_CheckExact(features) || hook >= PyList_GET_SIZE(features)) return nullptr;
  PyObject* feature = PyList_GET_ITEM(features, hook);
  return PyTuple_CheckExact(feature) ? feature : nullptr;
}

bool equals(PyObject* number, long long value) { return python_objects::equals(number, value); }

// LightProfiler.saved, but that nothing is noted.
bool save_agrees(const Parts& p, const Step& step, const at::Tensor& t, long long since) {
  PyObject* feature = feature_at(p, step.hook);
  if (!feature || PyTuple_GET_SIZE(feature) != 5 || PyTuple_GET_ITEM(feature, 0) != THPVariableClass) return false;
  PyObject* shape = PyTuple_GET_ITEM(feature, 1);
  const auto sizes = t.sizes();
  if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != (Py_ssize_t)sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); i++)
    if (!equals(PyTuple_GET_ITEM(shape, i), sizes[i])) return false;
  return PyTuple_GET_ITEM(feature, 2) == (PyObject*)torch::getTHPDtype(t.scalar_type()) &&
         equals(PyTuple_GET_ITEM(feature, 3), p.operators - field_number(p.light, Light._number)) &&
         equals(PyTuple_GET_ITEM(feature, 4), since);
}

// LightProfiler.used, but that nothing is noted.
bool use_agrees(const Parts& p, const Step& step, long long save) {
  PyObject* feature = feature_at(p, step.hook);
  if (!feature || PyTuple_GET_SIZE(feature) != 2) return false;
  Ref node(call(p.current_node));
  return PyTuple_GET_ITEM(feature, 0) == (PyObject*)Py_TYPE(node.it) &&
         equals(PyTuple_GET_ITEM(feature, 1), field_number(p.light, Light._last_used) - save);
}

// ----------------------------------------------------------------------------------------------- what is due at every hook

// SwapOuts.finished
Ref finished(const Parts& p) {
  Ref over(need(PyList_New(0))), fresh(get(p.outs, n_fresh));
  if (!size_of(fresh.it)) return over;
  Ref waiting(call(p.deque)), all(need(PySequence_List(fresh.it)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all.it); i++) {
    PyObject *entry = PyList_GET_ITEM(all.it, i), *saved = PyTuple_GET_ITEM(entry, 0), *by = PyTuple_GET_ITEM(entry, 1);
    if (!PyObject_TypeCheck(saved, Storage.type)) throw Raised{};
    if (equals(PyTuple_GET_ITEM(by, 0), p.thread) && as_number(PyTuple_GET_ITEM(by, 1)) < p.operators) {
      const int known = PySequence_Contains(over.it, saved);
      need(known);
      if (!known) need(PyList_Append(over.it, saved));
    } else if (field(saved, Storage.state) == State.on_device) {
      append(waiting.it, entry);
    }
  }
  put(p.outs, n_fresh, waiting.it);
  Ref wait(need(PySequence_List(waiting.it)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wait.it); i++) {  // another operator has saved bytes of it since, and has not ended
    const Py_ssize_t at = PySequence_Index(over.it, PyTuple_GET_ITEM(PyList_GET_ITEM(wait.it, i), 0));
    if (at >= 0) need(PySequence_DelItem(over.it, at));
    else PyErr_Clear();
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(over.it); i++) set(PyList_GET_ITEM(over.it, i), Storage.op_is_over, Py_True);
  return over;
}

// PlanFollower._locate, of a hook that has the feature of the cached step's: what is due at it; null: nothing.
Ref locate(const Parts& p, const Step& step) {
  PyObject* d = p.director;
  Ref growth(get(step.schedule.it, n_growth)), at(new_number(step.hook));
  const long long grows = as_number(Ref(need(PyObject_GetItem(growth.it, at.it))).it);
  put_number(p.plan_forecast, n_growth_bytes, grows + get_number(step.planned.it, n_margin_bytes));
  Ref due;
  if (step.hook > get_number(d, n__reached)) {
    put(d, n__reached, at.it);
    put(d, n__had_plan, Py_True);
    if (step.hook >= field_number(step.cursor.it, Cursor.next_hook)) due.it = call_method(step.cursor.it, n_advance_to, at.it).taken();
  }
  put(d, n_at_rest_until, field(step.cursor.it, Cursor.next_hook));
  return due;
}

// The storage of an action, as long as it is one of this step; null: it is not.
Ref storage_for(PyObject* storages, PyObject* action) {
  Ref number(get(action, n_tensor));
  return Ref(Py_XNewRef(PyDict_GetItemWithError(storages, number.it)));
}

void reclaim_due(const Parts& p, PyObject* saved, PyObject* action) {
  PyObject* state = field(saved, Storage.state);
  const bool again = get_truth(action, n_again), whole = moves_whole(p, saved);
  if (state == State.restored ? !again : state != State.on_device && state != State.swapping_out) return;
  if (whole && state == State.restored) {  // SavedStorage.drop_restored
    set(saved, Storage._device, Py_None);
    set(saved, Storage.state, State.on_host);
    return;
  }
  if (whole && state == State.swapping_out && reclaim(p, saved)) return;
  Ref nbytes(get(action, n_nbytes)), one(need(PyTuple_Pack(3, saved, nbytes.it, again ? Py_True : Py_False)));
  Ref reclaims(need(PyTuple_Pack(1, one.it)));
  call_method(p.outs, n_carry_out, call(p.hook_actions, reclaims.it).it);
}

void swap_out_due(const Parts& p, PyObject* saved, PyObject* nbytes) {
  if (!swap_out_planned(p, saved, as_number(nbytes))) call_method(p.outs, n_swap_out_planned, saved, nbytes);
}

// PlanFollower.due and SwapOuts.carry_out, in that order of things. Returns what is to be swapped in.
Ref carry_out(const Parts& p, PyObject* due, PyObject* over) {
  Ref lending(get(p.budget, n_lending)), storages(get(p.director, n__storages)), back;
  if (lending.it != Py_None) call_method(lending.it, n_settle);
  const long long reached = get_number(p.director, n__reached);
  if (due) {
    for (int kind = 0; kind < 2; kind++) {  // reclaims first, so that their memory is there for what follows
      PyObject* actions = PyTuple_GET_ITEM(due, kind);
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(actions); i++) {
        PyObject* action = PyList_GET_ITEM(actions, i);
        Ref saved(storage_for(storages.it, action));
        if (!saved) continue;
        if (kind == 0) reclaim_due(p, saved.it, action);
        else swap_out_due(p, saved.it, get(action, n_nbytes).it);
      }
    }
    PyObject* ins = PyTuple_GET_ITEM(due, 2);
    if (PyList_GET_SIZE(ins)) back.it = need(PyList_New(0));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ins); i++) {
      Ref saved(storage_for(storages.it, PyList_GET_ITEM(ins, i)));
      if (saved) need(PyList_Append(back.it, saved.it));
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(over); i++) {
    PyObject *saved = PyList_GET_ITEM(over, i), *planned = field(saved, Storage.planned);
    if (planned == Py_None) {
      call_method(p.outs, n_swap_out, saved);
      continue;
    }
    PyObject* action = PyTuple_GET_ITEM(planned, 1);
    if (action != Py_None && get_number(action, n_out_at) <= reached) swap_out_due(p, saved, get(action, n_nbytes).it);
  }
  if (size_of(get(p.outs, n__small).it)) call_method(p.outs, n__pack_waiting);
  if (lending.it != Py_None && get_truth(lending.it, n_memory_is_short)) call_method(p.transfer, n_hand_over_all_out);
  for (PyObject* queue : {p.queue_out, p.queue_in}) {
    if (!size_of(get(queue, n_queued).it)) continue;
    Locked lock(p.copy_lock);
    hand_over(queue);
  }
  if (size_of(p.reclaim_entries)) call_method(get(p.budget, n_reclaim).it, n_reclaim_complete);
  if (lending.it != Py_None) call_method(lending.it, n_lend);
  return back;
}

// CudaDevice.read_memory: what is allocated, and what was in all.
std::pair<long long, long long> read_memory(const Parts& p) {
  Ref counted(get(p.device, n__counted));
  long long before = as_number(PyTuple_GET_ITEM(counted.it, 0));
  Ref read(call(p.read_allocated));
  const long long now = as_number(PyTuple_GET_ITEM(read.it, 0)), ever = as_number(PyTuple_GET_ITEM(read.it, 1));
  const long long last = as_number(PyTuple_GET_ITEM(counted.it, 1));
  if (ever < last) before += last;
  if (get(p.device, n__counted).it == counted.it) put(p.device, n__counted, Ref(need(Py_BuildValue("(LL)", before, ever))).it);
  return {now, before + ever};
}

// Headroom.record
void record_growth(PyObject* headroom, long long growth) {
  Ref growing(get(headroom, n__growing)), known(get(headroom, n__known)), scale(get(headroom, n__scale)), bytes(new_number(growth));
  const Py_ssize_t at = PyList_GET_SIZE(growing.it);
  if (scale.it != Py_None && at < PyList_GET_SIZE(known.it)) {
    const double most = PyFloat_AsDouble(scale.it) * (double)as_number(PyList_GET_ITEM(known.it, at));
    if ((double)growth > most) {
      call_method(headroom, n_record, bytes.it);
      return;
    }
  }
  need(PyList_Append(growing.it, bytes.it));
}

// PlanFollower.note_growth at the latest hook.
void note_growth(const Parts& p, const Step& step, long long growth) {
  PyObject* d = p.director;
  const long long hook = field_number(p.light, Light.num_hooks) - 1, since = get_number(d, n__checked_at);
  const long long all = get_number(d, n__growth_bytes) + growth;
  put_number(d, n__checked_at, hook), put_number(d, n__growth_bytes, 0);
  if (hook <= since) return;
  Ref until(get(step.planned.it, n_allocated_until));
  const long long before = since >= 0 ? as_number(PyList_GET_ITEM(until.it, since)) : 0;
  const long long more = all - as_number(PyList_GET_ITEM(until.it, hook)) + before;
  if (!more) return;
  Ref memory(get(d, n__memory)), differs;
  differs.it = call_method(memory.it, n_differs, Ref(new_number(more)).it, Ref(new_number(since)).it, Ref(new_number(hook)).it,
                           step.planned.it, step.schedule.it, p.budget).taken();
  if (is_true(differs.it)) put(p.budget, n_forecast, get(p.budget, n_highest_forecast).it);
}

// Budget.check_memory and what the director makes of it.
void check_memory(const Parts& p, const Step& step) {
  PyObject* budget = p.budget;
  Ref limits(get(budget, n__limits)), most(get(limits.it, n_hbm_budget_bytes)), lending(get(budget, n_lending));
  if (most.it == Py_None || get(limits.it, n_leaving_bytes).it != Py_None || get(budget, n_forecast).it != p.plan_forecast) {
    note_growth(p, step, as_number(call_method(budget, n_check_memory).it));
    return;
  }
  const auto [allocated, cumulative] = read_memory(p);
  Ref last(get(budget, n__cumulative)), since;
  since.it = last.it == Py_None ? get(budget, n__cumulative_at_begin).taken() : Py_NewRef(last.it);
  const long long taken = get_number(budget, n__taken);
  const long long growth = since.it == Py_None ? 0 : std::max(0LL, cumulative - as_number(since.it) - taken);
  if (last.it != Py_None) record_growth(get(budget, n_headroom).it, growth);
  Ref now(new_number(allocated)), none(new_number(0));
  put(budget, n__allocated, now.it), put_number(budget, n__cumulative, cumulative);
  put(budget, n__unused, none.it), put(budget, n__taken, none.it);
  if (allocated > get_number(budget, n_peak_seen_bytes)) put(budget, n_peak_seen_bytes, now.it);
  Ref ahead(get(p.plan_forecast, n_growth_bytes));
  if (lending.it != Py_None) {
    PyObject* arguments[] = {lending.it, most.it, ahead.it, now.it};
    static PyObject* names = PyTuple_Pack(1, Ref(PyUnicode_InternFromString("allocated_bytes")).it);
    Ref set(need(PyObject_VectorcallMethod(n_set_limits, arguments, 3, names)));
  }
  if (allocated + as_number(ahead.it) > as_number(most.it)) {
    Ref nobody(need(PyTuple_New(0)));
    call_method(budget, n__make_room, none.it, ahead.it, nobody.it);
  }
  note_growth(p, step, growth);
}

// SwapIns.prefetch_planned
void prefetch_planned(const Parts& p, PyObject* due) {
  if (!due || !PyList_GET_SIZE(due)) return;
  if (get(p.budget, n_forecast).it != p.plan_forecast) {
    call_method(p.ins, n_prefetch_planned, due, p.main);
    return;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(due); i++) {
    PyObject* saved = PyList_GET_ITEM(due, i);
    if (Storage.made(saved) && field(saved, Storage.form) == whole_form) {
      if (field(saved, Storage.state) != State.on_host || call(field(saved, Storage.first)).it != Py_None) continue;
      if (prefetch(p, saved)) continue;
    }
    call_method(p.ins, n_prefetch_planned, Ref(need(PyTuple_Pack(1, saved))).it, p.main);
  }
}

#include "planned_saves.h"

// ------------------------------------------------------------------------------------------------------------------- the use

// What a use gives here; null without an error: it is Python's.
Ref used(Hooks* h, PyObject* handle) {
  Parts& p = h->p;
  if (!View.made(handle) || field(handle, View._conj) != Py_False || field(handle, View._neg) != Py_False) return Ref();
  PyObject *probe = field(handle, View.probe), *claim = field(handle, View.claim);
  if (has_moved(probe) || !is_here(h)) return Ref();
  Ref saved(Py_NewRef(field(claim, Claim.saved)));
  if (!Storage.made(saved.it)) return Ref();
  TriedLock lock(p);
  if (!lock.taken() || size_of(p.ended) || size_of(p.errors)) return Ref();
  Step step;
  if (!step.follows(p)) return Ref();
  PyObject* saved_at = field(handle, View.saved_at);
  const long long at_hook = as_number(PyTuple_GET_ITEM(saved_at, 1));
  const bool of_step = at_hook != NO_HOOK && equals(PyTuple_GET_ITEM(saved_at, 0), get_number(p.director, n__epoch));
  const long long save = of_step ? at_hook : EARLIER_STEP;
  if (!use_agrees(p, step, save)) return Ref();

  add_to(p.counts, n_uses, 1);
  note_operator(p);
  Ref over(finished(p));
  set_number(p.light, Light._last_used, save), set_number(p.light, Light.num_hooks, step.hook + 1);
  Ref due(locate(p, step)), back(carry_out(p, due.it, over.it));
  check_memory(p, step);
  Ref storage(restore(p, saved.it));
  if (!storage) storage.it = call_method(p.ins, n_restore, saved.it, p.main).taken();
  const bool follows = get(p.budget, n_forecast).it == p.plan_forecast;
  if (follows) count_use(p, handle, saved.it);
  else call_method(p.executor, n__count_use, handle, saved.it);
  prefetch_planned(p, back.it);
  if (field(saved.it, Storage.planned) == Py_None || !follows) call_method(p.ins, n_prefetch_after, saved.it, p.main);
  Ref view(rebuild(handle, storage.it));
  lock.finish();
  return view;
}

void find_parts(Parts& p, PyObject* executor) {
  Ref calling(need(PyImport_ImportModule("chameleon_mm.saved.calling_thread"))), autograd(need(PyImport_ImportModule("torch._C")));
  Ref of_parts(get(executor, n_parts)), lock, protects(get(executor, n_protected));
  p.executor = Py_NewRef(executor), p.director = get(executor, n_director).taken(), p.device = get(executor, n_device).taken();
  p.counts = get(executor, n_hook_counts).taken(), p.recording = get(executor, n_recording).taken();
  p.hook_lock = get(executor, n_hook_lock).taken(), lock.it = get(p.hook_lock, n_lock).taken();
  p.acquire = get(lock.it, n_acquire).taken(), p.release = get(lock.it, n_release).taken();
  p.ended = get(p.hook_lock, n_ended).taken(), p.errors = get(p.hook_lock, n_errors).taken();
  p.outs = get(of_parts.it, n_outs).taken(), p.registry = get(of_parts.it, n_registry).taken();
  p.claims = get(of_parts.it, n_claims).taken(), p.budget = get(of_parts.it, n_budget).taken();
  p.order = get(of_parts.it, n_order).taken(), p.ins = get(of_parts.it, n_ins).taken(), p.context = get(of_parts.it, n_context).taken();
  p.metrics = get(p.context, n_metrics).taken(), p.totals = get(p.metrics, n_totals).taken(), p.pool = get(p.context, n_pool).taken();
  p.transfer = get(p.context, n_transfer).taken(), p.streams = get(p.context, n_streams).taken();
  p.copy_lock = get(p.transfer, n__lock).taken(), p.queue_out = get(p.transfer, n__out).taken(), p.queue_in = get(p.transfer, n__in).taken();
  p.light = get(p.director, n_light).taken(), p.plan_forecast = get(p.director, n__plan_forecast).taken();
  p.on_claim_end = get(executor, n_on_claim_end).taken(), p.read_allocated = get(p.device, n__read_allocated).taken();
  p.protected_refs = get(protects.it, n_refs).taken(), p.is_protected = get(protects.it, n___contains__).taken();
  p.planned_queue = get(p.budget, n_planned).taken();
  p.reclaim_entries = get(get(p.budget, n_reclaim).it, n_entries).taken();
  p.this_thread = get(calling.it, n_this_thread).taken(), p.call_site = get(calling.it, n_call_site).taken();
  p.of_hooks = get(calling.it, n__OF_HOOKS).taken(), p.profiler_is_on = get(calling.it, n__profiler_is_on).taken();
  Ref dynamo(need(PyImport_ImportModule("torch._C._dynamo.eval_frame")));
  p.compiler = get(dynamo.it, n_get_eval_frame_callback).taken();
  p.current_node = get(autograd.it, n__current_autograd_node).taken();
  p.deque = class_of("collections", "deque"), p.hook_actions = class_of("chameleon_mm.executor.director", "HookActions");
  p.least_bytes = get_number(executor, n__least_bytes), p.device_index = (int)get_number(p.device, n_index);
  p.main = Py_NewRef(Py_None);
  if (!Light.made(p.light) || !PyTuple_Check(p.of_hooks) || !PyDict_Check(p.protected_refs)) {
    PyErr_SetString(PyExc_TypeError, "planned hooks: expected an executor whose director follows plans");
    throw Raised{};
  }
}

using Native = Ref (*)(Hooks*, PyObject*);

PyObject* run(Hooks* h, PyObject* argument, Native native, PyObject* otherwise) {
  try {
    Ref result(native(h, argument));
    if (result) return result.taken();
    if (PyErr_Occurred()) return nullptr;
  } catch (const Raised&) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "planned hooks: expected an object of another kind");
    return nullptr;
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_CallOneArg(otherwise, argument);
}

PyObject* on_save(PyObject* self, PyObject* t) { return run((Hooks*)self, t, saved, ((Hooks*)self)->save); }
PyObject* on_use(PyObject* self, PyObject* handle) { return run((Hooks*)self, handle, used, ((Hooks*)self)->use); }

// ------------------------------------------------------------------------------------------------------------- the type, module

int traverse(PyObject* self, visitproc visit, void* arg) {
  Hooks* h = (Hooks*)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(h->save);
  Py_VISIT(h->use);
#define VISIT(name) Py_VISIT(h->p.name);
  SWAP_PARTS(VISIT)
  return 0;
}

int clear(PyObject* self) {
  Hooks* h = (Hooks*)self;
  Py_CLEAR(h->save);
  Py_CLEAR(h->use);
#define CLEAR(name) Py_CLEAR(h->p.name);
  SWAP_PARTS(CLEAR)
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"save", on_save, METH_O, "on_save: as that of executor/hooks.py."},
    {"use", on_use, METH_O, "on_use: as that of executor/hooks.py."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_traverse, (void*)traverse}, {Py_tp_clear, (void*)clear}, {Py_tp_dealloc, (void*)dealloc}, {Py_tp_methods, methods}, {0, nullptr}};

PyType_Spec spec = {"chameleon_mm_planned.Hooks", sizeof(Hooks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyObject* hooks_type = nullptr;

PyObject* make_hooks(PyObject*, PyObject* arguments) {
  PyObject *save = nullptr, *use = nullptr, *executor = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOO:hooks", &save, &use, &executor)) return nullptr;
  return reported([&] {
    load_classes();
    PyTypeObject* type = (PyTypeObject*)hooks_type;
    Ref made(need(type->tp_alloc(type, 0)));
    Hooks* h = (Hooks*)made.it;
    h->save = Py_NewRef(save), h->use = Py_NewRef(use), h->forks = forks;
    find_parts(h->p, executor);
    Ref on_save(need(PyObject_GetAttrString(made.it, "save"))), on_use(need(PyObject_GetAttrString(made.it, "use")));
    return need(PyTuple_Pack(2, on_save.it, on_use.it));
  });
}

PyMethodDef functions[] = {
    {"hooks", make_hooks, METH_VARARGS, "The two hooks of an executor, and those that do what they do not."}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "chameleon_mm_planned", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chameleon_mm_planned() {
  if (!intern_names()) return nullptr;
  if (!(hooks_type = PyType_FromSpec(&spec))) return nullptr;
  if (!(raw_event_type = (PyTypeObject*)PyType_FromSpec(&raw_event_spec))) return nullptr;
  pthread_atfork(nullptr, nullptr, [] { forks++; });
  return PyModule_Create(&definition);
}
