// Autograd's two hooks for what moves by a plan, without the interpreter: executor/executor.py and adaptive/plan_follower.py, of a
// step on a GPU that follows its plan hook for hook and only swaps.
//
//   save, use = hooks(save, use, executor)         // the two that do what is not done here
//
// The state stays where it is, in the Python objects: both ways read and write the same attributes, so each hook may take either.
// A hook is Python's, with nothing noted, where anything about the step, the thread or the tensor is not usual; so is, within a hook,
// the single thing that is not usual: a form, a part, a refusal, a queue of small moves. So every rule is Python's, and said there.
//
// The GIL is held but for copies and allocations. A finaliser may run Python code, and with it another thread, wherever an object goes: so the hooks'
// lock is taken here as there, and what the functions use is held by references of their own, or by what the lock guards.

#include "allocator_memory.h"
#include "hook_type.h"
#include "planned_moves.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <pthread.h>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds have the hooks in Python alone"
#endif

using namespace swap;

namespace {

constexpr long long NO_HOOK = -1, EARLIER_STEP = -2, NEW_STORAGE = 0, FIXED_STORAGE = -1;
constexpr long long BEHIND_ALL = 1LL << 62;  // as in Python, which a test compares

unsigned forks = 0;  // between the process that imported this and the one that runs: a parent's device is no child's

struct Hooks {
  PyObject_HEAD
  Parts p;
  PyObject *save, *use;
  unsigned forks;  // when they were made

