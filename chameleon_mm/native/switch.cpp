// Takes a session's two hooks off its thread for a step that has nothing to move, and puts them back in the middle of the step
// where torch's caching allocator finds no block and is about to ask the device for more.
//
//   switch = HookSwitch(device, save)      // the hook of a save, as autograd has it
//   now, peak = switch.off(limit_bytes)    // both are off on this thread: bytes allocated now, and the allocator's peak. Or None,
//                                          // with nothing changed: more than that is reserved, others are on top of them, this
//                                          // thread has none of them, is tracing, or has hooks disabled
//   switch.on()                            // True: they were off until now, and nothing was asked of the device meanwhile. None:
//                                          // not here, or not now: in a backward, or on another thread
//
// Memory that is already reserved is handed out without a callback. So a forward without hooks uses that alone, or gets its hooks
// back at the operator that needs more; what it saved before stays on the device. Autograd's threads copy the hooks as a backward
// begins, and nothing is put back there: steps that save in a backward keep their hooks.
//
// The allocator calls under its own lock and as a rule without the GIL, so the hooks are moved, there and back: no reference is
// counted.

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/python_headers.h>

#include "free_memory_callback.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds keep their hooks"
#endif

namespace {

using Hooks = std::pair<c10::SafePyObject, c10::SafePyObject>;
using Stack = at::SavedTensorDefaultHooks;

std::atomic<size_t> misses{0};  // of the allocator, on any thread

class Switch;
thread_local std::shared_ptr<Switch> off_here;  // the one whose hooks are off on this thread

class Switch : public std::enable_shared_from_this<Switch> {
 public:
  // `save`: only compared, never dereferenced.
  Switch(c10::DeviceIndex device, const PyObject* save) : device_(device), save_(save) {}
  Switch(const Switch&) = delete;

  // Bytes allocated now and the most at once; nothing: the hooks are not taken off.
  std::optional<std::pair<int64_t, int64_t>> off(size_t limit_bytes) {
    if (off_here || taken_) return {};
    const auto& state = Stack::get_tls_state();
    if (state.stack.empty() || state.is_tracing || state.disabled_error_message) return {};
    if (!are_mine(state.stack.top())) return {};  // others are on top of them
    const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device_);
    if (static_cast<size_t>(stats.reserved_bytes[0].current) > limit_bytes) return {};
    misses_before_ = misses;
    off_ = true;
    taken_.emplace(Stack::pop_hooks());
    spare_.emplace(*taken_);
    below_ = state.stack.size();
    off_here = shared_from_this();
    return std::pair(stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak);
  }

  // Nothing: they are not off on this thread, or a backward runs on it, whose stack of hooks is its own.
  std::optional<bool> on() {
    if (off_here.get() != this || torch::autograd::get_current_graph_task_id() != -1) return {};
    const auto stored = std::exchange(off_here, nullptr);
    const bool were_off = std::exchange(off_, false);
    put_back(were_off ? *taken_ : *spare_);
    taken_.reset();
    spare_.reset();
    return were_off && misses == misses_before_;
  }

  // In the middle of an allocation on the thread that has them off. A backward there has a stack of its own, which goes with it.
  void on_again() {
    if (!off_ || Stack::get_tls_state().disabled_error_message || torch::autograd::get_current_graph_task_id() != -1) return;
    put_back(*taken_);
    off_ = false;
  }

 private:
  bool are_mine(const Hooks& hooks) const { return hooks.first.ptr(getPyInterpreter()) == save_; }

  // Inserts the hooks below those entered since, unless they are there: restoring an older state of the thread may have removed
  // them again. Moves references only, so it may run without the GIL.
  void put_back(Hooks& hooks) {
    std::vector<Hooks> above;
    const auto& state = Stack::get_tls_state();
    const std::optional<std::string> disabled = state.disabled_error_message;
    if (disabled) Stack::enable();
    while (state.stack.size() > below_) above.push_back(Stack::pop_hooks());
    if (above.empty() || !are_mine(above.back())) Stack::push_hooks(std::move(hooks.first), std::move(hooks.second));
    for (; !above.empty(); above.pop_back()) Stack::push_hooks(std::move(above.back().first), std::move(above.back().second));
    if (disabled) Stack::disable(*disabled, false);
  }

