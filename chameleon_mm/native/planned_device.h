// What the hooks of a planned step ask of the device: events, waits, copies; and tensors over memory that is there.
//
//   record(stream)            -> a new CudaEvent behind all that the stream was given         (device/cuda/cuda_stream.py: `record`)
//   wait(stream, event)       -> the stream's later work comes after the event                (`wait`)
//   is_complete(event)        -> never waits                                                  (`CudaEvent.query`)
//   copy(stream, dst, src, n) -> queued on the stream                                         (`copy`)
//
// The runtime is the one that torch has loaded, and its headers are not needed: the few functions are declared here.
#pragma once

#include "planned_objects.h"

#include <ATen/ATen.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

extern "C" {
int cudaEventCreateWithFlags(void** event, unsigned flags);
int cudaEventDestroy(void* event);
int cudaEventQuery(void* event);
int cudaEventRecord(void* event, void* stream);
int cudaEventSynchronize(void* event);
const char* cudaGetErrorString(int error);
int cudaGetDevice(int* device);
int cudaGetLastError();
int cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, int kind, void* stream);
int cudaStreamIsCapturing(void* stream, int* status);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
}

namespace swap {

constexpr int NOT_READY = 600, BY_ADDRESSES = 4;  // cudaErrorNotReady, cudaMemcpyDefault
constexpr unsigned UNTIMED = 2;                   // cudaEventDisableTiming
constexpr int MOST_DEVICES = 64;
constexpr size_t MOST_SPARE_EVENTS = 4096;  // of one device

// Have Python raise what the runtime refused, which is forgotten there.
inline void check(int error) {
  if (!error) return;
  cudaGetLastError();
  PyErr_Format(PyExc_RuntimeError, "CUDA error: %s", cudaGetErrorString(error));
  throw Raised{};
}

// ---------------------------------------------------------------------------------------------------------------------- events

// The `raw` of a CudaEvent that was recorded here: what torch.cuda.Event is for the others. It gives its event back when it goes,
// for the next one: making one takes longer than recording it.
struct RawEvent {
  PyObject_HEAD
  void* event;
  int device;
};

inline PyTypeObject* raw_event_type = nullptr;
inline std::vector<void*> spare_events[MOST_DEVICES];  // by device; guarded by the GIL

inline void raw_event_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  void* event = ((RawEvent*)self)->event;
  auto& spare = spare_events[((RawEvent*)self)->device];
  if (event && spare.size() < MOST_SPARE_EVENTS) spare.push_back(event);
  else if (event) cudaEventDestroy(event);
  type->tp_free(self);
  Py_DECREF(type);
}

inline bool is_ready(void* event) {
  const int status = cudaEventQuery(event);
  if (status == NOT_READY) cudaGetLastError();
  else check(status);
  return status != NOT_READY;
}

template <typename Work>
PyObject* reported(Work work) {
  try {
    return work();
  } catch (const Raised&) {
    return nullptr;
  }
}

inline PyObject* raw_event_query(PyObject* self, PyObject*) {
  return reported([&] { return PyBool_FromLong(is_ready(((RawEvent*)self)->event)); });
}

inline PyObject* raw_event_synchronize(PyObject* self, PyObject*) {
  return reported([&]() -> PyObject* {
    int status = 0;
    Py_BEGIN_ALLOW_THREADS status = cudaEventSynchronize(((RawEvent*)self)->event);
    Py_END_ALLOW_THREADS check(status);
    Py_RETURN_NONE;
  });
}

inline PyObject* raw_event_wait(PyObject* self, PyObject* stream) {
  return reported([&]() -> PyObject* {
    void* handle = PyLong_AsVoidPtr(get(stream, n_cuda_stream).it);
    if (!handle && PyErr_Occurred()) throw Raised{};
    check(cudaStreamWaitEvent(handle, ((RawEvent*)self)->event, 0));
    Py_RETURN_NONE;
  });
}

inline PyObject* raw_event_handle(PyObject* self, void*) { return PyLong_FromVoidPtr(((RawEvent*)self)->event); }

inline PyMethodDef raw_event_methods[] = {
    {"query", raw_event_query, METH_NOARGS, "Whether it is complete. Never waits."},
    {"synchronize", raw_event_synchronize, METH_NOARGS, "Makes the host wait for it."},
    {"wait", raw_event_wait, METH_O, "Makes a torch.cuda.Stream wait for it."},
    {nullptr, nullptr, 0, nullptr}};

