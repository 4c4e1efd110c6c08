// Accesses that nothing orders, and memory given back while it is in use: each becomes a line that names both sides.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <unordered_set>

#include "state.h"

namespace standin {
namespace {

constexpr size_t most_violations = 200;  // a program without one wait makes thousands of them
struct Collected {
  std::vector<std::string> texts;
  std::set<std::string> seen;  // a step that repeats says the same again
  long left_out = 0;
};
Collected& collected = *new Collected;

std::string bytes_of(uintptr_t begin, uintptr_t end, const Allocation& allocation, uintptr_t base) {
  static const char* kinds[] = {"pinned", "device", "registered", "mapped device"};
  std::string text = "bytes " + std::to_string(begin - base) + " to " + std::to_string(end - base - 1) + " of " +
                     kinds[allocation.kind] + " allocation " + std::to_string(allocation.number);
  if (allocation.on_device() && settings().devices > 1) text += " on device " + std::to_string(allocation.device_index);
  return text;
}

std::string side(bool wrote, const Access& access) {
  // Streams are never deleted, but those that were destroyed have left the list.
  std::string name = "stream " + std::to_string(access.stream);
  for (Stream* stream : state.streams)
    if (stream->number == access.stream) name = stream->name;
  return std::string(wrote ? "the write by " : "the read by ") + access.what + " (" + name + ", operation " +
         std::to_string(access.position) + ")";
}

// Conflicts with one earlier access over several segments are one violation.
struct Conflicts {
  struct Found {
    Access earlier;
    bool wrote;
    uintptr_t begin, end;
  };
  std::vector<Found> found;
  void add(const Access& earlier, bool wrote, uintptr_t begin, uintptr_t end) {
    for (Found& known : found) {
      if (known.earlier == earlier && known.wrote == wrote) {
        known.begin = std::min(known.begin, begin);
        known.end = std::max(known.end, end);
        return;
      }
    }
    found.push_back({earlier, wrote, begin, end});
  }
};

void note_lane(std::vector<int>& lanes, int lane) {
  if (std::find(lanes.begin(), lanes.end(), lane) == lanes.end()) lanes.push_back(lane);
}

// Every so often what the host knows to be done is dropped, so that the history stays small.
void prune_now_and_then() {
  static size_t next = 1024;
  if (state.history.size() < next) return;
  state.history.prune(state.host);
  next = std::max(size_t(1024), 2 * state.history.size());
}

// The accesses that keep the memory from being one stream's to give back. One of the streams that ran operators on it (where
// none did: of those that used it) is its owner, and has to have waited for what the others did. The runtime is not told
// which: the stream for which the fewest accesses are left counts as the owner.
std::vector<Conflicts::Found> not_the_owners(const Allocation& allocation, const std::vector<Conflicts::Found>& accesses) {
  auto fewest = accesses;
  for (int lane : allocation.computing_lanes.empty() ? allocation.lanes : allocation.computing_lanes) {
    auto owner = std::find_if(state.streams.begin(), state.streams.end(), [&](const Stream* s) { return s->lane == lane; });
    bool destroyed = owner == state.streams.end();
    std::vector<Conflicts::Found> others;
    std::copy_if(accesses.begin(), accesses.end(), std::back_inserter(others), [&](const Conflicts::Found& found) {
      return found.earlier.lane != lane && (destroyed || !ordered_before(found.earlier, (*owner)->clock));
    });
    if (others.size() < fewest.size()) fewest = others;
  }
  return fewest;
}

}  // namespace

const char* intern(const char* text) {
  static auto& known = *new std::unordered_set<std::string>;
  return known.size() < 20000 ? known.insert(text).first->c_str() : "an operation";
}

void report(std::string text) {
  state.counters["violations"]++;
  if (settings().log >= 1) fprintf(stderr, "CUDA stand-in: %s\n", text.c_str());
  if (collected.texts.size() >= most_violations) {
    collected.left_out++;
  } else if (collected.seen.insert(text).second) {
    collected.texts.push_back(std::move(text));
  }
}

void report_conflict(const char* where, bool earlier_wrote, const Access& earlier, bool writes, const Access& access,
                     uintptr_t begin, uintptr_t end) {
  auto it = allocation_of((void*)begin);
  std::string what = it == state.allocations.end() ? "memory" : bytes_of(begin, end, it->second, it->first);
  report(std::string("unordered access") + where + ": " + side(writes, access) + " is not ordered after " +
         side(earlier_wrote, earlier) + ": no event orders them, " + what);
}

Allocation* touch(Stream* stream, const void* p, size_t bytes, bool writes, const char* what, bool lenient) {
  if (!bytes) return nullptr;
  Allocation* allocation = find_allocation(p);
  if (!allocation) return nullptr;
  note_lane(allocation->lanes, stream->lane);
  Access access{stream->lane, stream->clock.at(stream->lane), stream->number, what, lenient};
  // What the same operation read or wrote before this is ordered: its position is in the stream's clock already.
  Conflicts conflicts;
  uintptr_t begin = uintptr_t(p);
  state.history.note(begin, begin + bytes, writes, access, stream->clock,
                     [&](const Access& e, bool wrote, uintptr_t b, uintptr_t z) { conflicts.add(e, wrote, b, z); });
  for (auto& c : conflicts.found) report_conflict("", c.wrote, c.earlier, writes, access, c.begin, c.end);
  prune_now_and_then();
  return allocation;
}

void give_back(const char* what, uintptr_t begin, const Allocation& allocation, bool waits) {
  Conflicts conflicts;
  uintptr_t end = begin + allocation.bytes;
  state.history.look(begin, end, true, state.host, [&](const Access& e, bool wrote, uintptr_t b, uintptr_t z) {
    conflicts.add(e, wrote, b, z);
  });
  if (waits) conflicts.found = not_the_owners(allocation, conflicts.found);
  for (auto& c : conflicts.found) {
    report(std::string("freed while in use: ") + what + " by the host while " + side(c.wrote, c.earlier) +
           " may still use it: nothing orders the two, " + bytes_of(c.begin, c.end, allocation, begin));
  }
  state.history.forget(begin, end);
}

}  // namespace standin

