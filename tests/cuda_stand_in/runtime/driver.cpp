// libcuda.so.1: the driver's calls that torch, CuPy and the bindings make themselves.
#include <cuda.h>
#include <cuda_runtime_api.h>

extern "C" {
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
}
