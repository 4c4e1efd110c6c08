#include "hazards.h"

#include <algorithm>

namespace standin {
namespace {

void drop_ordered(std::vector<Access>& reads, const Clock& clock) {
  auto ordered = [&](const Access& read) { return ordered_before(read, clock); };
  reads.erase(std::remove_if(reads.begin(), reads.end(), ordered), reads.end());
}

}  // namespace

void History::split(uintptr_t at) {
  auto it = segments_.upper_bound(at);
  if (it == segments_.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Segment rest = it->second;
  it->second.end = at;
  segments_.emplace_hint(std::next(it), at, std::move(rest));
}

void History::look(uintptr_t begin, uintptr_t end, bool writes, const Clock& clock, const Conflict& conflict,
                   bool lenient) const {
  auto it = segments_.upper_bound(begin);
  if (it != segments_.begin()) --it;
  for (; it != segments_.end() && it->first < end; ++it) {
    const Segment& segment = it->second;
    uintptr_t from = std::max(begin, it->first), to = std::min(end, segment.end);
    if (from >= to) continue;
    if (segment.written && !ordered_before(segment.write, clock)) conflict(segment.write, true, from, to);
    if (!writes) continue;
    for (const Access& read : segment.reads)
      if (!ordered_before(read, clock) && !(read.lenient && lenient)) conflict(read, false, from, to);
  }
}

// A write makes all earlier accesses its past, but for reads that it was allowed to overtake: whoever gets the memory next has
// to wait for those as well.
void History::overwrite(uintptr_t begin, uintptr_t end, const Access& access, const Clock& clock) {
  std::vector<std::pair<uintptr_t, Segment>> overtaken;
  auto it = segments_.lower_bound(begin);
  if (access.lenient) {
    for (auto at = it; at != segments_.end() && at->first < end; ++at) {
      drop_ordered(at->second.reads, clock);
      if (!at->second.reads.empty()) overtaken.emplace_back(at->first, at->second);
    }
  }
  it = segments_.erase(it, segments_.lower_bound(end));
  uintptr_t from = begin;
  for (auto& [first, segment] : overtaken) {
    if (from < first) segments_.emplace_hint(it, from, Segment{first, true, access, {}});
    segments_.emplace_hint(it, first, Segment{segment.end, true, access, std::move(segment.reads)});
    from = segment.end;
  }
  if (from < end) segments_.emplace_hint(it, from, Segment{end, true, access, {}});
}

void History::note(uintptr_t begin, uintptr_t end, bool writes, const Access& access, const Clock& clock,
                   const Conflict& conflict) {
  look(begin, end, writes, clock, conflict, access.lenient);
  split(begin);
  split(end);
  if (writes) {
    overwrite(begin, end, access, clock);
    return;
  }
  auto it = segments_.lower_bound(begin);
  for (uintptr_t at = begin; at < end; ++it) {
    if (it == segments_.end() || it->first > at) {  // bytes that have no history yet
      uintptr_t until = it == segments_.end() ? end : std::min(end, it->first);
      it = segments_.emplace_hint(it, at, Segment{until, false, {}, {}});
    }
    std::vector<Access>& reads = it->second.reads;
    // A write that is ordered after this read is ordered after every read that this one is ordered after.
    drop_ordered(reads, clock);
    reads.push_back(access);
    at = it->second.end;
  }
}

void History::forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  segments_.erase(segments_.lower_bound(begin), segments_.lower_bound(end));
}

void History::prune(const Clock& known) {
  for (auto it = segments_.begin(); it != segments_.end();) {
    Segment& segment = it->second;
    auto& reads = segment.reads;
    if (segment.written && ordered_before(segment.write, known)) segment.written = false;
    drop_ordered(reads, known);
    if (!segment.written && reads.empty()) {
      it = segments_.erase(it);
      continue;
    }
    if (it != segments_.begin()) {
      Segment& before = std::prev(it)->second;
      bool same_write = before.written == segment.written && (!segment.written || before.write == segment.write);
      if (before.end == it->first && same_write && before.reads == reads) {
        before.end = segment.end;
        it = segments_.erase(it);
        continue;
      }
    }
    ++it;
  }
}

}  // namespace standin
