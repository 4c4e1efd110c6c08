// What the stand-in refuses in so many words: cudaMallocAsync and the driver's memory pools. Their memory is ordered by
// streams inside the driver, which nothing here models; torch's own allocator, which we test, needs none of it.
#include "state.h"

using namespace standin;

namespace {

cudaError_t refuse(const char* name) {
  const char* instead = "use PYTORCH_CUDA_ALLOC_CONF=backend:native, torch's own allocator (CuPy: its MemoryPool)";
  STANDIN_SAY(0, "%s is not there: %s", name, instead);
  return answer(cudaErrorNotSupported);
}

}  // namespace

API cudaError_t cudaMallocAsync(void** p, size_t, cudaStream_t) {
  *p = nullptr;
  return refuse("cudaMallocAsync");
}
API cudaError_t cudaFreeAsync(void*, cudaStream_t) { return refuse("cudaFreeAsync"); }
API cudaError_t cudaMallocFromPoolAsync(void** p, size_t, cudaMemPool_t, cudaStream_t) {
  *p = nullptr;
  return refuse("cudaMallocFromPoolAsync");
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t*, int) { return refuse("cudaDeviceGetDefaultMemPool"); }
API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t*, int) { return refuse("cudaDeviceGetMemPool"); }
API cudaError_t cudaDeviceSetMemPool(int, cudaMemPool_t) { return refuse("cudaDeviceSetMemPool"); }
API cudaError_t cudaMemPoolCreate(cudaMemPool_t*, const cudaMemPoolProps*) { return refuse("cudaMemPoolCreate"); }
API cudaError_t cudaMemPoolDestroy(cudaMemPool_t) { return refuse("cudaMemPoolDestroy"); }
API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return refuse("cudaMemPoolTrimTo"); }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return refuse("cudaMemPoolGetAttribute"); }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return refuse("cudaMemPoolSetAttribute"); }
API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return refuse("cudaMemPoolSetAccess"); }