inline PyGetSetDef raw_event_attributes[] = {
    {"cuda_event", raw_event_handle, nullptr, "The driver's handle.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};

inline PyType_Slot raw_event_slots[] = {
    {Py_tp_dealloc, (void*)raw_event_dealloc},
    {Py_tp_methods, raw_event_methods},
    {Py_tp_getset, raw_event_attributes},
    {0, nullptr}};

inline PyType_Spec raw_event_spec = {
    "chameleon_mm_planned.RawEvent", sizeof(RawEvent), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, raw_event_slots};

inline void* handle_of(PyObject* stream) {
  void* handle = PyLong_AsVoidPtr(field(stream, Stream._handle));
  if (!handle && PyErr_Occurred()) throw Raised{};
  return handle;
}

// The driver's event of a CudaEvent; null for another kind of event, which only Python knows how to wait for.
inline void* event_of(PyObject* event) {
  if (!Event.made(event)) return nullptr;
  PyObject* raw = field(event, Event.raw);
  if (Py_TYPE(raw) == raw_event_type) return ((RawEvent*)raw)->event;
  Ref handle(get(raw, n_cuda_event));
  void* found = PyLong_AsVoidPtr(handle.it);
  if (!found && PyErr_Occurred()) throw Raised{};
  return found;
}

// The thread's current device is the stream's.
inline PyObject* record(PyObject* stream) {
  Ref raw(need(raw_event_type->tp_alloc(raw_event_type, 0)));
  void*& event = ((RawEvent*)raw.it)->event;
  int& device = ((RawEvent*)raw.it)->device;
  check(cudaGetDevice(&device));
  auto& spare = spare_events[device];
  if (spare.empty()) {
    check(cudaEventCreateWithFlags(&event, UNTIMED));
  } else {
    event = spare.back();
    spare.pop_back();
  }
  check(cudaEventRecord(event, handle_of(stream)));
  PyObject* made = Event.make();
  slot(made, Event.raw) = Py_NewRef(raw.it);
  slot(made, Event.timed) = Py_NewRef(Py_False);
  return made;
}

inline bool is_complete(PyObject* event) {
  void* it = event_of(event);
  if (it) return is_ready(it);
  return is_true(call_method(event, n_query).it);
}

inline void wait(PyObject* stream, PyObject* event) {
  void* it = event_of(event);
  if (it) check(cudaStreamWaitEvent(handle_of(stream), it, 0));
  else call_method(stream, n_wait, event);
}

inline void copy(PyObject* stream, void* dst, const void* src, size_t nbytes) {
  void* handle = handle_of(stream);
  int status = 0;
  Py_BEGIN_ALLOW_THREADS status = cudaMemcpyAsync(dst, src, nbytes, BY_ADDRESSES, handle);
  Py_END_ALLOW_THREADS check(status);
}

// --------------------------------------------------------------------------------------------------------------------- tensors

inline at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, at::ScalarType dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
}

// A flat tensor of `nbytes` bytes of a storage, from `offset` on.
inline PyObject* flat(const c10::Storage& storage, c10::DispatchKey key, int64_t offset, int64_t nbytes) {
  at::Tensor t = over(storage, key, at::kByte);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(c10::IntArrayRef(&nbytes, 1));
  impl->set_storage_offset(offset);
  return need(THPVariable_Wrap(std::move(t)));
}

// A tensor without memory that shares the version counter of `t`: `VersionProbe.alias`.
inline PyObject* alias_of(const at::Tensor& t) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, t.device()), nullptr, false);
  at::Tensor alias = over(none, c10::DispatchKey::CUDA, t.scalar_type());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_contiguous({0});
  impl->set_version_counter(t.unsafeGetTensorImpl()->version_counter());
  impl->set_allow_tensor_metadata_change(false);
  return need(THPVariable_Wrap(std::move(alias)));
}

// A view of a storage under the version counter of `alias`: `SwappedView.rebuild`, but for conjugates and negatives.
inline PyObject* view_over(
    const c10::Storage& storage, const at::Tensor& alias, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  at::Tensor view = over(storage, c10::DispatchKey::CUDA, alias.scalar_type());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, offset);
  impl->set_version_counter(alias.unsafeGetTensorImpl()->version_counter());
  impl->set_allow_tensor_metadata_change(false);
  return need(THPVariable_Wrap(std::move(view)));
}

}  // namespace swap
