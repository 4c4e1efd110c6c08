// Reads what torch's caching allocator has handed out on a GPU.
//
//   now, ever, peak, unused = read(index)   // bytes: allocated now, allocated in all so far, the most at once; 0: all are used
//
// Within a budget every hook that may move something reads them, and torch's own reading makes dictionaries of some hundred
// numbers for them. Python's own call takes half the time of pybind11's.
// The reference is `torch_reader` in device/cuda/cuda_device.py. Like torch's, it waits for the allocator's lock with the GIL.

#include "device_memory.h"

#include <limits>
#include <stdexcept>

namespace {

PyObject* read(PyObject*, PyObject* argument) {
  int overflow = 0;
  const long index = PyLong_AsLongAndOverflow(argument, &overflow);
  if (index == -1 && PyErr_Occurred() != nullptr) return nullptr;
  if (index < 0 || index > std::numeric_limits<c10::DeviceIndex>::max())
    return PyErr_Format(PyExc_ValueError, "read: expected the index of a GPU, got %S", argument);
  try {
    const auto bytes = allocated_bytes(static_cast<c10::DeviceIndex>(index));
    return Py_BuildValue("LLLi", (long long)bytes.current, (long long)bytes.allocated, (long long)bytes.peak, 0);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {
    {"read", read, METH_O, "Fields of a MemoryReading of the GPU of that index. Raises what the allocator throws."}, {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "chameleon_mm_memory", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_chameleon_mm_memory() { return PyModule_Create(&module); }
