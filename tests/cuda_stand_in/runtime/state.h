// What the parts of the stand-in share. Everything here is guarded by `state.mutex` unless a comment says otherwise.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hazards.h"

#define API extern "C" __attribute__((visibility("default")))

namespace standin {

using Lock = std::unique_lock<std::mutex>;

// ------------------------------------------------------------------------------------------------ settings, read once at load

enum class Mode {
  late,     // a queued operation runs only when something forces it
  early,    // a copy runs as soon as its stream's waits let it
  threads,  // a worker thread for each stream
};

struct Settings {
  Mode mode;
  long devices;
  long log;               // 0 nothing, 1 what is refused, 2 every copy
};
const Settings& settings();
constexpr int most_queries = 2;  // so often an unfinished event or stream answers "not ready" before a query forces it
inline bool threaded() { return settings().mode == Mode::threads; }

#define STANDIN_SAY(level, ...)                    \
  do {                                             \
    if (standin::settings().log >= (level)) {      \
      fprintf(stderr, "CUDA stand-in: " __VA_ARGS__); \
      fputc('\n', stderr);                         \
    }                                              \
  } while (0)

// ------------------------------------------------------------------------------------------------ streams, events, operations

struct Stream;
struct Capture;

// What an event knows of its last record. Operations that are queued keep it alive after cudaEventDestroy.
struct EventState {
  uint64_t recorded = 0;        // how many records were asked for
  uint64_t done = 0;            // ... and how many have run
  Stream* stream = nullptr;     // of the last record
  uint64_t position = 0;        // in that stream's queue
  double ms = 0;                // when it ran
  int asked = 0;                // queries that were answered "not ready"
  Clock clock;                  // what is ordered before it
  unsigned long long capture = 0;  // the capture that the last record belongs to, if any
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
  unsigned flags = 0;
};

struct Operation {
  enum Kind { copy, set, record, wait, call } kind;
  void* dst = nullptr;
  const void* src = nullptr;
  size_t bytes = 0;
  int value = 0;                      // set
  std::shared_ptr<EventState> event;  // record
  uint64_t generation = 0;            // record: which one of the event's
  Stream* other = nullptr;            // wait: for this stream ...
  uint64_t position = 0;              // ... to have done so many operations
  std::shared_ptr<char> staged;       // what a pageable source held when the copy was asked for
  std::function<void()> run;          // call: runs without the mutex
  bool lazy = false;                  // early mode: runs only when forced
};

struct Stream {
  int number;  // in the order of creation
  int device;
  int priority;
  bool nonblocking;  // not ordered with the legacy null stream
  std::string name;
  std::deque<Operation> queue{};
  uint64_t given = 0;    // operations queued so far
  uint64_t done = 0;     // ... and run
  int asked = 0;         // queries that were answered "not ready"
  bool running = false;  // a host function of it runs, on some thread, without the mutex
  bool dead = false;
  int lane = -1;  // its place in every clock; given at the first operation
  Clock clock{};  // what its next operation is ordered after
  Capture* capture = nullptr;
  Clock capture_clock{};  // the same within the graph that is being captured
};

// ------------------------------------------------------------------------------------------------ memory

struct Allocation {
  enum Kind { host, device, registered } kind;
  size_t bytes;
  int device_index;
  long number;                         // counts within its kind, for messages
  std::vector<int> lanes{};            // of the streams that have used it
  std::vector<int> computing_lanes{};  // of those that ran operators on it
  bool on_device() const { return kind == device; }
};

constexpr int most_devices = 64;

struct State {
  std::mutex mutex;
  std::condition_variable moved;  // something was queued or has run
  std::map<uintptr_t, Allocation> allocations;
  std::vector<Stream*> streams;  // those that live
  std::map<std::pair<int, long>, Stream*> null_streams;  // by device, and by thread for per-thread default streams
  std::vector<Capture*> captures;
  std::map<std::string, long> counters;
  size_t total_bytes = 0;  // of each device
  size_t used_bytes[most_devices] = {};
  History history;
  Clock host;  // what the host knows to be done
};
extern State& state;  // never destroyed: threads of torch outlive destructors
extern thread_local int current_device;

// Remembers an error for cudaGetLastError and passes it on.
cudaError_t answer(cudaError_t error);

// ------------------------------------------------------------------------------------------------ queues.cpp

Stream* make_stream(bool nonblocking, int priority, int device, std::string name = "");
void retire(Stream* stream);  // its queue is empty; the object stays, for events that name it
Stream* stream_of(cudaStream_t handle);  // also for the null stream and the per-thread default stream
bool is_legacy(const Stream* stream);
// Gives the next operation of a stream its place in the happens-before order.
void begin_operation(Stream* stream);
// Queues an operation, behind what the legacy null stream's implicit order puts before it.
void enqueue(Stream* stream, Operation operation);
// Queues a function of the host's, or notes it where the stream is captured.
void queue_call(Stream* stream, std::function<void()> run);
void enqueue_wait(Stream* stream, Stream* other, uint64_t position);
// Queues the waits of that implicit order alone.
void enqueue_implicit_waits(Stream* stream);
// Returns when so many operations of the stream have run.
void force(Lock& lock, Stream* stream, uint64_t upto);
inline void force(Lock& lock, Stream* stream) { force(lock, stream, stream->given); }
// The same of all of it; the host then knows it to be done.
void host_waits(Lock& lock, Stream* stream);
void force_all(Lock& lock, int device);  // -1: of all devices; the host then knows all of it to be done
// Early mode: runs what can run without forcing anything.
void advance(Lock& lock);
// Hides what was just written at p: 0xff bytes stand there until something is ordered behind the stream's queue.
void hide(Stream* stream, void* p, size_t bytes);

// ------------------------------------------------------------------------------------------------ events.cpp

void record_event(Lock& lock, Stream* stream, const std::shared_ptr<EventState>& event);

// ------------------------------------------------------------------------------------------------ memory.cpp

std::map<uintptr_t, Allocation>::iterator allocation_of(const void* p);  // or end()
inline Allocation* find_allocation(const void* p) {
  auto it = allocation_of(p);
  return it == state.allocations.end() ? nullptr : &it->second;
}
bool within_allocations(const void* p, size_t bytes);  // false: begins in one and leaves what is allocated

// ------------------------------------------------------------------------------------------------ violations.cpp

const char* intern(const char* text);
// Checks and notes an access by the stream's current operation; memory that is not allocated here has no history.
// Returns the allocation; null where there is none, or nothing is checked.
Allocation* touch(Stream* stream, const void* p, size_t bytes, bool writes, const char* what, bool lenient = false);
// Memory is given back to the system. Whether something may still use it is checked first; its history ends here.
// `waits`: the call itself waits for the device, as cudaFree does, so what the memory's owner has queued, or has waited for, is
// no violation.
void give_back(const char* what, uintptr_t begin, const Allocation& allocation, bool waits);
void report(std::string text);

void report_conflict(const char* where, bool earlier_wrote, const Access& earlier, bool writes, const Access& access,
                     uintptr_t begin, uintptr_t end);

// ------------------------------------------------------------------------------------------------ captures.cpp

// cudaSuccess, or what a call answers that may not be made while a stream is captured; that capture is lost.
cudaError_t unsafe_call();
// The same for a call that may not name a captured stream.
cudaError_t refuse_in_capture(Stream* stream);
// Whether work may be queued on the stream: not on the null stream while a blocking one is captured, nor in a lost capture.
cudaError_t capture_conflict(Stream* stream);
void capture_operation(Stream* stream, Operation operation);
void capture_access(Stream* stream, const void* p, size_t bytes, bool writes, const char* what);
void capture_record(Stream* stream, const std::shared_ptr<EventState>& event, bool external);
cudaError_t capture_wait(Stream* stream, const std::shared_ptr<EventState>& event, bool external);

}  // namespace standin
