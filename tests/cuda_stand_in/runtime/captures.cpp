// Stream capture: cudaStreamBeginCapture to cudaStreamEndCapture, with the errors of the real runtime.
#include <cstring>

#include "graphs.h"

namespace standin {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

Capture* capture_of(unsigned long long id) {
  for (Capture* capture : state.captures)
    if (capture->id == id) return capture;
  return nullptr;
}

void join(Capture* capture, Stream* stream) {
  stream->capture = capture;
  stream->capture_clock = Clock();
  capture->streams.push_back(stream);
}

// A capture that the legacy null stream of the device would be ordered with.
Capture* blocking_capture(int device) {
  for (Capture* capture : state.captures)
    for (Stream* captured : capture->streams)
      if (!captured->nonblocking && captured->device == device) return capture;
  return nullptr;
}

}  // namespace

uint64_t next_position(Stream* stream) {
  uint64_t position = ++stream->capture->positions[stream->number];
  stream->capture_clock.raise(stream->number, position);
  return position;
}

cudaError_t unsafe_call() {
  if (state.captures.empty() || thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool refused = false;
  for (Capture* capture : state.captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool any = capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (!own && !any) continue;
    capture->lost = refused = true;
  }
  return refused ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t refuse_in_capture(Stream* stream) {
  if (!stream->capture) return cudaSuccess;
  stream->capture->lost = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t capture_conflict(Stream* stream) {
  if (stream->capture) return stream->capture->lost ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  if (state.captures.empty() || !is_legacy(stream)) return cudaSuccess;
  Capture* capture = blocking_capture(stream->device);
  if (!capture) return cudaSuccess;
  capture->lost = true;
  return cudaErrorStreamCaptureImplicit;
}

void capture_operation(Stream* stream, Operation operation) {
  next_position(stream);
  Graph::Node node;
  node.operation_to_run = std::move(operation);
  stream->capture->graph->nodes.push_back(std::move(node));
}

void capture_access(Stream* stream, const void* p, size_t bytes, bool writes, const char* what) {
  if (!find_allocation(p)) return;
  Capture* capture = stream->capture;
  uintptr_t begin = uintptr_t(p);
  capture->graph->uses.push_back({begin, bytes, writes, what});
  Access access{stream->number, next_position(stream), stream->number, what};
  capture->history.note(begin, begin + bytes, writes, access, stream->capture_clock,
                        [&](const Access& earlier, bool wrote, uintptr_t from, uintptr_t to) {
                          report_conflict(" within a graph", wrote, earlier, writes, access, from, to);
                        });
}

void capture_record(Stream* stream, const std::shared_ptr<EventState>& event, bool external) {
  next_position(stream);
  if (external) {
    Graph::Node node;
    node.kind = Graph::Node::record;
    node.event = event;
    stream->capture->graph->nodes.push_back(std::move(node));
    return;
  }
  event->capture = stream->capture->id;
  event->clock = stream->capture_clock;
  event->stream = nullptr;
}

cudaError_t capture_wait(Stream* stream, const std::shared_ptr<EventState>& event, bool external) {
  if (external && stream->capture) {
    next_position(stream);
    Graph::Node node;
    node.kind = Graph::Node::wait;
    node.event = event;
    stream->capture->graph->nodes.push_back(std::move(node));
    return cudaSuccess;
  }
  if (!event->capture) {  // the captured stream would depend on work outside
    if (!event->stream) return cudaSuccess;
    stream->capture->lost = true;
    return cudaErrorStreamCaptureIsolation;
  }
  Capture* capture = capture_of(event->capture);
  if (!capture) return cudaErrorCapturedEvent;
  if (capture->lost) return cudaErrorStreamCaptureInvalidated;
  if (is_legacy(stream)) {
    capture->lost = true;
    return cudaErrorStreamCaptureImplicit;
  }
  if (stream->capture && stream->capture != capture) {
    capture->lost = stream->capture->lost = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (!stream->capture) {
    join(capture, stream);
    next_position(stream);
  }
  stream->capture_clock.join(event->clock);
  return cudaSuccess;
}

}  // namespace standin

using namespace standin;

API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long ids = 0;
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (is_legacy(stream)) return answer(cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return answer(cudaErrorIllegalState);
  auto* capture = new Capture{++ids, mode, std::this_thread::get_id(), stream};
  state.captures.push_back(capture);
  join(capture, stream);
  return answer(cudaSuccess);
}

API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
  std::unique_ptr<Capture> ended;  // goes after the lock: what it drops calls back into Python
  Lock lock(state.mutex);
  *made = nullptr;
  Stream* stream = stream_of(handle);
  Capture* capture = stream->capture;
  if (!capture) return answer(cudaErrorIllegalState);
  if (capture->origin != stream) return answer(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    return answer(cudaErrorStreamCaptureWrongThread);
  }
  bool joined = true;
  for (auto& [number, position] : capture->positions) joined = joined && stream->capture_clock.at(number) >= position;
  for (Stream* captured : capture->streams) captured->capture = nullptr;
  state.captures.erase(std::find(state.captures.begin(), state.captures.end(), capture));
  ended.reset(capture);
  if (capture->lost) return answer(cudaErrorStreamCaptureInvalidated);
  if (!joined) return answer(cudaErrorStreamCaptureUnjoined);
  *made = (cudaGraph_t) new GraphHandle{capture->graph};
  return answer(cudaSuccess);
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  *status = cudaStreamCaptureStatusNone;
  if (stream->capture) {
    *status = stream->capture->lost ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    return answer(cudaSuccess);
  }
  // The legacy null stream cannot tell while a blocking stream is captured; asking does that capture no harm.
  bool blocking = is_legacy(stream) && blocking_capture(stream->device);
  return answer(blocking ? cudaErrorStreamCaptureImplicit : cudaSuccess);
}

// The graph's nodes are given out nowhere, so a capture has no dependencies to name.
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  if (id) *id = 0;
  cudaError_t error = cudaStreamIsCapturing(handle, status);
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (id && stream->capture) *id = stream->capture->id;
  return error;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return answer(cudaSuccess);
}

API int standin_capturing(cudaStream_t handle) {
  Lock lock(state.mutex);
  return stream_of(handle)->capture != nullptr;
}

// Appends a call to the graph; each replay runs it in its place, and `drop` is called with the last graph that holds it.
API void standin_capture_call(cudaStream_t handle, void (*run)(void*), void (*drop)(void*), void* data, const char* what) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (!stream->capture) {
    STANDIN_SAY(0, "%s: the stream is not being captured", what);
    lock.unlock();
    if (drop) drop(data);
    return;
  }
  next_position(stream);
  Graph::Node node;
  node.kind = Graph::Node::call;
  node.run = run;
  node.data = std::shared_ptr<void>(data, [drop](void* held) {
    if (drop) drop(held);
  });
  stream->capture->graph->nodes.push_back(std::move(node));
}
