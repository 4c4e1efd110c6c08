// cudaEvent*: points in queues. What is ordered before a record is what a wait or a host synchronisation learns from it.
#include "state.h"

using namespace standin;

namespace {

EventState& state_of(cudaEvent_t handle) { return *reinterpret_cast<Event*>(handle)->state; }

// The host has seen the event's last record complete.
void host_learns(const EventState& event) { state.host.join(event.clock); }

}  // namespace

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new Event;
  event->flags = flags;
  *handle = (cudaEvent_t)event;
  return answer(cudaSuccess);
}
API cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Lock lock(state.mutex);
  delete reinterpret_cast<Event*>(handle);
  return answer(cudaSuccess);
}

namespace standin {

void record_event(Lock& lock, Stream* stream, const std::shared_ptr<EventState>& event) {
  begin_operation(stream);
  event->recorded++;
  event->asked = 0;
  event->stream = stream;
  event->clock = stream->clock;
  event->capture = 0;
  Operation operation{Operation::record};
  operation.event = event;
  operation.generation = event->recorded;
  bool idle = stream->done == stream->given;
  enqueue(stream, std::move(operation));
  event->position = stream->given;
  advance(lock);
  if (idle && !threaded() && stream->queue.size() == 1) force(lock, stream);  // nothing is pending before it: complete at once
}

}  // namespace standin

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(stream_handle);
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  auto event = reinterpret_cast<Event*>(handle)->state;
  if (stream->capture) {
    capture_record(stream, event, flags & cudaEventRecordExternal);
  } else {
    record_event(lock, stream, event);
  }
  return answer(cudaSuccess);
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

// Records an event after all work that the current device was given, by any stream: what the driver's cuCtxRecordEvent does. A
// stream of its own waits for all others.
API int standin_record_device(cudaEvent_t handle) {
  Lock lock(state.mutex);
  for (Stream* other : state.streams)
    if (other->device == current_device && other->capture) return cudaErrorStreamCaptureUnsupported;
  static std::map<int, Stream*>& collectors = *new std::map<int, Stream*>;
  Stream*& all = collectors[current_device];
  if (!all) all = make_stream(true, 0, current_device, "all streams of the device");
  for (Stream* other : state.streams) {
    if (other == all || other->device != current_device) continue;
    all->clock.join(other->clock);
    enqueue_wait(all, other, other->given);
  }
  record_event(lock, all, reinterpret_cast<Event*>(handle)->state);
  return cudaSuccess;
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(stream_handle);
  auto event = reinterpret_cast<Event*>(handle)->state;
  if (event->capture || stream->capture) return answer(capture_wait(stream, event, flags & cudaEventWaitExternal));
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  if (!event->stream) return answer(cudaSuccess);  // never recorded: nothing to wait for
  stream->clock.join(event->clock);
  enqueue_wait(stream, event->stream, event->position);
  return answer(cudaSuccess);
}

API cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Lock lock(state.mutex);
  EventState& event = state_of(handle);
  if (event.capture) return answer(cudaErrorCapturedEvent);
  if (cudaError_t error = unsafe_call()) return answer(error);
  if (event.done < event.recorded) {
    if (threaded() || ++event.asked <= most_queries) return answer(cudaErrorNotReady);
    auto kept = reinterpret_cast<Event*>(handle)->state;
    force(lock, kept->stream, kept->position);
  }
  host_learns(event);
  return answer(cudaSuccess);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Lock lock(state.mutex);
  auto event = reinterpret_cast<Event*>(handle)->state;
  if (event->capture) return answer(cudaErrorCapturedEvent);
  if (cudaError_t error = unsafe_call()) return answer(error);
  if (!event->stream) return answer(cudaSuccess);
  Clock clock = event->clock;  // another thread may record it again meanwhile
  force(lock, event->stream, event->position);
  state.host.join(clock);
  return answer(cudaSuccess);
}

API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  Lock lock(state.mutex);
  unsigned flags = reinterpret_cast<Event*>(begin_handle)->flags | reinterpret_cast<Event*>(end_handle)->flags;
  EventState &begin = state_of(begin_handle), &end = state_of(end_handle);
  if (begin.capture || end.capture) return answer(cudaErrorCapturedEvent);
  if (flags & cudaEventDisableTiming || !begin.recorded || !end.recorded) return answer(cudaErrorInvalidResourceHandle);
  if (begin.done < begin.recorded || end.done < end.recorded) return answer(cudaErrorNotReady);
  *ms = float(end.ms - begin.ms);
  return answer(cudaSuccess);
}
API cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  return cudaEventElapsedTime(ms, begin, end);
}
