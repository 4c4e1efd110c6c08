// Device memory as torch has it: what its allocator has handed out, who refers to a storage, whether a stream may be asked.
#pragma once

#include <Python.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

extern "C" __attribute__((weak)) int cudaStreamIsCapturing(void* stream, int* status);  // there with torch's CUDA build

// Bytes handed out on a GPU: now, in all so far, and the most at once. Waits for the allocator's lock. Throws what it throws.
inline c10::CachingAllocator::Stat allocated_bytes(c10::DeviceIndex device) {
  const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device);
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
}

inline bool is_capturing(void* stream) {
  int status = 0;
  return cudaStreamIsCapturing != nullptr && (cudaStreamIsCapturing(stream, &status) != 0 || status != 0);
}

inline PyObject* in_python(const c10::Storage& storage) { return storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj(); }

// Whether nobody refers to the storage but so many of ours. Its Python object, where it has one, is one reference, and is held by all
// other holders together: by ours alone, if no more than `in_python_alone` refer to it. May be asked without the GIL, by who comes
// before any new holder: that has to be one already, or to ask first.
inline bool is_held_by(const c10::Storage& storage, size_t ours, Py_ssize_t in_python_alone = 1) {
  const PyObject* object = in_python(storage);
  const size_t uses = ours + (object != nullptr);
  return storage.use_count() == uses && (object == nullptr || __atomic_load_n(&object->ob_refcnt, __ATOMIC_ACQUIRE) <= in_python_alone) &&
      storage.use_count() == uses;
}

// Takes the memory out of a storage, which nobody else refers to, and stays.
inline c10::DataPtr take_memory(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr memory = impl->set_data_ptr(c10::DataPtr(nullptr, impl->device()));
  impl->set_nbytes(0);
  return memory;
}
