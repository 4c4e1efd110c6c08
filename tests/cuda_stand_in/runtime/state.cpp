#include "state.h"

#include <cstdlib>

namespace standin {
namespace {

long number(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

Mode mode() {
  const char* given = getenv("CUDA_STAND_IN_MODE");
  std::string name = given && *given ? given : "late";
  if (name == "late") return Mode::late;
  if (name == "early") return Mode::early;
  if (name == "threads") return Mode::threads;
  fprintf(stderr, "CUDA stand-in: CUDA_STAND_IN_MODE is late, early or threads, not %s\n", name.c_str());
  exit(2);
}

State& make_state() {
  auto* made = new State;
  made->total_bytes = size_t(number("CUDA_STAND_IN_BYTES", 8L << 30));
  return *made;
}

thread_local cudaError_t last_error = cudaSuccess;

struct ErrorText {
  int code;
  const char *name, *text;
};
const ErrorText error_texts[] = {
#include "errors.inc"  // written by build.py from the names in driver_types.h
};

}  // namespace

State& state = make_state();
thread_local int current_device = 0;

const Settings& settings() {
  static const Settings& read = *new Settings{
      mode(),
      std::min(number("CUDA_STAND_IN_DEVICES", 1), long(most_devices)),
      number("CUDA_STAND_IN_LOG", 0),
  };
  return read;
}

cudaError_t answer(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

}  // namespace standin

using namespace standin;

API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t error) {
  for (auto& known : error_texts)
    if (known.code == error) return known.name;
  return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t error) {
  for (auto& known : error_texts)
    if (known.code == error) return known.text;
  return "unknown error";
}

// ------------------------------------------------------------------------------------------------ for tests

// How often something happened; "history" is how many ranges of bytes the history holds now.
API long standin_count(const char* name) {
  Lock lock(state.mutex);
  if (std::string(name) == "history") return long(state.history.size());
  auto it = state.counters.find(name);
  return it == state.counters.end() ? 0 : it->second;
}
API long standin_pending() {
  Lock lock(state.mutex);
  long pending = 0;
  for (Stream* stream : state.streams) pending += stream->given - stream->done;
  return pending;
}
