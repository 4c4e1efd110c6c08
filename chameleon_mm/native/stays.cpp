// Autograd's two hooks for what stays on the device while nothing is due: executor/autograd_hooks.py line by line, without the interpreter.
//
//   save, use = hooks(save, use, parts)      // the two of executor/autograd_hooks.py, and the objects whose attributes they read
//
// The state stays where it is, in the Python objects: both ways read and write the same attributes, so each hook may take either.
// Whatever is not simple is left to the Python function, with nothing noted and nothing counted.
//
// The GIL is held throughout, but a finaliser may run Python code, and with it another thread, wherever an object is made: so the
// hooks' lock is taken here as there.

#include "hook_type.h"
#include "python_objects.h"
#include "saved_origin.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <pthread.h>
#include <cstring>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds have the hooks in Python alone"
#endif

using namespace python_objects;

namespace {

constexpr long NO_HOOK = -1, FIXED_STORAGE = -1, EARLIER_STEP = -2;  // as in Python, which a test compares

unsigned forks = 0;  // between the process that imported this and the one that runs: a parent's device is no child's

// Names of attributes, and reasons to stay, interned once.
#define NAMES(X) X(parameter) X(leaf) X(persistent) X(empty) X(small)
#define DECLARE(name) PyObject* n_##name = nullptr;
NAMES(DECLARE)

// Objects that the hooks read, in the order in which autograd_hooks.py gives them.
enum Part {
  FALLBACK_SAVE, FALLBACK_USE, COUNTS, RECORDING, ACQUIRE, RELEASE, OUTS, LEAVING, QUEUED_OUT, QUEUED_IN, ENDED, ERRORS,
  TOTALS, IS_PROTECTED, PROTECTED_REFS, REGISTRY, DIRECTOR, LIGHT, SAVES_AT_REST, ENTER_BACKWARD, BACKWARD,
  KEPT_TENSOR, ORIGIN, CURRENT_NODE, MIN_BYTES,
  PARTS
};

// Slots that the hooks read: the part of whose class each is (of KEPT_TENSOR and ORIGIN, which is the class), and its name.
#define SLOTS(X)                                                                                                       \
  X(COUNTS, saves) X(COUNTS, uses) X(RECORDING, is_over) X(OUTS, fresh) X(OUTS, waiting_bytes) X(TOTALS, kept_by_reason) \
  X(REGISTRY, epoch) X(KEPT_TENSOR, tensor) X(KEPT_TENSOR, expected) X(KEPT_TENSOR, saved_at)                           \
  X(KEPT_TENSOR, _origin) X(KEPT_TENSOR, relied) X(ORIGIN, _name) X(ORIGIN, _node_number) X(ORIGIN, _output_nr) X(ORIGIN, _ref)
#define SLOTS_OF_PLANS(X)                                                                                              \
  X(LIGHT, num_hooks) X(LIGHT, _number) X(LIGHT, _last_used) X(LIGHT, _features) X(LIGHT, _phase) X(LIGHT, _thread)     \
  X(DIRECTOR, at_rest_until) X(DIRECTOR, _epoch)

struct Hooks {
  PyObject_HEAD
  PyObject* parts[PARTS];
  size_t min_bytes;
  bool plans;
  unsigned forks;  // when they were made
#define OFFSET(part, name) Py_ssize_t part##name;
  SLOTS(OFFSET) SLOTS_OF_PLANS(OFFSET)

  template <typename Visit>
  void each(Visit visit) {
    for (PyObject*& part : parts) visit(part);
  }
};

#define FIELD(h, part, name) slot((h)->parts[part], (h)->part##name)
#define READ(h, part, name, value) (FIELD(h, part, name) && to_number(FIELD(h, part, name), value))
#define WRITE(h, part, name, value) put_number(FIELD(h, part, name), value)

bool put_number(PyObject*& at, long long value) {
  PyObject *number = PyLong_FromLongLong(value), *before = at;
  if (!number) return false;
  at = number;
  Py_XDECREF(before);
  return true;
}

bool is_over(Hooks* h) { return FIELD(h, RECORDING, is_over) == Py_True; }

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
           some_in(FIELD(h, OUTS, fresh)) || some_in(FIELD(h, OUTS, waiting_bytes)));
}

bool is_here(Hooks* h) { return forks == h->forks && c10::impl::TorchDispatchModeTLS::stack_len() == 0; }

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

// Feature that is expected at a hook, with so many parts; null: none is.
PyObject* expected_feature(Hooks* h, long long hook, Py_ssize_t parts) {
  PyObject* features = FIELD(h, LIGHT, _features);
  if (!features || !PyList_CheckExact(features) || hook >= PyList_GET_SIZE(features)) return nullptr;
  PyObject* feature = PyList_GET_ITEM(features, hook);
  return PyTuple_CheckExact(feature) && PyTuple_GET_SIZE(feature) == parts ? feature : nullptr;
}

