// Autograd's two hooks for what stays on the device while nothing is due: executor/hooks.py line by line, without the interpreter.
//
//   save, use = hooks(save, use, parts)      // the two of executor/hooks.py, and the objects whose attributes they read
//
// The state stays where it is, in the Python objects: both ways read and write the same attributes, so each hook may take either.
// Whatever is not simple is left to the Python function, with nothing noted and nothing counted.
//
// The GIL is held throughout, but a finaliser may run Python code, and with it another thread, wherever an object is made: so the
// hooks' lock is taken here as there.

#include "hook_type.h"
#include "python_objects.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <pthread.h>
#include <cstring>
#include <typeinfo>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds have the hooks in Python alone"
#endif

using namespace python_objects;

namespace {

constexpr long NO_HOOK = -1, FIXED_STORAGE = -1, EARLIER_STEP = -2;  // as in Python, which a test compares

unsigned forks = 0;  // between the process that imported this and the one that runs: a parent's device is no child's

// Names of attributes, interned once.
#define NAMES(X)                                                                                                       \
  X(saves) X(uses) X(is_over) X(fresh) X(waiting_bytes) X(_tight) X(_small_limit) X(nbytes) X(kept_by_reason)           \
  X(num_hooks) X(_number) X(_last_used) X(_features) X(at_rest_until) X(epoch) X(_epoch) X(parameter) X(leaf)           \
  X(persistent) X(empty) X(small)
#define DECLARE(name) PyObject* n_##name = nullptr;
NAMES(DECLARE)

// Objects that the hooks read, in the order in which hooks.py gives them.
enum Part {
  FALLBACK_SAVE, FALLBACK_USE, COUNTS, RECORDING, ACQUIRE, RELEASE, OUTS, LEAVING, QUEUED_OUT, QUEUED_IN, ENDED, ERRORS, LIMIT,
  TOTALS, IS_PROTECTED, PROTECTED_REFS, REGISTRY, DIRECTOR, LIGHT, SMALL, ADD_SMALL, CAPTURING, KEPT_TENSOR, CURRENT_NODE, DEVICE,
  MIN_BYTES,
  PARTS
};

struct Hooks {
  PyObject_HEAD
  PyObject* parts[PARTS];
  size_t min_bytes;
  c10::Device device;
  bool plans;
  unsigned forks;  // when they were made
  Py_ssize_t tensor_at, expected_at, moved_at, saved_at_at, origin_at;  // offsets of KeptTensor's slots

  template <typename Visit>
  void each(Visit visit) {
    for (PyObject*& part : parts) visit(part);
  }
};

bool is_over(PyObject* recording) {
  Ref at(PyObject_GetAttr(recording, n_is_over));
  if (!at) forget_error();
  return at.it == Py_True;
}

// ----------------------------------------------------------------------------------------------------------- the conditions

class Locked {  // the hooks' lock, taken if it is free
 public:
  explicit Locked(Hooks* hooks) : hooks_(hooks) {
    PyObject* arguments[] = {Py_False};
    Ref got(PyObject_Vectorcall(hooks->parts[ACQUIRE], arguments, 1, nullptr));
    taken_ = got.it == Py_True;
    if (!got) forget_error();
  }
  ~Locked() {
    if (!taken_) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Ref done(PyObject_Vectorcall(hooks_->parts[RELEASE], nullptr, 0, nullptr));
    if (!done) PyErr_Clear();
    PyErr_Restore(type, value, traceback);
  }
  bool taken() const { return taken_; }

