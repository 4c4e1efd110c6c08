// Copies and fills. A pageable source is read when the call is made, as the driver stages it; a copy to pageable memory is
// finished when the call returns.
#include <cstring>
#include <utility>

#include "state.h"

namespace standin {
namespace {

const char* name_of(const Allocation* dst, const Allocation* src) {
  bool to = dst && dst->on_device(), from = src && src->on_device();
  if (to && from) return "copy within device memory";
  if (to) return "copy host to device";
  return from ? "copy device to host" : "copy within host memory";
}

// What the copies are that this thread queues now: strict; speculative, so that a write in place may overtake their reads; or
// an operator's own, which writes in place to a tensor that was there before.
enum CopyKind { strict, speculative_read, write_in_place };
thread_local int copy_kind = strict;

cudaError_t copy(void* dst, const void* src, size_t bytes, cudaStream_t handle, bool blocking) {
  if (!bytes) return answer(cudaSuccess);
  if (!dst || !src) return answer(cudaErrorInvalidValue);
  Lock lock(state.mutex);
  if (blocking)
    if (cudaError_t error = unsafe_call()) return answer(error);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  Allocation *to = find_allocation(dst), *from = find_allocation(src);
  if (!within_allocations(dst, bytes) || !within_allocations(src, bytes)) {
    STANDIN_SAY(0, "a copy of %zu bytes leaves its allocation", bytes);
    return answer(cudaErrorInvalidValue);
  }
  state.counters["memcpyAsync"]++;
  STANDIN_SAY(2, "copy %p <- %p %zu bytes, %s%s%s", dst, src, bytes, stream->name.c_str(), to ? "" : ", pageable destination",
              from ? "" : ", pageable source");
  Operation operation{Operation::copy};
  operation.dst = dst;
  operation.src = src;
  operation.bytes = bytes;
  const char* what = name_of(to, from);
  if (stream->capture) {
    capture_access(stream, src, bytes, false, what);
    capture_access(stream, dst, bytes, true, what);
    capture_operation(stream, std::move(operation));
    return answer(cudaSuccess);
  }
  begin_operation(stream);
  touch(stream, src, bytes, false, what, copy_kind == speculative_read);
  touch(stream, dst, bytes, true, what, copy_kind == write_in_place);
  if (!from) {
    operation.staged.reset(new char[bytes], std::default_delete<char[]>());
    memcpy(operation.staged.get(), src, bytes);
    operation.src = operation.staged.get();
  }
  enqueue(stream, std::move(operation));
  if (blocking || !to) host_waits(lock, stream);
  advance(lock);
  return answer(cudaSuccess);
}

cudaError_t fill(void* p, int value, size_t bytes, cudaStream_t handle) {
  if (!bytes) return answer(cudaSuccess);
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  if (!within_allocations(p, bytes) || !find_allocation(p)) return answer(cudaErrorInvalidValue);
  Operation operation{Operation::set};
  operation.dst = p;
  operation.value = value;
  operation.bytes = bytes;
  if (stream->capture) {
    capture_access(stream, p, bytes, true, "cudaMemsetAsync");
    capture_operation(stream, std::move(operation));
    return answer(cudaSuccess);
  }
  begin_operation(stream);
  touch(stream, p, bytes, true, "cudaMemsetAsync");
  enqueue(stream, std::move(operation));
  advance(lock);
  return answer(cudaSuccess);
}

}  // namespace
}  // namespace standin

using namespace standin;

// Says of which kind the copies are that this thread queues from here on, and of which kind they were.
API int standin_copy_kind(int kind) { return std::exchange(copy_kind, kind); }

API cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(dst, src, bytes, stream, false);
}
API cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
  return copy(dst, src, bytes, nullptr, true);
}
API cudaError_t cudaMemcpyPeerAsync(void* dst, int, const void* src, int, size_t bytes, cudaStream_t stream) {
  return copy(dst, src, bytes, stream, false);
}
API cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width, size_t height,
                                  cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    cudaError_t error = copy((char*)dst + row * dst_pitch, (const char*)src + row * src_pitch, width, stream, false);
    if (error) return error;
  }
  return answer(cudaSuccess);
}
API cudaError_t cudaMemcpyBatchAsync(void* const* dsts, const void* const* srcs, const size_t* sizes, size_t count,
                                     cudaMemcpyAttributes*, size_t*, size_t, cudaStream_t stream) {
  if (long(stream) <= 1) return answer(cudaErrorInvalidValue);  // the real one refuses the legacy null stream, too
  for (size_t i = 0; i < count; i++)
    if (cudaError_t error = copy(dsts[i], srcs[i], sizes[i], stream, false)) return error;
  return answer(cudaSuccess);
}
API cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) { return fill(p, value, bytes, stream); }
API cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  if (cudaError_t error = fill(p, value, bytes, nullptr)) return error;
  Lock lock(state.mutex);
  host_waits(lock, stream_of(nullptr));
  return answer(cudaSuccess);
}