// LightProfiler.save_agrees, but that nothing is noted: the number to note, and the feature's verdict.
bool save_agrees(Hooks* h, PyObject* kind, const at::Tensor& t, long long hook, long long number) {
  long long last = 0;
  PyObject* feature = expected_feature(h, hook, 5);
  if (!feature || !READ(h, LIGHT, _number, last)) return false;
  PyObject* shape = PyTuple_GET_ITEM(feature, 1);
  auto sizes = t.sizes();
  if (PyTuple_GET_ITEM(feature, 0) != kind || !PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != (Py_ssize_t)sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); i++)
    if (!equals(PyTuple_GET_ITEM(shape, i), sizes[i])) return false;
  return PyTuple_GET_ITEM(feature, 2) == (PyObject*)torch::getTHPDtype(t.scalar_type()) &&
         equals(PyTuple_GET_ITEM(feature, 3), number - last) && equals(PyTuple_GET_ITEM(feature, 4), FIXED_STORAGE);
}

// ------------------------------------------------------------------------------------------------------------------ the hooks

// The handle that `KeptTensor(t)` makes, its origin made first where `t` may be a result of the node that saves it. Null, with or
// without an error: Python makes it.
Ref kept(Hooks* h, PyObject* argument, const at::Tensor& t, bool by_reference, PyObject* saved_at) {
  Ref tensor(Py_NewRef(argument)), origin(Py_NewRef(Py_None)), version(PyLong_FromLongLong(t._version()));
  if (!by_reference && may_be_result(t)) {
    torch::autograd::Node* node = t.grad_fn().get();
    if (node && is_function_in_python(node)) return Ref();
    PyTypeObject* type = (PyTypeObject*)h->parts[ORIGIN];
    Ref made(type->tp_alloc(type, 0)), alias(THPVariable_Wrap(t.detach()));
    const OriginSlots at{h->ORIGIN_ref, h->ORIGIN_name, h->ORIGIN_node_number, h->ORIGIN_output_nr};
    if (!made || !alias || !note_origin(made.it, at, argument, t, node)) return Ref();
    std::swap(tensor.it, alias.it);
    std::swap(origin.it, made.it);
  }
  PyTypeObject* type = (PyTypeObject*)h->parts[KEPT_TENSOR];
  Ref handle(version ? type->tp_alloc(type, 0) : nullptr);
  if (!handle) return handle;
  slot(handle.it, h->KEPT_TENSORsaved_at) = Py_NewRef(saved_at);
  slot(handle.it, h->KEPT_TENSORexpected) = version.taken();
  slot(handle.it, h->KEPT_TENSORrelied) = Py_NewRef(Py_None);
  slot(handle.it, h->KEPT_TENSOR_origin) = origin.taken();
  slot(handle.it, h->KEPT_TENSORtensor) = tensor.taken();
  return handle;
}

// What becomes of a save here: its handle; null without an error: it is Python's. With the first thing that is noted, what may fail
// is over, but for errors that are raised.
PyObject* saved(Hooks* h, PyObject* argument) {
  PyObject* const* p = h->parts;
  PyObject* kind = (PyObject*)Py_TYPE(argument);
  if (kind != THPVariableClass && kind != ParameterClass) return nullptr;
  if (!is_here(h) || !is_over(h)) return nullptr;
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
  bool by_reference = reason == n_parameter;

  Locked lock(h);
  if (!lock.taken() || !nothing_waits(h)) return nullptr;
  long long hook = NO_HOOK, number = 0, until = 0, saves = 0;
  bool is_first = false;  // of the step or of a forward: the director notes it by itself
  if (h->plans) {
    number = (long long)at::sequence_number::peek();
    if (!READ(h, LIGHT, num_hooks, hook) || !READ(h, DIRECTOR, at_rest_until, until)) return nullptr;
    is_first = hook == 0 || FIELD(h, LIGHT, _thread) == Py_None;
    if (is_first && torch::autograd::get_current_graph_task_id() != -1) return nullptr;  // a save in a backward
    if (!is_first && (hook >= until || !save_agrees(h, kind, t, hook, number))) return nullptr;
  }
  PyObject *epoch = FIELD(h, REGISTRY, epoch), *kept_by_reason = FIELD(h, TOTALS, kept_by_reason);
  if (!epoch || !READ(h, COUNTS, saves, saves)) return nullptr;

  // All that the handle needs is made before anything is noted.
  Ref at_hook(PyLong_FromLongLong(hook)), saved_at(at_hook ? PyTuple_Pack(2, epoch, at_hook.it) : nullptr);
  Ref handle(saved_at ? kept(h, argument, t, by_reference, saved_at.it) : Ref());
  if (!handle || !kept_by_reason || !PyDict_Check(kept_by_reason)) return nullptr;
  PyObject* count = PyDict_GetItemWithError(kept_by_reason, reason);  // a Counter: none is 0
  long long before = 0;
  if (PyErr_Occurred() || (count && !to_number(count, before))) return nullptr;
  if (is_first) {
    PyObject* arguments[] = {argument};
    Ref noted(PyObject_Vectorcall(p[SAVES_AT_REST], arguments, 1, nullptr));
    if (!noted || !equals(noted.it, hook)) return nullptr;
  }
  Ref more(PyLong_FromLongLong(before + 1));
  if (!more || PyDict_SetItem(kept_by_reason, reason, more.it) != 0) return nullptr;
  if (h->plans && !is_first && (!WRITE(h, LIGHT, _number, number) || !WRITE(h, LIGHT, num_hooks, hook + 1))) return nullptr;
  if (!WRITE(h, COUNTS, saves, saves + 1)) return nullptr;
  return handle.taken();
}

