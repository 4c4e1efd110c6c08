// The driver's virtual memory calls, which torch's expandable segments are made of: addresses are reserved, physical memory
// (here: an anonymous file) is made and mapped there. driver.cpp gives them their names; the errors are the driver's numbers.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "state.h"

using namespace standin;

namespace {

constexpr size_t granularity = 2u << 20;
enum DriverError { success = 0, invalid_value = 1, out_of_memory = 2 };

struct Physical {
  int file;
  size_t bytes;
  int device;
  int holders;  // its handle, and each mapping
};

std::map<uintptr_t, Physical*>& mappings = *new std::map<uintptr_t, Physical*>;

void let_go(Physical* physical) {
  if (--physical->holders) return;
  state.used_bytes[physical->device] -= physical->bytes;
  close(physical->file);
  delete physical;
}

}  // namespace

API size_t standin_vmm_granularity() { return granularity; }

API int standin_vmm_reserve(uintptr_t* p, size_t bytes) {
  if (!bytes || bytes % granularity) return invalid_value;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* mapped = mmap(nullptr, bytes + granularity, PROT_NONE, flags, -1, 0);
  if (mapped == MAP_FAILED) return out_of_memory;
  uintptr_t begin = uintptr_t(mapped), aligned = (begin + granularity - 1) / granularity * granularity;
  if (aligned > begin) munmap(mapped, aligned - begin);
  if (aligned < begin + granularity) munmap((void*)(aligned + bytes), begin + granularity - aligned);
  *p = aligned;
  return success;
}

API int standin_vmm_unreserve(uintptr_t p, size_t bytes) {
  Lock lock(state.mutex);
  auto it = mappings.lower_bound(p);
  if (it != mappings.end() && it->first < p + bytes) return invalid_value;  // something is still mapped there
  munmap((void*)p, bytes);
  return success;
}

API int standin_vmm_create(unsigned long long* handle, size_t bytes, int device) {
  Lock lock(state.mutex);
  if (!bytes || bytes % granularity || device < 0 || device >= settings().devices) return invalid_value;
  if (unsafe_call()) return cudaErrorStreamCaptureUnsupported;
  if (bytes > state.total_bytes || state.used_bytes[device] + bytes > state.total_bytes) {
    state.counters["oom"]++;
    return out_of_memory;
  }
  int file = memfd_create("CUDA stand-in", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, bytes)) {
    if (file >= 0) close(file);
    return out_of_memory;
  }
  state.used_bytes[device] += bytes;
  state.counters["memCreate"]++;
  *handle = (unsigned long long)new Physical{file, bytes, device, 1};
  return success;
}

API int standin_vmm_release(unsigned long long handle) {
  Lock lock(state.mutex);
  let_go(reinterpret_cast<Physical*>(handle));
  return success;
}

API int standin_vmm_map(uintptr_t p, size_t bytes, size_t offset, unsigned long long handle) {
  Lock lock(state.mutex);
  auto* physical = reinterpret_cast<Physical*>(handle);
  if (offset || bytes != physical->bytes || mappings.count(p)) return invalid_value;
  void* mapped = mmap((void*)p, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, physical->file, 0);
  if (mapped == MAP_FAILED) return out_of_memory;
  if (settings().poison) memset(mapped, 0xff, bytes);
  static long number = 0;
  physical->holders++;
  mappings[p] = physical;
  state.allocations[p] = {Allocation::mapped, bytes, physical->device, ++number};
  return success;
}

API int standin_vmm_unmap(uintptr_t p, size_t bytes) {
  Lock lock(state.mutex);
  if (unsafe_call()) return cudaErrorStreamCaptureUnsupported;
  if (!mappings.count(p)) return invalid_value;
  for (auto it = mappings.find(p); it != mappings.end() && it->first < p + bytes;) {
    auto allocation = state.allocations.find(it->first);
    // Unlike cudaFree this waits for nothing: torch synchronises the segment's stream first.
    give_back("cuMemUnmap", allocation->first, allocation->second, false);
    it++;
  }
  force_all(lock, -1);
  for (auto it = mappings.find(p); it != mappings.end() && it->first < p + bytes; it = mappings.erase(it)) {
    state.allocations.erase(it->first);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap((void*)it->first, it->second->bytes, PROT_NONE, flags, -1, 0);
    let_go(it->second);
  }
  state.counters["memUnmap"]++;
  return success;
}
