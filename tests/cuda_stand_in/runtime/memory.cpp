// Device memory is host memory that counts against a device's capacity; pinned memory is host memory that is known here.
// cudaMallocAsync and the memory pools are in refused.cpp, the driver's virtual memory in virtual_memory.cpp.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "state.h"

namespace standin {

std::map<uintptr_t, Allocation>::iterator allocation_of(const void* p) {
  auto it = state.allocations.upper_bound(uintptr_t(p));
  if (it == state.allocations.begin()) return state.allocations.end();
  --it;
  return uintptr_t(p) < it->first + it->second.bytes ? it : state.allocations.end();
}

bool within_allocations(const void* p, size_t bytes) {
  auto it = allocation_of(p);
  if (it == state.allocations.end()) return true;
  return uintptr_t(p) + bytes <= it->first + it->second.bytes;
}

namespace {

long next_number(Allocation::Kind kind) {
  static long given[3] = {};
  return ++given[kind];
}

size_t round_up(size_t bytes, size_t grain) { return (bytes + grain - 1) / grain * grain; }

cudaError_t allocate(void** p, size_t bytes, Allocation::Kind kind) {
  Lock lock(state.mutex);
  if (cudaError_t error = unsafe_call()) return answer(error);
  *p = nullptr;
  if (!bytes) return answer(cudaSuccess);
  bool device = kind == Allocation::device;
  size_t grain = device ? 2u << 20 : 4096, rounded = round_up(bytes, grain);
  if (device && (rounded > state.total_bytes || state.used_bytes[current_device] + rounded > state.total_bytes)) {
    state.counters["oom"]++;
    return answer(cudaErrorMemoryAllocation);
  }
  static const size_t host_total = size_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  if (!device && bytes > host_total) return answer(cudaErrorMemoryAllocation);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* mapped = (char*)mmap(nullptr, rounded + grain, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) return answer(cudaErrorMemoryAllocation);
  char* aligned = (char*)round_up(uintptr_t(mapped), grain);
  if (aligned > mapped) munmap(mapped, aligned - mapped);
  if (aligned < mapped + grain) munmap(aligned + rounded, mapped + grain - aligned);
  if (device) memset(aligned, 0xff, rounded);  // NaN in every floating type
  if (device) state.used_bytes[current_device] += rounded;
  state.allocations[uintptr_t(aligned)] = {kind, rounded, current_device, next_number(kind)};
  state.counters[device ? "malloc" : "hostAlloc"]++;
  *p = aligned;
  return answer(cudaSuccess);
}

cudaError_t release(void* p, Allocation::Kind kind, const char* what) {
  if (!p) return answer(cudaSuccess);
  Lock lock(state.mutex);
  if (cudaError_t error = unsafe_call()) return answer(error);
  auto it = state.allocations.find(uintptr_t(p));
  if (it == state.allocations.end() || it->second.kind != kind) return answer(cudaErrorInvalidValue);
  bool device = kind == Allocation::device;
  give_back(what, it->first, it->second, device);
  force_all(lock, -1);  // as the driver does: freeing waits for the device
  it = state.allocations.find(uintptr_t(p));
  if (it == state.allocations.end()) return answer(cudaErrorInvalidValue);  // another thread freed it meanwhile
  if (device) state.used_bytes[it->second.device_index] -= it->second.bytes;
  munmap(p, it->second.bytes);
  state.allocations.erase(it);
  state.counters[device ? "free" : "freeHost"]++;
  return answer(cudaSuccess);
}

}  // namespace
}  // namespace standin

using namespace standin;

API cudaError_t cudaMalloc(void** p, size_t bytes) { return allocate(p, bytes, Allocation::device); }
API cudaError_t cudaFree(void* p) { return release(p, Allocation::device, "cudaFree"); }
API cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return allocate(p, bytes, Allocation::host); }
API cudaError_t cudaMallocHost(void** p, size_t bytes) { return allocate(p, bytes, Allocation::host); }
API cudaError_t cudaFreeHost(void* p) { return release(p, Allocation::host, "cudaFreeHost"); }

API cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  Lock lock(state.mutex);
  if (cudaError_t error = unsafe_call()) return answer(error);
  if (!p || !bytes) return answer(cudaErrorInvalidValue);
  auto next = state.allocations.lower_bound(uintptr_t(p));
  bool overlaps = next != state.allocations.end() && next->first < uintptr_t(p) + bytes;
  if (overlaps || find_allocation(p)) return answer(cudaErrorHostMemoryAlreadyRegistered);
  state.allocations[uintptr_t(p)] = {Allocation::registered, bytes, current_device, next_number(Allocation::registered)};
  state.counters["hostRegister"]++;
  return answer(cudaSuccess);
}

API cudaError_t cudaHostUnregister(void* p) {
  Lock lock(state.mutex);
  if (cudaError_t error = unsafe_call()) return answer(error);
  auto it = state.allocations.find(uintptr_t(p));
  if (it == state.allocations.end() || it->second.kind != Allocation::registered) {
    return answer(cudaErrorHostMemoryNotRegistered);
  }
  give_back("cudaHostUnregister", it->first, it->second, false);
  force_all(lock, -1);
  state.allocations.erase(uintptr_t(p));
  state.counters["hostUnregister"]++;
  return answer(cudaSuccess);
}

API cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return answer(cudaSuccess);
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
  Lock lock(state.mutex);
  Allocation* found = find_allocation(p);
  memset(attributes, 0, sizeof *attributes);
  attributes->device = found ? found->device_index : -2;
  attributes->type = !found ? cudaMemoryTypeUnregistered : found->on_device() ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->devicePointer = found ? const_cast<void*>(p) : nullptr;
  attributes->hostPointer = found && !found->on_device() ? const_cast<void*>(p) : nullptr;
  return answer(cudaSuccess);
}

API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  Lock lock(state.mutex);
  *total = state.total_bytes;
  *unused = state.total_bytes - std::min(state.total_bytes, state.used_bytes[current_device]);
  return answer(cudaSuccess);
}