using namespace standin;

// An operator on the stream reads these bytes (0), writes them (1), or writes them in place (2).
API void standin_access(cudaStream_t handle, const void* p, size_t bytes, int writes, const char* what) {
  if (!bytes) return;
  Lock lock(state.mutex);
  Stream* stream = stream_of(handle);
  const char* name = intern(what);
  if (stream->capture) {
    capture_access(stream, p, bytes, writes, name);
    return;
  }
  begin_operation(stream);
  if (Allocation* used = touch(stream, p, bytes, writes, name, writes == 2)) note_lane(used->computing_lanes, stream->lane);
}

// The host itself reads or writes these bytes, now. Nothing calls this but a test that knows what the host does.
API void standin_host_access(const void* p, size_t bytes, int writes, const char* what) {
  if (!bytes) return;
  Lock lock(state.mutex);
  auto it = allocation_of(p);
  if (it == state.allocations.end()) return;
  Conflicts conflicts;
  uintptr_t begin = uintptr_t(p);
  state.history.look(begin, begin + bytes, writes, state.host,
                     [&](const Access& e, bool wrote, uintptr_t b, uintptr_t z) { conflicts.add(e, wrote, b, z); });
  for (auto& c : conflicts.found) {
    report(std::string("unordered access: ") + (writes ? "the write by " : "the read by ") + what +
           " (the host) is not ordered after " + side(c.wrote, c.earlier) + ": the host has not waited for it, " +
           bytes_of(c.begin, c.end, it->second, it->first));
  }
}

// The text of the violations since it was last asked for, a line each. Returns its full length; they are dropped if it fitted.
API size_t standin_violations(char* into, size_t room) {
  Lock lock(state.mutex);
  std::string all;
  for (auto& text : collected.texts) all += (all.empty() ? "" : "\n") + text;
  if (collected.left_out) all += "\nand " + std::to_string(collected.left_out) + " more";
  if (into && all.size() < room) {
    memcpy(into, all.c_str(), all.size() + 1);
    collected = Collected();
  }
  return all.size();
}