  template <typename Visit>
  void each(Visit visit) {
    visit(save), visit(use);
    p.each(visit);
  }
};

class TriedLock {  // the hooks' lock, taken if it is free; what waited for it is done before it is given back, and after
 public:
  explicit TriedLock(const Parts& p) : p_(p) { taken_ = call(p.acquire, Py_False).it == Py_True; }
  ~TriedLock() {
    if (taken_) release();
  }
  TriedLock(const TriedLock&) = delete;
  TriedLock& operator=(const TriedLock&) = delete;
  bool is_free() const { return taken_ && !size_of(p_.ended) && !size_of(p_.errors); }  // taken, and nothing waits for it

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

#include "planned_due.h"
#include "planned_saves.h"

// ------------------------------------------------------------------------------------------------------------------- the use

// What the director makes of a use, and all that is due then. Returns what is to be swapped in.
Ref note_use(Parts& p, const Step& step, PyObject* saved_at, PyObject* saved) {
  const long long at_hook = as_number(PyTuple_GET_ITEM(saved_at, 1));
  const bool of_step = at_hook != NO_HOOK && equals(PyTuple_GET_ITEM(saved_at, 0), field_number(p.director, Follower._epoch));
  const long long save = of_step ? at_hook : EARLIER_STEP;
  const bool moves = saved != Py_None;
  add_to(p.counts, n_uses, 1);
  note_operator(p);
  if (step.hook == 0 || !use_agrees(p, step, save)) {  // as at the first use of a backward
    Ref over(finished(p));
    call_method(p.director, n_on_use, saved_at, saved, over.it);
    return advance_as_told(p, over.it, moves);
  }
  set_number(p.light, Light._last_used, save), set_number(p.light, Light.num_hooks, step.hook + 1);
  if (!moves && is_at_rest(p, step)) return Ref();
  Ref over(finished(p)), due(locate(p, step));
  return advance(p, step, due.it, over.it, moves);
}

// What a use of what stayed gives here: Executor._use_unmoved.
Ref used_unmoved(Hooks* h, PyObject* handle) {
  Parts& p = h->p;
  Ref t(Py_NewRef(field(handle, Kept.tensor)));
  if (!THPVariable_Check(t.it) || version_of(t.it) != field_number(handle, Kept.expected) || !is_here(h)) return Ref();
  TriedLock lock(p);
  Step step;
  if (!lock.is_free() || !step.follows(p)) return Ref();
  Ref saved_at(Py_NewRef(field(handle, Kept.saved_at))), back(note_use(p, step, saved_at.it, Py_None));
  prefetch_planned(p, back.it);
  lock.finish();
  return t;
}

// What a use gives here; null without an error: it is Python's.
Ref used(Hooks* h, PyObject* handle) {
  Parts& p = h->p;
  if (Kept.made(handle)) return used_unmoved(h, handle);
  if (!View.made(handle) || field(handle, View._conj) != Py_False || field(handle, View._neg) != Py_False) return Ref();
  PyObject *probe = field(handle, View.probe), *claim = field(handle, View.claim);
  if (has_moved(probe) || !is_here(h)) return Ref();
  Ref saved(Py_NewRef(field(claim, Claim.saved)));
  if (!Storage.made(saved.it)) return Ref();
  TriedLock lock(p);
  Step step;
  if (!lock.is_free() || !step.follows(p)) return Ref();
  Ref back(note_use(p, step, field(handle, View.saved_at), saved.it)), storage(restore(p, saved.it));
  if (!storage) storage.it = call_method(p.ins, n_restore, saved.it, p.main).taken();
  const bool follows = field(p.budget, Budget.forecast) == p.plan_forecast;
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
  p.budget = get(of_parts.it, n_budget).taken();
  p.order = get(of_parts.it, n_order).taken(), p.ins = get(of_parts.it, n_ins).taken(), p.context = get(of_parts.it, n_context).taken();
  p.metrics = get(p.context, n_metrics).taken(), p.totals = get(p.metrics, n_totals).taken(), p.pool = get(p.context, n_pool).taken();
  p.ledger = get(p.pool, n__ledger).taken();
  Ref transfer(get(p.context, n_transfer));
  p.streams = get(p.context, n_streams).taken(), p.copy_lock = get(transfer.it, n__lock).taken();
  p.out.load(get(transfer.it, n__out).it), p.in.load(get(transfer.it, n__in).it);
  Ref claims(get(of_parts.it, n_claims));
  p.storages = get(p.registry, n__storages).taken(), p.by_storage = get(claims.it, n_by_storage).taken();
  p.last_saves = get(claims.it, n__last_saves).taken();
  p.lending = get(p.budget, n_lending).taken();
  p.hook = p.lending == Py_None ? Py_NewRef(Py_None) : get(p.lending, n__hook).taken();
  p.raw_hook = p.lending == Py_None ? Py_NewRef(Py_None) : get(p.hook, n__hook).taken();
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
  p.history_is_on = get(autograd.it, n__cuda_isHistoryEnabled).taken();
  p.memory_fraction = get(autograd.it, n__cuda_getMemoryFraction).taken(), p.index = get(p.device, n_index).taken();
  p.deque = class_of("collections", "deque");
  Ref device_class(class_of("chameleon_mm.device.cuda.cuda_device", "CudaDevice"));
  p.least_bytes = get_number(executor, n__least_bytes), p.device_index = (int)get_number(p.device, n_index);
  p.main = Py_NewRef(Py_None);
  Ref reader(PyObject_GetAttrString(p.read_allocated, "func"));  // of a partial, whose function is C's where the helper reads
  if (!reader) PyErr_Clear();
  p.reads_here = reader && PyCFunction_Check(reader.it);
  const bool lends = p.lending == Py_None || (LendingOf.made(p.lending) && AllocatorHook.made(p.hook));
  const bool on_device = (PyObject*)Py_TYPE(p.device) == device_class.it && Stream.made(p.out.stream) && Stream.made(p.in.stream);
  const bool by_plan = Follower.made(p.director) && Budget.made(p.budget) && Light.made(p.light) && Outs.made(p.outs);
  const bool counted = Ledger.made(p.ledger) && Totals.made(p.totals) && PyTuple_Check(p.of_hooks) && PyDict_Check(p.protected_refs);
  if (!lends || !on_device || !by_plan || !counted) {
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

PyObject* hooks_type = nullptr;

PyObject* make_hooks(PyObject*, PyObject* arguments) {
  PyObject *save = nullptr, *use = nullptr, *executor = nullptr;
  if (!PyArg_ParseTuple(arguments, "OOO:hooks", &save, &use, &executor)) return nullptr;
  return reported([&] {
    load_classes();
    load_pool_classes();
    PyTypeObject* type = (PyTypeObject*)hooks_type;
    Ref made(need(type->tp_alloc(type, 0)));
    Hooks* h = (Hooks*)made.it;
    h->save = Py_NewRef(save), h->use = Py_NewRef(use), h->forks = forks;
    find_parts(h->p, executor);
    Ref on_save(need(PyObject_GetAttrString(made.it, "save"))), on_use(need(PyObject_GetAttrString(made.it, "use")));
    return need(PyTuple_Pack(2, on_save.it, on_use.it));
  });
}

PyObject* constants(PyObject*, PyObject*) {
  return Py_BuildValue(
      "{sLsLsLsLsLsLsdsL}", "NO_HOOK", NO_HOOK, "EARLIER_STEP", EARLIER_STEP, "NEW_STORAGE", NEW_STORAGE, "FIXED_STORAGE",
      FIXED_STORAGE, "BEHIND_ALL", BEHIND_ALL, "SEGMENT_BYTES", SEGMENT_BYTES, "SHORT_SHARE", SHORT_SHARE, "ALLOCATION_UNIT_BYTES",
      ALLOCATION_UNIT_BYTES);
}

PyMethodDef functions[] = {
    {"constants", constants, METH_NOARGS, "Numbers that Python has too, by their names there."},
    {"hooks", make_hooks, METH_VARARGS, "The two hooks of an executor, and those that do what they do not."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "chameleon_mm_planned", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chameleon_mm_planned() {
  if (!intern_names()) return nullptr;
  if (!(hooks_type = python_objects::HookType<Hooks>::make("chameleon_mm_planned.Hooks", on_save, on_use))) return nullptr;
  if (!(raw_event_type = (PyTypeObject*)PyType_FromSpec(&raw_event_spec))) return nullptr;
  pthread_atfork(nullptr, nullptr, [] { forks++; });
  return PyModule_Create(&definition);
}
