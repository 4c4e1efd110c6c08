// cudaStream*: making, destroying and asking about streams, and host functions.
#include "state.h"

using namespace standin;

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  Lock lock(state.mutex);
  *handle = (cudaStream_t)make_stream(flags & cudaStreamNonBlocking, priority, current_device);
  return answer(cudaSuccess);
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

API cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Lock lock(state.mutex);
  if (long(handle) <= 2) return answer(cudaErrorInvalidValue);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = refuse_in_capture(stream)) return answer(error);
  force(lock, stream);  // the real one goes on in the background; the host knows no more than before
  retire(stream);
  return answer(cudaSuccess);
}

API cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Lock lock(state.mutex);
  *priority = stream_of(handle)->priority;
  return answer(cudaSuccess);
}

API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = refuse_in_capture(stream)) return answer(error);
  if (cudaError_t error = unsafe_call()) return answer(error);
  host_waits(lock, stream);
  return answer(cudaSuccess);
}

API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = refuse_in_capture(stream)) return answer(error);
  if (cudaError_t error = unsafe_call()) return answer(error);
  if (stream->done < stream->given) {
    if (threaded() || ++stream->asked <= most_queries) return answer(cudaErrorNotReady);
  }
  stream->asked = 0;
  host_waits(lock, stream);
  return answer(cudaSuccess);
}

// Host functions run in their place in the queue, without the mutex.
API cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  queue_call(stream, [=] { function(data); });
  return answer(cudaSuccess);
}

API cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data, unsigned) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = refuse_in_capture(stream)) return answer(error);
  queue_call(stream, [=] { callback(handle, cudaSuccess, data); });
  return answer(cudaSuccess);
}