// Class in Python of the node that runs, as `type(torch._C._current_autograd_node())` is: of nodes in C++ it hangs on the node's
// own class alone, and is asked for once. Null: there is none, or an error, which is set.
PyObject* kind_of_node(Hooks* h) {
  static std::unordered_map<std::type_index, PyObject*> known;
  auto node = torch::autograd::get_current_node();
  if (!node) return nullptr;
  const bool in_python = is_function_in_python(node.get());
  if (!in_python) {
    auto found = known.find(typeid(*node));
    if (found != known.end()) return found->second;
  }
  Ref asked(PyObject_Vectorcall(h->parts[CURRENT_NODE], nullptr, 0, nullptr));
  if (!asked) return nullptr;
  PyObject* kind = (PyObject*)Py_TYPE(asked.it);
  if (!in_python) known.emplace(typeid(*node), Py_NewRef(kind));
  return kind;  // whose node autograd holds while it runs
}

// What a use gives here; null without an error: it is Python's.
PyObject* used(Hooks* h, PyObject* handle) {
  PyObject* const* p = h->parts;
  if ((PyObject*)Py_TYPE(handle) != p[KEPT_TENSOR] || !is_over(h)) return nullptr;
  PyObject *argument = slot(handle, h->KEPT_TENSORtensor), *expected = slot(handle, h->KEPT_TENSORexpected);
  if (!argument || argument == Py_None || !expected || !THPVariable_Check(argument)) return nullptr;
  const at::Tensor& t = THPVariable_Unpack(argument);
  if (t.is_inference() || !equals(expected, t._version())) return nullptr;
  Ref result(Py_NewRef(argument));  // another thread may move it
  long long uses = 0;
  if (!READ(h, COUNTS, uses, uses)) return nullptr;
  if (h->plans) {
    if (!is_here(h)) return nullptr;
    Locked lock(h);
    if (!lock.taken() || !nothing_waits(h)) return nullptr;
    PyObject* saved_at = slot(handle, h->KEPT_TENSORsaved_at);
    long long hook = 0, until = 0, last = 0, epoch = 0, save = EARLIER_STEP;
    if (!READ(h, LIGHT, num_hooks, hook) || !READ(h, DIRECTOR, at_rest_until, until) || hook >= until) return nullptr;
    if (FIELD(h, LIGHT, _phase) != p[BACKWARD] && torch::autograd::get_current_node()) {  // as LightProfiler._used_elsewhere
      Ref entered(PyObject_Vectorcall(p[ENTER_BACKWARD], nullptr, 0, nullptr));
      if (!entered) return nullptr;
    }
    if (!READ(h, LIGHT, _last_used, last) || !READ(h, DIRECTOR, _epoch, epoch) || !saved_at || !PyTuple_CheckExact(saved_at) ||
        PyTuple_GET_SIZE(saved_at) != 2)
      return nullptr;
    long long at_hook = NO_HOOK;
    if (!to_number(PyTuple_GET_ITEM(saved_at, 1), at_hook)) return nullptr;
    if (equals(PyTuple_GET_ITEM(saved_at, 0), epoch) && at_hook != NO_HOOK) save = at_hook;
    PyObject *feature = expected_feature(h, hook, 2), *kind = feature ? kind_of_node(h) : nullptr;
    if (!kind || PyTuple_GET_ITEM(feature, 0) != kind || !equals(PyTuple_GET_ITEM(feature, 1), last - save)) return nullptr;
    if (!WRITE(h, LIGHT, _last_used, save) || !WRITE(h, LIGHT, num_hooks, hook + 1)) return nullptr;
  }
  if (!WRITE(h, COUNTS, uses, uses + 1)) return nullptr;
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
  if (!PyType_Check(h->parts[KEPT_TENSOR]) || !PyType_Check(h->parts[ORIGIN]) || !PyDict_CheckExact(h->parts[PROTECTED_REFS])) {
    PyErr_SetString(PyExc_TypeError, "native hooks: expected a class of handles and a dict of protected storages");
    return nullptr;
  }
  h->min_bytes = PyLong_AsSize_t(h->parts[MIN_BYTES]);
  if (PyErr_Occurred()) return nullptr;
  h->plans = h->parts[LIGHT] != Py_None;
  h->forks = forks;
  auto class_of = [h](Part part) { return PyType_Check(h->parts[part]) ? h->parts[part] : (PyObject*)Py_TYPE(h->parts[part]); };
#define FIND(part, name) \
  if (!slot_offset(class_of(part), #name, h->part##name)) return nullptr;
  SLOTS(FIND)
  if (h->plans) {
    SLOTS_OF_PLANS(FIND)
  }
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
    {"hooks", make_hooks, METH_VARARGS, "The two hooks, of the parts in the order of autograd_hooks.py."},
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
