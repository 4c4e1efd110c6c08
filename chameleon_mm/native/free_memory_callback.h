// The registry of what torch's caching allocator calls where it finds no block, as in c10/cuda/CUDACachingAllocator.h, which needs
// CUDA's own headers.
#pragma once

#include <c10/util/Registry.h>

#ifdef WITH_CUDA
namespace c10 {
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};
C10_DECLARE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);
}  // namespace c10
#endif