 private:
  Hooks* hooks_;
  bool taken_;
};

bool nothing_waits(Hooks* h) {
  PyObject* const* p = h->parts;
  return !(some_in(p[LEAVING]) || some_in(p[QUEUED_OUT]) || some_in(p[QUEUED_IN]) || some_in(p[ENDED]) || some_in(p[ERRORS]) ||
           some_in(p[OUTS], n_fresh) || some_in(p[OUTS], n_waiting_bytes));
}

bool wants_check(Hooks* h) {  // SwapMemoryLimit.wants_check
  PyObject* limit = h->parts[LIMIT];
  if (limit == Py_None) return false;
  long long nbytes = 0, most = 0;
  return some_in(limit, n__tight) || !read_number(h->parts[SMALL], n_nbytes, nbytes) ||
         !read_number(limit, n__small_limit, most) || nbytes > most;
}

bool is_here(Hooks* h) { return forks == h->forks && c10::impl::TorchDispatchModeTLS::stack_len() == 0; }

// Whether a small tensor may be moved later: `is_plain` in hooks.py, for a CUDA device alone. False with an error set: it asked
// Python.
bool is_plain(Hooks* h, const at::Tensor& t) {
  static const c10::DispatchKeySet wrapped{
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
      c10::DispatchKey::Batched};
  if (!h->device.is_cuda() || t.device() != h->device) return false;
  if (t.layout() != c10::kStrided || t.is_nested() || t.is_quantized() || t._is_zerotensor()) return false;
  if (t.key_set().has_any(wrapped)) return false;
  Ref capturing(PyObject_Vectorcall(h->parts[CAPTURING], nullptr, 0, nullptr));
  return capturing.it == Py_False;
}

bool is_function_in_python(torch::autograd::Node* node) {
  return std::strcmp(typeid(*node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// Whether `t` may be a result of the node that saves it, or a view of one: KeptTensor's own rule.
bool may_be_result(const at::Tensor& t) {
  if (t.is_view()) return true;
  auto* meta = torch::autograd::impl::get_autograd_meta(t);
  auto* node = meta ? meta->grad_fn_.get() : nullptr;
  return node && (node->sequence_nr() + 1 == at::sequence_number::peek() || is_function_in_python(node));
}

// LightProfiler.save_agrees, but that nothing is noted: the number to note, and the feature's verdict.
bool save_agrees(PyObject* light, PyObject* kind, const at::Tensor& t, long long hook, long long number) {
  Ref features(PyObject_GetAttr(light, n__features));
  long long last = 0;
  if (!features || !PyList_CheckExact(features.it) || hook >= PyList_GET_SIZE(features.it) || !read_number(light, n__number, last)) {
    forget_error();
    return false;
  }
  PyObject* feature = PyList_GET_ITEM(features.it, hook);
  if (!PyTuple_CheckExact(feature) || PyTuple_GET_SIZE(feature) != 5) return false;
  PyObject* shape = PyTuple_GET_ITEM(feature, 1);
  auto sizes = t.sizes();
  if (PyTuple_GET_ITEM(feature, 0) != kind || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != (Py_ssize_t)sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); i++)
    if (!equals(PyTuple_GET_ITEM(shape, i), sizes[i])) return false;
  return PyTuple_GET_ITEM(feature, 2) == (PyObject*)torch::getTHPDtype(t.scalar_type()) &&
         equals(PyTuple_GET_ITEM(feature, 3), number - last) && equals(PyTuple_GET_ITEM(feature, 4), FIXED_STORAGE);
}

// ------------------------------------------------------------------------------------------------------------------ the hooks

// What becomes of a save here: its handle; null without an error: it is Python's. With the first thing that is noted, what may fail
// is over, but for errors that are raised.
PyObject* saved(Hooks* h, PyObject* argument) {
  PyObject* const* p = h->parts;
  PyObject* kind = (PyObject*)Py_TYPE(argument);
  if (kind != THPVariableClass && kind != ParameterClass) return nullptr;
  if (!is_here(h) || !is_over(p[RECORDING])) return nullptr;
  const at::Tensor& t = THPVariable_Unpack(argument);
  if (!t.unsafeGetTensorImpl()->has_storage() || t.is_inference() || t.is_nested()) return nullptr;
  PyObject* reason = nullptr;
  size_t nbytes = 0;
  if (kind == ParameterClass) {
    reason = n_parameter;
  } else if (t.is_view()) {
    Ref base(THPVariable_Wrap(t._base()));
    if (!base) return nullptr;
    PyObject* type = (PyObject*)Py_TYPE(base.it);
    if (type == ParameterClass) reason = n_parameter;
    else if (type != THPVariableClass) return nullptr;
  }
  if (!reason && t.requires_grad() && t.is_leaf()) reason = n_leaf;
  if (!reason) {
    nbytes = t.storage().nbytes();
    if (PyDict_GET_SIZE(p[PROTECTED_REFS])) {
      Ref storage(THPStorage_Wrap(t.storage()));
      if (!storage) return nullptr;
      Ref key(PyLong_FromVoidPtr(storage.it));  // its id
      int in = key ? PyDict_Contains(p[PROTECTED_REFS], key.it) : -1;
      if (in > 0) {
        PyObject* arguments[] = {storage.it};
        Ref protects(PyObject_Vectorcall(p[IS_PROTECTED], arguments, 1, nullptr));
        in = protects ? protects.it == Py_True : -1;
      }
      if (in < 0) return nullptr;
      if (in) reason = n_persistent;
    }
    if (!reason) {
      if (nbytes >= h->min_bytes) return nullptr;
      reason = nbytes ? n_small : n_empty;
    }
  }
  bool by_reference = reason == n_parameter, moves_later = nbytes && p[SMALL] != Py_None;
  if ((!by_reference && may_be_result(t)) || (moves_later && !is_plain(h, t))) return nullptr;

  Locked lock(h);
  if (!lock.taken() || !nothing_waits(h) || wants_check(h)) return nullptr;
  long long hook = NO_HOOK, number = 0, epoch = 0;
  PyObject* light = p[LIGHT];
  if (h->plans) {
    long long until = 0;
    number = (long long)at::sequence_number::peek();
    if (!read_number(light, n_num_hooks, hook) || !read_number(p[DIRECTOR], n_at_rest_until, until) || hook >= until ||
        !save_agrees(light, kind, t, hook, number))
      return nullptr;
  }
  long long saves = 0;
  if (!read_number(p[REGISTRY], n_epoch, epoch) || !read_number(p[COUNTS], n_saves, saves)) return nullptr;

  // All that the handle needs is made before anything is noted.
  PyTypeObject* kept = (PyTypeObject*)p[KEPT_TENSOR];
  Ref handle(kept->tp_alloc(kept, 0)), kept_by_reason(PyObject_GetAttr(p[TOTALS], n_kept_by_reason));
  PyObject* saved_at = Py_BuildValue("(LL)", epoch, hook);
  PyObject* version = PyLong_FromLongLong(t._version());
  if (handle) {
    slot(handle.it, h->saved_at_at) = saved_at;
    slot(handle.it, h->expected_at) = version;
    slot(handle.it, h->moved_at) = Py_NewRef(Py_None);
    slot(handle.it, h->origin_at) = Py_NewRef(Py_None);
    slot(handle.it, h->tensor_at) = Py_NewRef(argument);
  } else {
    Py_XDECREF(saved_at);
    Py_XDECREF(version);
    return nullptr;
  }
  if (!kept_by_reason || !saved_at || !version) return nullptr;
  if (!PyDict_Check(kept_by_reason.it)) return nullptr;
  PyObject* count = PyDict_GetItemWithError(kept_by_reason.it, reason);  // a Counter: none is 0
  long long before = 0;
  if (PyErr_Occurred() || (count && !to_number(count, before))) return nullptr;
  Ref more(PyLong_FromLongLong(before + 1));
  if (!more || PyDict_SetItem(kept_by_reason.it, reason, more.it) != 0) return nullptr;
  if (moves_later) {
    Ref size(PyLong_FromSize_t(nbytes));
    PyObject* arguments[] = {handle.it, size.it};
    Ref done(size ? PyObject_Vectorcall(p[ADD_SMALL], arguments, 2, nullptr) : nullptr);
    if (!done) return nullptr;
  }
  if (h->plans && (!write_number(light, n__number, number) || !write_number(light, n_num_hooks, hook + 1))) return nullptr;
  if (!write_number(p[COUNTS], n_saves, saves + 1)) return nullptr;
  return Py_NewRef(handle.it);
}

// What a use gives here; null without an error: it is Python's.
PyObject* used(Hooks* h, PyObject* handle) {
  PyObject* const* p = h->parts;
  if ((PyObject*)Py_TYPE(handle) != p[KEPT_TENSOR] || !is_over(p[RECORDING])) return nullptr;
  PyObject *argument = slot(handle, h->tensor_at), *expected = slot(handle, h->expected_at);
  if (!argument || argument == Py_None || !expected || !THPVariable_Check(argument)) return nullptr;
  const at::Tensor& t = THPVariable_Unpack(argument);
  if (t.is_inference() || !equals(expected, t._version())) return nullptr;
  Ref result(Py_NewRef(argument));  // another thread may move it
  long long uses = 0;
  if (!read_number(p[COUNTS], n_uses, uses)) return nullptr;
  if (h->plans) {
    if (!is_here(h)) return nullptr;
    Locked lock(h);
    if (!lock.taken() || !nothing_waits(h)) return nullptr;
    PyObject* light = p[LIGHT];
    PyObject* saved_at = slot(handle, h->saved_at_at);
    long long hook = 0, until = 0, last = 0, epoch = 0, save = EARLIER_STEP;
    if (!read_number(light, n_num_hooks, hook) || !read_number(p[DIRECTOR], n_at_rest_until, until) || hook >= until ||
        !read_number(light, n__last_used, last) || !read_number(p[DIRECTOR], n__epoch, epoch) || !saved_at ||
        !PyTuple_CheckExact(saved_at) || PyTuple_GET_SIZE(saved_at) != 2)
      return nullptr;
    long long at_hook = NO_HOOK;
    if (!to_number(PyTuple_GET_ITEM(saved_at, 1), at_hook)) return nullptr;
    if (equals(PyTuple_GET_ITEM(saved_at, 0), epoch) && at_hook != NO_HOOK) save = at_hook;
    Ref features(PyObject_GetAttr(light, n__features)), node(PyObject_Vectorcall(p[CURRENT_NODE], nullptr, 0, nullptr));
    if (!features || !node || !PyList_CheckExact(features.it) || hook >= PyList_GET_SIZE(features.it)) return nullptr;
    PyObject* feature = PyList_GET_ITEM(features.it, hook);
    if (!PyTuple_CheckExact(feature) || PyTuple_GET_SIZE(feature) != 2 ||
        PyTuple_GET_ITEM(feature, 0) != (PyObject*)Py_TYPE(node.it) || !equals(PyTuple_GET_ITEM(feature, 1), last - save))
      return nullptr;
    if (!write_number(light, n__last_used, save) || !write_number(light, n_num_hooks, hook + 1)) return nullptr;
  }
  if (!write_number(p[COUNTS], n_uses, uses + 1)) return nullptr;
  return Py_NewRef(result.it);
}

using Native = PyObject* (*)(Hooks*, PyObject*);

PyObject* run(Hooks* h, PyObject* argument, Native native, Part otherwise) {
  PyObject* result = nullptr;
  try {
    result = native(h, argument);
  } catch (const std::exception&) {  // whatever torch refuses, Python is refused as well, and says so
  }
  if (result) return result;
  if (PyErr_Occurred()) return nullptr;
  PyObject* arguments[] = {argument};
  return PyObject_Vectorcall(h->parts[otherwise], arguments, 1, nullptr);
}

PyObject* on_save(PyObject* self, PyObject* t) { return run((Hooks*)self, t, saved, FALLBACK_SAVE); }
PyObject* on_use(PyObject* self, PyObject* handle) { return run((Hooks*)self, handle, used, FALLBACK_USE); }

// -------------------------------------------------------------------------------------------------------------- the type, module

PyObject* hooks_type = nullptr;

PyObject* make_hooks(PyObject*, PyObject* arguments) {
  if (PyTuple_GET_SIZE(arguments) != PARTS) {
    PyErr_Format(PyExc_TypeError, "native hooks: expected %d parts, got %zd", (int)PARTS, PyTuple_GET_SIZE(arguments));
    return nullptr;
  }
  PyTypeObject* type = (PyTypeObject*)hooks_type;
  Ref made(type->tp_alloc(type, 0));
  if (!made) return nullptr;
  Hooks* h = (Hooks*)made.it;
  for (int i = 0; i < PARTS; i++) h->parts[i] = Py_NewRef(PyTuple_GET_ITEM(arguments, i));
  if (!PyType_Check(h->parts[KEPT_TENSOR]) || !PyDict_CheckExact(h->parts[PROTECTED_REFS]) || !THPDevice_Check(h->parts[DEVICE])) {
    PyErr_SetString(PyExc_TypeError, "native hooks: expected a class of handles, a dict of protected storages and a device");
    return nullptr;
  }
  h->min_bytes = PyLong_AsSize_t(h->parts[MIN_BYTES]);
  if (PyErr_Occurred()) return nullptr;
  h->device = ((THPDevice*)h->parts[DEVICE])->device;
  h->plans = h->parts[LIGHT] != Py_None;
  h->forks = forks;
  PyObject* kept = h->parts[KEPT_TENSOR];
  if (!slot_offset(kept, "tensor", h->tensor_at) || !slot_offset(kept, "expected", h->expected_at) ||
      !slot_offset(kept, "moved", h->moved_at) || !slot_offset(kept, "saved_at", h->saved_at_at) ||
      !slot_offset(kept, "_origin", h->origin_at))
    return nullptr;
  Ref save(PyObject_GetAttrString(made.it, "save")), use(PyObject_GetAttrString(made.it, "use"));
  return save && use ? PyTuple_Pack(2, save.it, use.it) : nullptr;
}

// Whether a tensor is the result of a function written in Python: what the hooks go by, for a test of this build.
PyObject* is_python_functions(PyObject*, PyObject* t) {
  if (!THPVariable_Check(t)) return PyErr_Format(PyExc_TypeError, "expected a tensor, got %R", t);
  auto* meta = torch::autograd::impl::get_autograd_meta(THPVariable_Unpack(t));
  return PyBool_FromLong(meta && meta->grad_fn_ && is_function_in_python(meta->grad_fn_.get()));
}

PyMethodDef functions[] = {
    {"hooks", make_hooks, METH_VARARGS, "The two hooks, of the parts in the order of hooks.py."},
    {"is_python_functions", is_python_functions, METH_O, "Whether a tensor is the result of a function written in Python."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "chameleon_mm_stays", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chameleon_mm_stays() {
#define INTERN(name) \
  if (!(n_##name = PyUnicode_InternFromString(#name))) return nullptr;
  NAMES(INTERN)
  if (!(hooks_type = HookType<Hooks>::make("chameleon_mm_stays.Hooks", on_save, on_use))) return nullptr;
  pthread_atfork(nullptr, nullptr, [] { forks++; });
  return PyModule_Create(&definition);
}