  c10::DeviceIndex device_;
  const PyObject* save_;
  bool off_ = false;
  std::optional<Hooks> taken_;  // the hooks, moved back where they come back
  std::optional<Hooks> spare_;  // the same once more, until the step ends
  size_t below_ = 0;  // hooks on the stack beneath them
  size_t misses_before_ = 0;
};

#ifdef WITH_CUDA
struct HooksInMalloc final : c10::FreeMemoryCallback {
  bool Execute() override {
    misses++;
    if (off_here) off_here->on_again();
    return false;  // nothing was freed
  }
};
#endif

// ------------------------------------------------------------------------------------------------------------------- in Python

struct HookSwitch {
  PyObject_HEAD
  std::shared_ptr<Switch> it;
  PyObject* save;
};

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  int device = 0;
  PyObject* save = nullptr;
  if (!PyArg_ParseTuple(arguments, "iO", &device, &save)) return nullptr;
  if (device < 0 || device > std::numeric_limits<c10::DeviceIndex>::max())
    return PyErr_Format(PyExc_ValueError, "HookSwitch: expected the index of a GPU, got %d", device);
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  new (&((HookSwitch*)made)->it) std::shared_ptr<Switch>(std::make_shared<Switch>(static_cast<c10::DeviceIndex>(device), save));
  ((HookSwitch*)made)->save = Py_NewRef(save);
  return made;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((HookSwitch*)self)->save);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(((HookSwitch*)self)->save);
  return 0;
}

void free_switch(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  ((HookSwitch*)self)->it.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Call>
PyObject* result_of(const Call& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* off(PyObject* self, PyObject* limit_bytes) {
  const unsigned long long limit = PyLong_AsUnsignedLongLong(limit_bytes);
  if (PyErr_Occurred()) return nullptr;
  return result_of([&] {
    const auto now = ((HookSwitch*)self)->it->off(limit);
    return now ? Py_BuildValue("LL", (long long)now->first, (long long)now->second) : Py_NewRef(Py_None);
  });
}

PyObject* on(PyObject* self, PyObject*) {
  return result_of([&] {
    const auto were_off = ((HookSwitch*)self)->it->on();
    return were_off ? PyBool_FromLong(*were_off) : Py_NewRef(Py_None);
  });
}

PyMethodDef methods[] = {
    {"off", off, METH_O, "Take the hooks off this thread, if at most that many bytes are reserved. Returns bytes allocated, and peak."},
    {"on", on, METH_NOARGS, "Put them back. Returns whether they were off until now and the allocator did not grow; None: not here."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {
    {Py_tp_new, (void*)make},
    {Py_tp_traverse, (void*)traverse},
    {Py_tp_clear, (void*)clear},
    {Py_tp_dealloc, (void*)free_switch},
    {Py_tp_methods, (void*)methods},
    {0, nullptr}};

PyType_Spec spec = {"chameleon_mm_switch.HookSwitch", sizeof(HookSwitch), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "chameleon_mm_switch", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chameleon_mm_switch() {
#ifdef WITH_CUDA
  // Once: a name that is registered twice ends the process. Another build of this source in the same process has its own.
  static const bool registered = [] {
    c10::FreeCudaMemoryCallbacksRegistry()->Register(
        "chameleon_mm switch " + std::to_string(reinterpret_cast<uintptr_t>(&misses)),
        [] { return std::unique_ptr<c10::FreeMemoryCallback>(new HooksInMalloc); });
    return true;
  }();
  (void)registered;
#endif
  PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
  if (module == nullptr || type == nullptr || PyModule_AddObject(module, "HookSwitch", type) != 0) {
    Py_XDECREF(module);
    Py_XDECREF(type);
    return nullptr;
  }
  return module;
}
