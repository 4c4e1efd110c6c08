// libcuda.so.1: the driver's calls that torch, CuPy and the bindings make themselves. Memory calls go to virtual_memory.cpp.
#include <cuda.h>
#include <cuda_runtime_api.h>

extern "C" {
size_t standin_vmm_granularity();
int standin_vmm_reserve(CUdeviceptr* p, size_t bytes);
int standin_vmm_unreserve(CUdeviceptr p, size_t bytes);
int standin_vmm_create(CUmemGenericAllocationHandle* handle, size_t bytes, int device);
int standin_vmm_release(CUmemGenericAllocationHandle handle);
int standin_vmm_map(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle);
int standin_vmm_unmap(CUdeviceptr p, size_t bytes);
int standin_record_device(CUevent event);

// What any other of the driver's functions is answered with, when it is asked for by name.
CUresult standin_not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

// ------------------------------------------------------------------------------------------------ devices and contexts

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) { return (CUresult)cudaGetDeviceCount(count); }
CUresult cuDeviceGet(CUdevice* device, int index) {
  int count = 0;
  cudaGetDeviceCount(&count);
  *device = index;
  return index >= 0 && index < count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName((cudaError_t)error);
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxRecordEvent(CUcontext, CUevent event) { return (CUresult)standin_record_device(event); }

// ------------------------------------------------------------------------------------------------ virtual memory

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = standin_vmm_granularity();
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  return (CUresult)standin_vmm_reserve(p, bytes);
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t bytes) { return (CUresult)standin_vmm_unreserve(p, bytes); }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                     unsigned long long) {
  bool shared = properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE &&
                properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  if (shared) return CUDA_ERROR_NOT_PERMITTED;  // what a machine without a fabric answers; torch then asks for plain memory
  return (CUresult)standin_vmm_create(handle, bytes, properties->location.id);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return (CUresult)standin_vmm_release(handle); }
CUresult cuMemMap(CUdeviceptr p, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  return (CUresult)standin_vmm_map(p, bytes, offset, handle);
}
CUresult cuMemUnmap(CUdeviceptr p, size_t bytes) { return (CUresult)standin_vmm_unmap(p, bytes); }
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }  // all may access all
}
