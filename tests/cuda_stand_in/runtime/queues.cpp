// Streams as FIFO queues: what runs when.
#include <ctime>
#include <algorithm>
#include <atomic>
#include <cstring>

#include "state.h"

namespace standin {
namespace {

std::vector<int>& free_lanes = *new std::vector<int>;
int lanes_given = 0;

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

// Runs an operation that has left its queue.
void run(Lock& lock, Operation& operation) {
  switch (operation.kind) {
    case Operation::copy:
    case Operation::set:
      if (threaded()) lock.unlock();
      if (operation.kind == Operation::copy) {
        memmove(operation.dst, operation.src, operation.bytes);
      } else {
        memset(operation.dst, operation.value, operation.bytes);
      }
      if (threaded()) lock.lock();
      state.counters["executed"]++;
      break;
    case Operation::record:
      operation.event->done = std::max(operation.event->done, operation.generation);
      operation.event->ms = now_ms();
      break;
    case Operation::wait:
      force(lock, operation.other, operation.position);
      break;
    case Operation::call:
      lock.unlock();
      operation.run();
      lock.lock();
      break;
  }
}

Operation take_front(Stream* stream) {
  Operation front = std::move(stream->queue.front());
  stream->queue.pop_front();
  return front;
}

// Mode threads: the life of a stream's worker.
void work(Stream* stream) {
  Lock lock(state.mutex);
  for (;;) {
    state.moved.wait(lock, [&] { return !stream->queue.empty() || stream->dead; });
    if (stream->queue.empty()) return;
    Operation operation = take_front(stream);
    run(lock, operation);
    stream->done++;
    state.moved.notify_all();
  }
}

void push(Stream* stream, Operation operation) {
  stream->queue.push_back(std::move(operation));
  stream->given++;
  if (threaded()) state.moved.notify_all();
}

Stream* legacy_of(int device) {
  auto it = state.null_streams.find({device, 0});
  return it == state.null_streams.end() ? nullptr : it->second;
}

// The streams that an operation of `stream` is ordered after without an event: a blocking stream's after the legacy null
// stream's, the legacy null stream's after those of all blocking streams.
template <typename Do>
void each_implicit(Stream* stream, Do act) {
  if (stream->nonblocking) return;
  Stream* legacy = legacy_of(stream->device);
  if (stream != legacy) {
    if (legacy) act(legacy);
    return;
  }
  for (Stream* other : state.streams)
    if (other != stream && !other->nonblocking && other->device == stream->device) act(other);
}

}  // namespace

Stream* make_stream(bool nonblocking, int priority, int device, std::string name) {
  static int created = 0;
  int number = created++;
  if (name.empty()) name = "stream " + std::to_string(number);
  if (settings().devices > 1) name += " of device " + std::to_string(device);
  auto* stream = new Stream{number, device, priority, nonblocking, name};
  state.streams.push_back(stream);
  if (threaded()) std::thread(work, stream).detach();
  return stream;
}

Stream* stream_of(cudaStream_t handle) {
  long value = long(handle);  // 0, 1: the legacy null stream; 2: the calling thread's own
  if (value > 2) return reinterpret_cast<Stream*>(handle);
  static std::atomic<long> next{1};
  thread_local long this_thread = 0;
  if (value == 2 && !this_thread) this_thread = next++;
  Stream*& stream = state.null_streams[{current_device, value == 2 ? this_thread : 0}];
  if (!stream) stream = make_stream(false, 0, current_device, value == 2 ? "a thread's default stream" : "the null stream");
  return stream;
}

bool is_legacy(const Stream* stream) { return legacy_of(stream->device) == stream; }

void begin_operation(Stream* stream) {
  if (stream->lane < 0) {
    if (free_lanes.empty()) {
      stream->lane = lanes_given++;
    } else {
      stream->lane = free_lanes.back();
      free_lanes.pop_back();
    }
  }
  stream->clock.join(state.host);
  each_implicit(stream, [&](Stream* other) { stream->clock.join(other->clock); });
  // A lane's numbers go on when a later stream takes it over: its operations count as ordered after the earlier stream's.
  static std::vector<uint64_t>& last = *new std::vector<uint64_t>;
  if (last.size() <= size_t(stream->lane)) last.resize(stream->lane + 1, 0);
  stream->clock.raise(stream->lane, ++last[stream->lane]);
}

void retire(Stream* stream) {
  stream->dead = true;
  state.streams.erase(std::remove(state.streams.begin(), state.streams.end(), stream), state.streams.end());
  if (stream->lane >= 0) free_lanes.push_back(stream->lane);
  state.moved.notify_all();
}

void enqueue_wait(Stream* stream, Stream* other, uint64_t position) {
  if (other == stream || other->done >= position) return;
  Operation wait{Operation::wait};
  wait.other = other;
  wait.position = position;
  push(stream, std::move(wait));
}

void enqueue_implicit_waits(Stream* stream) {
  each_implicit(stream, [&](Stream* other) { enqueue_wait(stream, other, other->given); });
}

void enqueue(Stream* stream, Operation operation) {
  enqueue_implicit_waits(stream);
  push(stream, std::move(operation));
}

void queue_call(Stream* stream, std::function<void()> run) {
  Operation operation{Operation::call};
  operation.run = std::move(run);
  if (stream->capture) {
    capture_operation(stream, std::move(operation));
    return;
  }
  begin_operation(stream);
  enqueue(stream, std::move(operation));
}

void force(Lock& lock, Stream* stream, uint64_t upto) {
  if (threaded()) {
    state.moved.wait(lock, [&] { return stream->done >= upto; });
    return;
  }
  while (stream->done < upto) {
    if (stream->running) {  // another host thread is in a host function of this stream
      state.moved.wait(lock);
      continue;
    }
    Operation operation = take_front(stream);
    stream->running = true;
    run(lock, operation);
    stream->running = false;
    stream->done++;
    state.moved.notify_all();
  }
}

void host_waits(Lock& lock, Stream* stream) {
  Clock clock = stream->clock;  // another thread may queue more meanwhile
  force(lock, stream);
  state.host.join(clock);
}

void force_all(Lock& lock, int device) {
  for (size_t i = 0; i < state.streams.size(); i++) {
    Stream* stream = state.streams[i];
    if (device >= 0 && stream->device != device) continue;
    host_waits(lock, stream);
  }
}

void advance(Lock& lock) {
  if (settings().mode != Mode::early) return;
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t i = 0; i < state.streams.size(); i++) {
      Stream* stream = state.streams[i];
      while (!stream->running && !stream->queue.empty()) {
        Operation& front = stream->queue.front();
        bool waits = front.kind == Operation::wait && front.other->done < front.position;
        if (front.lazy || front.kind == Operation::call || waits) break;
        force(lock, stream, stream->done + 1);
        moved = true;
      }
    }
  }
}

void hide(Stream* stream, void* p, size_t bytes) {
  if (!bytes || threaded()) return;
  Operation restore{Operation::copy};
  restore.dst = p;
  restore.bytes = bytes;
  restore.staged.reset(new char[bytes], std::default_delete<char[]>());
  memcpy(restore.staged.get(), p, bytes);
  restore.src = restore.staged.get();
  restore.lazy = true;
  memset(p, 0xff, bytes);
  enqueue(stream, std::move(restore));
}

}  // namespace standin

using namespace standin;

// An operator is about to run on the stream: what the stream holds runs first. Returns the error that an earlier call of this
// thread left behind and nobody has read: torch looks for one at each launch, and takes it for the launch's own.
API cudaError_t standin_stream_begin(cudaStream_t handle) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (!stream->capture) {
    enqueue_implicit_waits(stream);
    force(lock, stream);
    advance(lock);
  }
  return cudaGetLastError();
}

// Hides what an operator of the stream wrote until something is ordered behind it.
API void standin_stream_wrote(cudaStream_t handle, void* p, size_t bytes) {
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (!stream->capture) hide(stream, p, bytes);
}
