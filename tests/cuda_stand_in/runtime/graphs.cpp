// cudaGraph*: instantiating and launching what was captured. A launch runs at once, as an operator does: first what its
// stream holds, then the nodes in the order of capture; what they wrote stays hidden until something is ordered behind it.
#include "graphs.h"

#include <cstring>

using namespace standin;

namespace {

GraphHandle* handle_of(void* p) { return static_cast<GraphHandle*>(p); }

void run_node(Lock& lock, Stream* stream, Graph::Node& node) {
  Operation& operation = node.operation_to_run;
  switch (node.kind) {
    case Graph::Node::operation:
      if (operation.kind == Operation::copy) {
        memmove(operation.dst, operation.src, operation.bytes);
      } else if (operation.kind == Operation::set) {
        memset(operation.dst, operation.value, operation.bytes);
      } else {
        lock.unlock();
        operation.run();
        lock.lock();
      }
      break;
    case Graph::Node::record:
      record_event(lock, stream, node.event);
      break;
    case Graph::Node::wait:
      if (!node.event->stream) break;
      stream->clock.join(node.event->clock);
      force(lock, node.event->stream, node.event->position);
      break;
    case Graph::Node::call:
      lock.unlock();
      node.run(node.data.get());
      lock.lock();
      break;
  }
}

// The graph becomes a part of the one that is being captured.
void append_to_capture(Stream* stream, const Graph& graph) {
  for (auto& use : graph.uses) capture_access(stream, (void*)use.begin, use.bytes, use.writes, use.what);
  next_position(stream);
  auto& nodes = stream->capture->graph->nodes;
  nodes.insert(nodes.end(), graph.nodes.begin(), graph.nodes.end());
}

void hide_written(Stream* stream, const Graph& graph) {
  std::map<uintptr_t, uintptr_t> written;  // merged: a byte that was hidden twice would come back hidden
  for (auto& use : graph.uses) {
    if (!use.writes || !find_allocation((void*)use.begin)) continue;
    uintptr_t begin = use.begin, end = use.begin + use.bytes;
    auto it = written.upper_bound(begin);
    if (it != written.begin() && std::prev(it)->second >= begin) --it;
    while (it != written.end() && it->first <= end) {
      begin = std::min(begin, it->first);
      end = std::max(end, it->second);
      it = written.erase(it);
    }
    written[begin] = end;
  }
  for (auto& [begin, end] : written) hide(stream, (void*)begin, end - begin);
}

}  // namespace

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  Lock lock(state.mutex);
  *exec = (cudaGraphExec_t) new GraphHandle{handle_of(graph)->graph};
  return answer(cudaSuccess);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  std::shared_ptr<Graph> graph = handle_of(exec)->graph;  // before the lock: it may be the last holder when this returns
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  if (cudaError_t error = capture_conflict(stream)) return answer(error);
  state.counters["graphLaunch"]++;
  if (stream->capture) {
    append_to_capture(stream, *graph);
    return answer(cudaSuccess);
  }
  begin_operation(stream);
  for (auto& use : graph->uses) touch(stream, (void*)use.begin, use.bytes, use.writes, use.what);
  enqueue_implicit_waits(stream);
  force(lock, stream);
  for (auto& node : graph->nodes) run_node(lock, stream, node);
  hide_written(stream, *graph);
  advance(lock);
  return answer(cudaSuccess);
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  Lock lock(state.mutex);
  auto& held = handle_of(graph)->graph->nodes;
  if (nodes)
    for (size_t i = 0; i < std::min(*count, held.size()); i++) nodes[i] = (cudaGraphNode_t)&held[i];
  *count = held.size();
  return answer(cudaSuccess);
}

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete handle_of(graph);
  return answer(cudaSuccess);
}
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete handle_of(exec);
  return answer(cudaSuccess);
}
