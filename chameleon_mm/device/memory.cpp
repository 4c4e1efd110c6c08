// Reads what torch's caching allocator has handed out on a GPU.
//
//   now, ever, peak = read(index)      // bytes: allocated now, allocated in all so far, the most that were allocated at once
//
// Within a budget every hook that may move something reads these three, and torch's own reading makes dictionaries of some hundred
// numbers for them.
// The reference is `torch_reader` in device/cuda/cuda_device.py. Like torch's, it waits for the allocator's lock with the GIL.

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/python_headers.h>

#include "allocator_memory.h"

#include <c10/util/Exception.h>

#include <exception>
#include <limits>

namespace {

PyObject* read(PyObject*, PyObject* index) {
  const long device = PyLong_AsLong(index);
  if (device == -1 && PyErr_Occurred()) return nullptr;
  if (device < 0 || device > std::numeric_limits<c10::DeviceIndex>::max()) {
    return PyErr_Format(PyExc_ValueError, "read: expected the index of a GPU, got %ld", device);
  }
  try {
    const auto bytes = allocated_bytes(static_cast<c10::DeviceIndex>(device));
    return Py_BuildValue("LLL", (long long)bytes.current, (long long)bytes.allocated, (long long)bytes.peak);
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef functions[] = {
    {"read", read, METH_O, "Bytes allocated on the GPU of that index: now, in all so far, the most at once."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "chameleon_mm_memory", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chameleon_mm_memory() {
  return PyModule_Create(&definition);
}
