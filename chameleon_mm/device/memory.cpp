// Reads what torch's caching allocator has handed out on a GPU.
//
//   now, ever, peak = read(index)      // bytes: allocated now, allocated in all so far, the most that were allocated at once
//
// Within a budget every hook that may move something reads these three, and torch's own reading makes dictionaries of some hundred
// numbers for them.
// The reference is `torch_reader` in device/cuda/cuda_device.py. Like torch's, it waits for the allocator's lock with the GIL.

#include <pybind11/pybind11.h>

#include "device_memory.h"

namespace py = pybind11;

PYBIND11_MODULE(chameleon_mm_memory, m) {
  const auto read = [](c10::DeviceIndex index) {
    if (index < 0) throw py::value_error("read: expected the index of a GPU, got " + std::to_string(index));
    const auto bytes = allocated_bytes(index);
    return std::tuple(bytes.current, bytes.allocated, bytes.peak);
  };
  m.def("read", read, "Bytes allocated on the GPU of that index: now, in all so far, the most at once. Raises what the allocator throws.");
}
