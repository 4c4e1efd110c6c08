// Devices: each is a capacity, a set of null streams and a name that nobody can take for a GPU's.
#include <cstring>

#include "state.h"

using namespace standin;

namespace {

// What an H200 answers, where torch, CuPy or Triton ask: they choose code by it.
constexpr int processors = 132, compute_major = 9, compute_minor = 0, pci_bus = 0x99;
constexpr int threads_per_block = 1024, threads_per_processor = 2048, registers = 65536, warp = 32;
constexpr size_t shared_per_block = 49152, shared_per_block_optin = 232448, shared_per_processor = 233472;

bool known(int device) { return device >= 0 && device < settings().devices; }

}  // namespace

API cudaError_t cudaGetDeviceCount(int* count) {
  *count = int(settings().devices);
  return answer(*count ? cudaSuccess : cudaErrorNoDevice);
}
API cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return answer(cudaSuccess);
}
API cudaError_t cudaSetDevice(int device) {
  if (!known(device)) return answer(cudaErrorInvalidDevice);
  current_device = device;
  return answer(cudaSuccess);
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return answer(cudaSuccess);
}
API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return answer(cudaSuccess);
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!known(device)) return answer(cudaErrorInvalidDevice);
  cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "CUDA stand-in, no GPU");
  for (int i = 0; i < 16; i++) p.uuid.bytes[i] = char(i + device);
  p.totalGlobalMem = state.total_bytes;
  p.sharedMemPerBlock = shared_per_block;
  p.sharedMemPerBlockOptin = shared_per_block_optin;
  p.sharedMemPerMultiprocessor = shared_per_processor;
  p.regsPerBlock = p.regsPerMultiprocessor = registers;
  p.warpSize = warp;
  p.maxThreadsPerBlock = threads_per_block;
  p.maxThreadsPerMultiProcessor = threads_per_processor;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.totalConstMem = 65536;
  p.major = compute_major;
  p.minor = compute_minor;
  p.textureAlignment = 512;
  p.multiProcessorCount = processors;
  p.canMapHostMemory = 1;
  p.concurrentKernels = 1;
  p.pciBusID = pci_bus;
  p.pciDeviceID = device;
  p.asyncEngineCount = 3;
  p.unifiedAddressing = 1;
  p.memoryBusWidth = 6144;
  p.l2CacheSize = 62914560;
  p.hostRegisterSupported = 1;
  p.canUseHostPointerForRegisteredMem = 1;
  p.streamPrioritiesSupported = 1;
  return answer(cudaSuccess);
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!known(device)) return answer(cudaErrorInvalidDevice);
  static const std::map<int, int>& known_values = *new std::map<int, int>{
      {cudaDevAttrComputeCapabilityMajor, compute_major},
      {cudaDevAttrMultiProcessorCount, processors},
      {cudaDevAttrWarpSize, warp},
      {cudaDevAttrMaxThreadsPerBlock, threads_per_block},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, shared_per_block_optin},
      {cudaDevAttrMaxSharedMemoryPerBlock, shared_per_block},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrHostRegisterSupported, 1},
      {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
      {cudaDevAttrConcurrentKernels, 1},
      {cudaDevAttrAsyncEngineCount, 3},
      {cudaDevAttrPciBusId, pci_bus},
  };
  auto it = known_values.find(attribute);
  *value = it == known_values.end() ? 0 : it->second;  // 0 also for cudaDevAttrMemoryPoolsSupported: see refused.cpp
  if (attribute == cudaDevAttrPciDeviceId) *value = device;
  return answer(cudaSuccess);
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int room, int device) {
  if (!known(device)) return answer(cudaErrorInvalidDevice);
  snprintf(text, room, "0000:%02x:%02x.0", pci_bus, device);
  return answer(cudaSuccess);
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return answer(cudaSuccess);
}
// No peer access: torch then moves everything between devices by cudaMemcpyPeerAsync, which is there, not by a kernel.
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return answer(cudaSuccess);
}
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return answer(cudaErrorPeerAccessUnsupported); }
API cudaError_t cudaDeviceSynchronize() {
  Lock lock(state.mutex);
  if (cudaError_t error = unsafe_call()) return answer(error);
  force_all(lock, current_device);
  return answer(cudaSuccess);
}
