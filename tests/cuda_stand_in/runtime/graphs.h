// CUDA graphs: what was queued while streams were captured, in the order of capture.
#pragma once
#include "state.h"

namespace standin {

struct Graph {
  struct Node {
    enum Kind { operation, record, wait, call } kind = operation;
    Operation operation_to_run{Operation::copy};  // operation: a copy, a fill or a host function
    std::shared_ptr<EventState> event;            // record, wait: an external event's, at each launch
    std::shared_ptr<void> data;                   // call: freed by `drop` with the last graph that holds it
    void (*run)(void*) = nullptr;
  };
  struct Use {
    uintptr_t begin;
    size_t bytes;
    bool writes;
    const char* what;
  };
  std::vector<Node> nodes;
  std::vector<Use> uses;  // what a launch reads and writes
};

// One ongoing capture. Its own clocks and history check the order within the graph; a launch is checked as one operation.
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<Stream*> streams{};  // the origin and those that waited for an event of the capture
  std::map<int, uint64_t> positions{};  // of the streams, by number
  History history{};
  bool lost = false;  // a call was made that a capture does not allow
};

// Gives a captured stream's next node its place in the capture's order. The numbers of streams serve as lanes there.
uint64_t next_position(Stream* stream);

// cudaGraph_t and cudaGraphExec_t.
struct GraphHandle {
  std::shared_ptr<Graph> graph;
};

}  // namespace standin
