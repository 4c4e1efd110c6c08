// The happens-before order of everything that touches device or pinned memory, and what each access is checked against.
//
//   Clock      for each lane, its last position that is known to be done: one clock a stream, one for the host, one an event
//   lane       a stream's place in every clock; a destroyed stream's lane goes to a later stream
//   position   a number that grows with every operation of a lane
//   History    for every byte: the last write, and the reads since then that no later read is ordered after
//
// An operation at (lane, position) is ordered before a stream, an event or the host if their clock has reached the position.
// All host threads share one clock: what one of them has waited for counts as known to all. A missing wait between two host
// threads is therefore not seen.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace standin {

class Clock {
 public:
  uint64_t at(int lane) const { return size_t(lane) < positions_.size() ? positions_[lane] : 0; }
  void raise(int lane, uint64_t position) {
    if (positions_.size() <= size_t(lane)) positions_.resize(lane + 1, 0);
    if (positions_[lane] < position) positions_[lane] = position;
  }
  void join(const Clock& other) {
    if (positions_.size() < other.positions_.size()) positions_.resize(other.positions_.size(), 0);
    for (size_t i = 0; i < other.positions_.size(); i++)
      if (positions_[i] < other.positions_[i]) positions_[i] = other.positions_[i];
  }

 private:
  std::vector<uint64_t> positions_;
};

struct Access {
  int lane = -1;
  uint64_t position = 0;
  int stream = -1;              // the stream's number in messages
  const char* what = nullptr;   // interned: lives as long as the process
  // Of a read: a speculative copy's. Of a write: one in place, into a tensor that was there before. The two need no order:
  // whoever copies speculatively throws the copy away if the tensor's version has moved. Any other pair does.
  bool lenient = false;
  bool operator==(const Access& o) const {
    return lane == o.lane && position == o.position && stream == o.stream && what == o.what && lenient == o.lenient;
  }
};

inline bool ordered_before(const Access& access, const Clock& clock) { return access.position <= clock.at(access.lane); }

class History {
 public:
  // Called for an earlier access that conflicts, with whether it wrote and the bytes in question.
  using Conflict = std::function<void(const Access& earlier, bool earlier_wrote, uintptr_t begin, uintptr_t end)>;

  // Notes an access to [begin, end) and reports each earlier one that conflicts with it and that `clock` has not reached.
  void note(uintptr_t begin, uintptr_t end, bool writes, const Access& access, const Clock& clock, const Conflict& conflict);
  // Reports without noting: for the host, whose accesses are ordered before whatever it queues later.
  void look(uintptr_t begin, uintptr_t end, bool writes, const Clock& clock, const Conflict& conflict,
            bool lenient = false) const;
  // Forgets everything about [begin, end): the memory is given back, or new.
  void forget(uintptr_t begin, uintptr_t end);
  // Drops what `known` has reached, and joins neighbours that have the same history. For the host's clock this loses
  // nothing: every later operation is queued by the host and so is ordered after what the host knows.
  void prune(const Clock& known);
  size_t size() const { return segments_.size(); }

 private:
  struct Segment {
    uintptr_t end = 0;
    bool written = false;
    Access write;
    std::vector<Access> reads;
  };
  using Segments = std::map<uintptr_t, Segment>;

  void split(uintptr_t at);
  void overwrite(uintptr_t begin, uintptr_t end, const Access& access, const Clock& clock);
  Segments segments_;  // by their first byte; they do not overlap
};

}  // namespace standin
