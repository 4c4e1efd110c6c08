// Kernels: the GPU's own code is registered by name and never runs. Operators have a CPU kernel on the same memory instead
// (compute.py); a launch that still arrives here names its kernel and fails, as on a GPU that the code was not built for.
#include <cxxabi.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "state.h"

using namespace standin;

namespace {

std::unordered_map<const void*, const char*>& kernels = *new std::unordered_map<const void*, const char*>;

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

const char* kernel_name(const void* function) {
  auto it = kernels.find(function);
  return it == kernels.end() ? "<not registered>" : it->second;
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  const char* name = kernel_name(function);
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  state.counters["kernel"]++;
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  if (strstr(name, "spin_kernel")) {  // torch.cuda._sleep(cycles): at 2 GHz
    long cycles = *(long*)arguments[0];
    queue_call(stream, [cycles] { usleep(cycles / 2000); });
    return answer(cudaSuccess);
  }
  int status;
  char* readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  fprintf(stderr, "CUDA stand-in: no CPU kernel stands in for %s\n", readable ? readable : name);
  // Not every caller in torch looks at what a launch returns: whatever lay in its output would then pass for its result.
  report(std::string("a kernel was launched that no CPU kernel stands in for: ") + (readable ? readable : name));
  free(readable);
  return answer(cudaErrorNoKernelImageForDevice);
}

}  // namespace

// ------------------------------------------------------------------------------------------------ registration by the compiler

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels.emplace(function, name);
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }

// ------------------------------------------------------------------------------------------------ launches

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return cudaErrorMissingConfiguration;
  Configuration top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared = top.shared;
  *(void**)stream = top.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(kernel, arguments, stream);
}
API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  return launch(function, arguments, config->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}

// ------------------------------------------------------------------------------------------------ questions about kernels

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return answer(cudaSuccess);
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return answer(cudaSuccess); }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return answer(cudaSuccess);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return answer(cudaSuccess);
}
API cudaError_t cudaProfilerStart() { return answer(cudaSuccess); }
API cudaError_t cudaProfilerStop() { return answer(cudaSuccess); }

// Torch asks for the driver's functions by name; one that driver.cpp lacks is led to a function that answers "not supported".
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *function = driver ? dlsym(driver, name) : nullptr;
  if (!*function && driver) {
    *function = dlsym(driver, "standin_not_supported");
    STANDIN_SAY(1, "the driver's %s is not there", name);
  }
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return answer(*function ? cudaSuccess : cudaErrorNotSupported);
}
