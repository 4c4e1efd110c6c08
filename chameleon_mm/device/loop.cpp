// The loop of swap/step_loop.py in C++: runs a compiled plan's rows, and calls no Python in a hook that is its row's.
//
//   loop = Loop(index, out_stream, back_stream, min_bytes, dicts, calls)
//   save, use = loop.hooks(python_save, python_use, give_back)         // what autograd calls
//   loop.enter(Program(rows, ...), compute_stream, at)                 // it takes the hooks behind the latest
//   state = loop.give_back()                                           // ... until here: all it has, for swap/native_loop.py
//
// A hook is done here whole, or by Python: whatever the loop does not know, Python's hook does. That one enters the executor's lock,
// which first has all given back (`HookLock.run`). So a step's state is here or there, never in both; Python's loop is the
// reference, and goes on at that very hook. A row that was begun here begins there again: each op first asks for the state of its
// storage.
//
// A saved storage is a Slot here and a `SavedStorage`, a record, there. Giving back makes records of slots. Nothing goes the other
// way: a record stays one. The loop calls Python for what its rows do with records (`op`, `fetch`, `save_record`, `use_record`); so
// it does for a storage that leaves in part. Handles that autograd holds stay, and lead to Python's from then on.
//
// The GIL is held throughout. Where Python is called, the mutex is not: another thread may have all given back meanwhile, and the
// hook is then Python's (`Left`).

#include <torch/csrc/python_headers.h>

#include "allocator_memory.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <typeindex>
#include <unordered_set>
#include <unordered_map>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds run the loop in Python alone"
#endif

namespace py = pybind11;

extern "C" {
int cudaDeviceSynchronize();
int cudaEventCreateWithFlags(void** event, unsigned flags);
int cudaEventDestroy(void* event);
int cudaEventRecord(void* event, void* stream);
int cudaGetLastError();
int cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, int kind, void* stream);
int cudaStreamIsCapturing(void* stream, int* status);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
}

namespace {

constexpr unsigned UNTIMED = 2;              // cudaEventDisableTiming
constexpr int BY_ADDRESS = 4;                // cudaMemcpyDefault
constexpr int64_t ALLOCATION_UNIT_BYTES = 512;  // as in units.py

int64_t allocated_size(int64_t nbytes) { return (nbytes + ALLOCATION_UNIT_BYTES - 1) & -ALLOCATION_UNIT_BYTES; }

enum Kind { KEPT, FIRST, AGAIN, USE, END };  // as in plan/step_program.py
enum Code { RECLAIM, RELEASE, OUT, DROP };   // the same
enum State { ON_DEVICE, LEAVING, ON_HOST, ARRIVING, RESTORED };
enum Reason { PARAMETER, LEAF, PERSISTENT, SMALL, EMPTY, NUM_REASONS };

struct Left {};                                                      // Python has to do the hook: another thread did something
struct Refused : std::runtime_error { using runtime_error::runtime_error; };  // by the device

void must(int error) {
  if (error != 0) throw Refused("a call of the CUDA runtime was refused: error " + std::to_string(error));
}

// After a refusal: what was begun may run without an event at its end.
void wait_for_all() { cudaDeviceSynchronize(), cudaGetLastError(); }

using Op = std::tuple<int, int, int64_t>;  // code, storage, last bytes of it that move
struct Row {
  int kind, number;
  bool is_checked;
  int64_t growth;
  std::vector<Op> ops;
  std::vector<int> ins;
  bool is_known;
  PyTypeObject* type;  // of a save: class, sizes, dtype, operators since the last save
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  int64_t since;  // ... of a use: the hook of its save
};

// Kind, storage, whether memory is checked, growth, ops, ins; whether the key is known, and the key: a save's class and dtype, or None.
using RowOfPython = std::tuple<int, int, bool, int64_t, std::vector<Op>, std::vector<int>, bool, py::object, std::vector<int64_t>, py::object, int64_t>;
using Numbers = std::vector<int64_t>;

struct Program {
  std::vector<Row> rows;
  Numbers nbytes;
  std::vector<bool> is_python;  // by storage: whether only a part of it leaves
  Numbers group, offset;        // places on the host, by storage
  Numbers group_bytes, members;
  Numbers until;

  Program(const std::vector<RowOfPython>& of_rows, Numbers sizes, std::vector<bool> in_part, std::array<Numbers, 4> places, Numbers allocated)
      : nbytes(std::move(sizes)), is_python(std::move(in_part)), group(places[0]), offset(places[1]), group_bytes(places[2]), members(places[3]),
        until(std::move(allocated)) {
    for (const auto& [kind, number, is_checked, growth, ops, ins, is_known, type, shape, dtype, since] : of_rows) {
      const auto scalar_type = dtype.is_none() ? at::kByte : reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
      const auto of_type = reinterpret_cast<PyTypeObject*>(type.ptr());  // Tensor or Parameter
      rows.push_back({kind, number, is_checked, growth, ops, ins, is_known, of_type, shape, scalar_type, since});
    }
  }
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
WeakTensor weakly(const at::Tensor& t) { return WeakTensor(t.getIntrusivePtr()); }

// A saved tensor: what `SavedBytes` and `Origin` in swap/handles.py have of it.
struct Save {
  at::Tensor alias;
  int64_t version, node = -1, output = 0;
  WeakTensor tensor, counter;
  std::string name;
  bool is_reference = true;
  // `is_reference`: it is held as it is. Else by an alias, and what tells of its origin.
  Save(const at::Tensor& t, const at::Tensor& base, bool is_reference)
      : alias(is_reference ? t : t.detach()), version(t._version()), tensor(weakly(t)), counter(weakly(base.defined() ? base : t)),
        is_reference(is_reference) {
    static std::unordered_map<std::type_index, std::string> names;  // a name takes a microsecond to make
    const auto& node_of = t.grad_fn();
    if (is_reference || !node_of) return;
    node = (int64_t)node_of->sequence_nr(), output = t.output_nr();
    if (is_of_python(*node_of)) name = node_of->name();
    else if (auto [found, is_new] = names.try_emplace(typeid(*node_of)); is_new) name = found->second = node_of->name();
    else name = found->second;
  }
  static bool is_of_python(const torch::autograd::Node& node) { return !std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE"); }
  bool is_as_saved() const { return (int64_t)alias._version() == version; }
  py::tuple told() const {
    const auto found = [](const WeakTensor& weak) -> py::object {
      auto impl = weak.lock();
      return impl ? py::cast(at::Tensor(std::move(impl))) : py::none();
    };
    return py::make_tuple(alias, version, found(tensor), found(counter), name, node, output, is_reference);
  }
};

PyObject* in_python(const c10::Storage& storage) { return storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj(); }

// Whether nobody refers to the storage but so many of ours. Its Python object, where it has one, is one reference, and is held by it
// alone unless somebody in Python has it, too.
bool is_held_by(const c10::Storage& storage, size_t ours) {
  PyObject* object = in_python(storage);
  return storage.use_count() == ours + (object != nullptr) && (object == nullptr || Py_REFCNT(object) == 1);
}

struct Slot {
  c10::Storage storage;
  int number, state = ON_DEVICE, handles = 0, left = 0, swap_in_number = 0, arena = -1;
  int64_t first_hook, nbytes, index, last_hook = 0, operators = 0;
  bool is_over = false, came_back = false, emptied = false, is_given_back = false;
  std::vector<std::unique_ptr<Save>> saves;
  bool is_alone() const { return is_held_by(storage, saves.size() + 1) && storage.unsafeGetStorageImpl()->resizable(); }
  bool has_unwritten() const {
    return std::any_of(saves.begin(), saves.end(), [](const auto& save) { return save->is_as_saved(); });
  }
};

// Host memory for the copies of a group of storages, which are copied out one after the other.
struct Arena {
  py::object python;  // null: it was given back
  char* address;
  int live = 0, to_come = 0;  // copies in it, and members of the group that had none yet
};

struct Loop;
struct Handle {  // what autograd holds: with the others of its slot, the slot's only owner
  PyObject_HEAD
  std::shared_ptr<Loop> loop;
  Slot* slot;
  Save* save;  // its slot's, or its own
  PyObject* python;
  int64_t epoch;
  int hook, swap_in_number;
};
PyTypeObject* handle_type = nullptr;

struct Step {
  int64_t hook = -1, last_used = -1, since = -1, epoch = -1, number = 0, latest_operator = -1, next_index = 0, budget = 0, margin = 0, now = 0,
          cumulative = 0, taken = 0, growth = 0, has_room = true, peak = 0, seen = 0;
  int64_t saves = 0, uses = 0, ended = 0, bytes_out = 0, bytes_in = 0, bytes_reclaimed = 0, prefetches = 0, uses_on_device = 0, on_demand = 0,
          refused = 0;
  std::array<int64_t, NUM_REASONS> kept{};
  Numbers growths, used;
  std::vector<std::pair<int64_t, int64_t>> peaks;  // readings of the device's peak before each reset, with the most bytes seen
  std::vector<Slot*> slots;
  std::vector<char> is_record;  // by storage: whether it is a record in Python
  std::unordered_map<const c10::StorageImpl*, Slot*> by_storage;
  std::vector<int> held;                                // others refer to their memory: each hook tries again
  std::vector<std::pair<c10::Storage, int>> abandoned;  // under a copy when their last handle went
  std::vector<Op> late;
  std::vector<Arena> arenas;
  Numbers arena_of;  // by group
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outlived;
  // What Python gives as the loop takes the hooks, and what it is told of them afterwards.
  std::vector<std::pair<const char*, int64_t*>> numbers() {
    return {{"hook", &hook}, {"last_used", &last_used}, {"since", &since}, {"epoch", &epoch}, {"number", &number},
            {"latest_operator", &latest_operator}, {"next_index", &next_index}, {"budget", &budget}, {"margin", &margin}, {"now", &now},
            {"cumulative", &cumulative}, {"taken", &taken}, {"growth", &growth}, {"has_room", &has_room},
            {"saves", &saves}, {"uses", &uses}, {"ended", &ended}, {"bytes_swapped_out", &bytes_out}, {"bytes_swapped_in", &bytes_in},
            {"bytes_reclaimed", &bytes_reclaimed}, {"prefetches", &prefetches}, {"uses_on_device", &uses_on_device},
            {"swap_ins_on_demand", &on_demand}, {"fallbacks", &refused}};
  }
};

struct Loop : std::enable_shared_from_this<Loop>, Step {
  int index;
  void *out, *back, *compute = nullptr, *ready = nullptr;
  int64_t min_bytes, generation = 0;
  std::array<py::dict, 3> dicts;
  py::dict &safe = dicts[0], &claimed = dicts[1], &records_held = dicts[2];
  std::array<py::object, 7> calls;
  py::object &take = calls[0], &grown = calls[1], &do_op = calls[2], &fetch = calls[3], &save_record = calls[4], &use_record = calls[5],
             &let_go_of_records = calls[6];
  std::vector<void*> events;  // by storage: after its latest copy
  std::mutex mutex;
  std::unordered_set<Handle*> handles;
  bool follows = false;
  std::shared_ptr<Program> program;
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0)};
  unsigned long home = 0;  // the thread whose saves these are

  Loop(int device, uintptr_t out_stream, uintptr_t back_stream, int64_t least, std::array<py::dict, 3> of_dicts, std::array<py::object, 7> of_calls)
      : index(device), out((void*)out_stream), back((void*)back_stream), min_bytes(least), dicts(std::move(of_dicts)), calls(std::move(of_calls)) {
    const c10::DeviceGuard on(c10::Device(c10::DeviceType::CUDA, (c10::DeviceIndex)index));
    must(cudaEventCreateWithFlags(&ready, UNTIMED));
  }
  ~Loop() {
    if (!abandoned.empty()) wait_for_all();
    events.push_back(ready);
    for (void* event : events) cudaEventDestroy(event);
  }
  void lock() {
    if (mutex.try_lock()) return;
    const py::gil_scoped_release no_gil;
    mutex.lock();
  }
  // Call Python, which may enter the executor's lock: who is in there may be waiting to have all given back.
  template <typename... Arguments>
  py::object call(const py::object& function, Arguments... arguments) {
    const auto before = std::pair(generation, hook);
    py::object result;
    mutex.unlock();
    try {
      result = function(arguments...);
    } catch (...) {
      lock();
      throw;
    }
    lock();
    if (!follows || before != std::pair(generation, hook)) throw Left();
    return result;
  }

  // --- the ops

  bool is_current() const {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const auto device = guard.getDevice();
    int capturing = 0;
    return device.index() == index && guard.getStream(device) == stream && cudaStreamIsCapturing(compute, &capturing) == 0 && !capturing;
  }
  bool is_over(Slot& slot) const {  // Note [Swap-out]; as `SwapOuts.is_over`
    if (!slot.is_over) slot.is_over = slot.operators < (PyThread_get_thread_ident() == home ? (int64_t)at::sequence_number::peek() : latest_operator);
    return slot.is_over;
  }
  void empty(Slot& slot) {
    auto* impl = slot.storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::DataPtr(nullptr, slot.storage.device()));
    impl->set_nbytes(0);
    slot.state = ON_HOST, slot.emptied = true;
  }
  void let_go(Slot& slot) {
    if (slot.is_alone()) return empty(slot);
    slot.state = RESTORED;
    held.push_back(slot.number);
  }
  void let_go_of_held() {
    for (int n : std::exchange(held, {})) {
      if (slots[n] != nullptr && slots[n]->state == RESTORED) let_go(*slots[n]);
    }
  }
  void settle_abandoned() try {
    for (auto& [storage, n] : abandoned) must(cudaStreamWaitEvent(compute, events[n], 0));  // Note [Reclaim]: its copy -> the memory's next owner
    abandoned.clear();
  } catch (const Refused&) {
    wait_for_all(), abandoned.clear();
  }
  // The place for a copy on the host; null: there is none.
  char* place(Slot*& slot) {
    const int n = slot->number;
    const int64_t g = program->group[n];
    if (g < 0) return nullptr;
    if (arena_of[g] < 0) {
      py::list free;
      for (auto& arena : arenas) {
        if (arena.python && !arena.live && !arena.to_come) free.append(std::exchange(arena.python, {}));
      }
      const py::object found = call(take, program->group_bytes[g], free);
      slot = slots[n];  // Python ran
      if (found.is_none() || slot == nullptr) return nullptr;
      const auto [python, address] = found.cast<std::pair<py::object, uintptr_t>>();
      arena_of[g] = (int64_t)arenas.size();
      arenas.push_back({python, (char*)address, 0, program->members[g]});
    }
    return arenas[arena_of[g]].address + program->offset[n];
  }
  bool copy_out(Slot* slot, int64_t nbytes) {
    if (slot->state != ON_DEVICE) return true;
    if ((int64_t)slot->storage.nbytes() != slot->nbytes || !slot->has_unwritten()) return true;
    const int n = slot->number;
    char* host = place(slot);
    if (host == nullptr) return false;
    must(cudaEventRecord(ready, compute));
    must(cudaStreamWaitEvent(out, ready, 0));  // Note [Swap-out]: the operators that wrote it -> its copy
    must(cudaMemcpyAsync(host, slot->storage.data(), nbytes, BY_ADDRESS, out));
    must(cudaEventRecord(events[n], out));
    slot->state = LEAVING, slot->arena = (int)arena_of[program->group[n]];
    arenas[slot->arena].live++, arenas[slot->arena].to_come--;
    bytes_out += nbytes;
    return true;
  }
  bool reclaim(Slot* slot, int64_t nbytes, bool again) {
    if (again && slot->state == RESTORED) let_go(*slot);
    const int n = slot->number;
    if (!copy_out(slot, nbytes)) return false;
    slot = slots[n];
    if (slot == nullptr || slot->state != LEAVING) return true;
    must(cudaStreamWaitEvent(compute, events[n], 0));  // Note [Reclaim]: its copy -> the next owner of its memory
    bytes_reclaimed += nbytes;
    let_go(*slot);
    return true;
  }
  void copy_back(Slot& slot) try {
    auto* impl = slot.storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::getDeviceAllocator(c10::DeviceType::CUDA)->allocate(slot.nbytes));
    impl->set_nbytes(slot.nbytes);
    const int n = slot.number;
    must(cudaEventRecord(ready, compute));
    must(cudaStreamWaitEvent(back, ready, 0));      // Note [Swap-in]: what the memory was last used for -> the copy into it
    must(cudaStreamWaitEvent(back, events[n], 0));  // ... and the copy out -> the copy back
    must(cudaMemcpyAsync(slot.storage.mutable_data(), arenas[slot.arena].address + program->offset[n], slot.nbytes, BY_ADDRESS, back));
    must(cudaEventRecord(events[n], back));
    slot.state = ARRIVING, slot.came_back = true;
    slot.swap_in_number++, slot.left = slot.handles;
    note_taken(allocated_size(slot.nbytes));
    bytes_in += slot.nbytes, prefetches++;
  } catch (const c10::OutOfMemoryError&) {  // its use brings it back
  } catch (const Refused&) {
    wait_for_all();
    empty(slot);
    refused++;
  }
  void note_taken(int64_t nbytes) { taken += nbytes, now += nbytes; }
  // Do what is due before the hook's own storage is used. False: Python has to do this hook.
  bool run(const Row& row, int64_t at, bool moves) {
    const bool any_held = !held.empty() || PyDict_GET_SIZE(records_held.ptr());
    if (!moves && row.ops.empty() && row.ins.empty() && !row.is_checked && late.empty() && !any_held && abandoned.empty()) return true;
    if (!is_current()) return false;
    settle_abandoned();
    if (any_held) let_go_of_held();
    if (PyDict_GET_SIZE(records_held.ptr())) call(let_go_of_records);
    std::vector<Op> still_late;
    const std::vector<Op> were_late = late;
    for (const auto* ops : {&were_late, &row.ops}) {
      for (const auto& [code, n, nbytes] : *ops) {
        Slot* slot = slots[n];
        if (code == DROP) return false;
        if (is_record[n]) {
          const auto took = call(do_op, code, n, nbytes, at, latest_operator).template cast<int64_t>();
          if (took < 0) still_late.emplace_back(OUT, n, nbytes);
          else note_taken(took);
        } else if (slot != nullptr && slot->state == ON_DEVICE && !is_over(*slot)) {
          still_late.emplace_back(OUT, n, nbytes);
        } else if (slot != nullptr && !(code == OUT ? copy_out(slot, nbytes) : reclaim(slot, nbytes, code == RELEASE))) {
          return false;
        }
      }
    }
    late = std::move(still_late);
    return !row.is_checked || check(row, at);
  }
  bool check(const Row& row, int64_t at) {
    const auto bytes = allocated_bytes((c10::DeviceIndex)index);
    if (bytes.current + row.growth + margin > budget || bytes.allocated < cumulative) return false;  // room has to be made
    const int64_t grew = std::max<int64_t>(0, bytes.allocated - cumulative - taken);
    growths.push_back(grew);
    if (bytes.peak < peak) end_peak();
    cumulative = bytes.allocated, taken = 0, now = bytes.current, peak = bytes.peak, seen = std::max(seen, now), has_room = true, growth += grew;
    if (row.number < 0) return true;
    const int64_t from = std::exchange(since, std::max(since, at));
    const int64_t all = std::exchange(growth, 0);
    if (at <= from || all == program->until[at] - (from < 0 ? 0 : program->until[from])) return true;
    return call(grown, from, all, at).cast<bool>();
  }
  void end_peak() {
    if (peak) peaks.emplace_back(std::exchange(peak, 0), std::exchange(seen, 0));
  }
  void prefetch(const Row& row) try {
    for (int n : row.ins) {
      if (is_record[n]) note_taken(call(fetch, n, has_room).cast<int64_t>());
      if (slots[n] == nullptr || slots[n]->state != ON_HOST) continue;
      if (!has_room) return;
      copy_back(*slots[n]);
    }
  } catch (const Left&) {  // uses bring back what is left of it
  }

  // --- the hooks. Null without a Python error: Python has to do it

  PyObject* save(PyObject* argument) {
    const Row& row = program->rows[hook + 1];
    if (!row.is_known || row.kind >= USE || Py_TYPE(argument) != row.type || PyThread_get_thread_ident() != home) return nullptr;
    const at::Tensor& t = THPVariable_Unpack(argument);
    const int64_t operators = (int64_t)at::sequence_number::peek();
    if (operators - number != row.since || t.scalar_type() != row.dtype || t.is_nested() || !t.sizes().equals(row.sizes)) return nullptr;
    const at::Tensor base = t.is_view() ? at::Tensor(t._base()) : at::Tensor();
    py::object made = row.kind == KEPT ? save_kept(t, base, row, operators) : save_moving(t, base, row, operators);
    if (!made) return nullptr;
    hook++, number = operators, saves++;
    prefetch(row);
    return made.release().ptr();
  }
  static bool has(const py::dict& dict, const c10::Storage& storage) {  // by the id of its object, which lives as long as it does
    PyObject* object = in_python(storage);
    return object && PyDict_Contains(dict.ptr(), py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(object)).ptr()) == 1;
  }
  static PyTypeObject* class_of(const at::Tensor& t) {  // what Python has not seen will be a plain tensor
    PyObject* object = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    return object == nullptr ? plain() : Py_TYPE(object);
  }
  static PyTypeObject* plain() { return reinterpret_cast<PyTypeObject*>(THPVariableClass); }
  static PyTypeObject* parameter() { return reinterpret_cast<PyTypeObject*>(ParameterClass); }
  // As `reason_to_stay` in swap/classify.py.
  int reason_to_stay(const at::Tensor& t, const at::Tensor& base, PyTypeObject* type) const {
    if (type == parameter()) return PARAMETER;
    if (type != plain()) return -1;
    if (base.defined() && class_of(base) != type) return class_of(base) == parameter() ? PARAMETER : -1;
    if (t.requires_grad() && t.is_leaf()) return LEAF;
    if (!t.has_storage()) return -1;
    if (has(safe, t.storage())) return PERSISTENT;
    const auto nbytes = (int64_t)t.storage().nbytes();
    return nbytes >= min_bytes ? -1 : nbytes ? SMALL : EMPTY;
  }
  py::object save_kept(const at::Tensor& t, const at::Tensor& base, const Row& row, int64_t operators) {
    const int reason = reason_to_stay(t, base, row.type);
    if (reason < 0 || !run(row, hook + 1, false)) return {};
    bool may_be_result = reason != PARAMETER && base.defined();
    if (const auto& node = t.grad_fn(); reason != PARAMETER && !may_be_result && node) {  // as `KeptTensor`
      may_be_result = (int64_t)node->sequence_nr() == operators - 1 || Save::is_of_python(*node);
    }
    kept[reason]++;
    return make_handle(nullptr, new Save(t, base, !may_be_result));
  }
  // As `StepLoop._may_move`.
  bool may_move(const at::Tensor& t, const at::Tensor& base, const Row& row) const {
    const at::Tensor& holder = base.defined() ? base : t;
    if (row.type != plain() || class_of(holder) != plain() || t.layout() != at::kStrided || !t.has_storage()) return false;
    if (!t.is_cuda() || t.get_device() != index || t._is_zerotensor() || (t.requires_grad() && !holder.requires_grad())) return false;
    const auto& storage = t.storage();
    if ((holder.requires_grad() && holder.is_leaf()) || !storage.unsafeGetStorageImpl()->resizable() || has(safe, storage)) return false;
    return (int64_t)storage.nbytes() == program->nbytes[row.number];
  }
  py::object save_moving(const at::Tensor& t, const at::Tensor& base, const Row& row, int64_t operators) {
    const int n = row.number;
    if (!may_move(t, base, row) || !run(row, hook + 1, true)) return {};
    const auto& storage = t.storage();
    if (row.kind == FIRST && (slots[n] || by_storage.count(storage.unsafeGetStorageImpl()))) return {};
    if (is_record[n] || program->is_python[n]) {
      py::object handle = call(save_record, t, hook + 1, next_index);
      if (handle.is_none()) return {};
      latest_operator = operators, next_index += row.kind == FIRST, is_record[n] = 1;
      return handle;
    }
    if (row.kind == FIRST) {
      if (has(claimed, storage)) return {};
      slots[n] = new Slot{.storage = storage, .number = n, .first_hook = hook + 1, .nbytes = program->nbytes[n], .index = next_index++};
      by_storage[storage.unsafeGetStorageImpl()] = slots[n];
    }
    Slot* slot = slots[n];
    if (slot == nullptr || !slot->storage.is_alias_of(storage) || slot->state != ON_DEVICE) return {};  // a copy may lack these bytes
    slot->saves.push_back(std::make_unique<Save>(t, base, false));
    slot->last_hook = hook + 1, slot->operators = latest_operator = operators, slot->is_over = false, slot->left++;
    return make_handle(slot, slot->saves.back().get());
  }
  PyObject* use(Handle* handle) {
    const Row& row = program->rows[hook + 1];
    if (!row.is_known || row.kind != USE || handle->hook != row.since || handle->epoch != epoch || !handle->save->is_as_saved()) return nullptr;
    if (!run(row, hook + 1, handle->slot != nullptr)) return nullptr;
    Slot* slot = handle->slot;
    if (slot != nullptr && slot->state == ON_HOST) {
      if (now + allocated_size(slot->nbytes) + row.growth + margin > budget) return nullptr;  // room has to be made
      copy_back(*slot);
      if (slot->state == ON_HOST) return nullptr;
      prefetches--, on_demand++, uses_on_device--;
    }
    if (slot != nullptr) {
      if (slot->state == ARRIVING) {
        must(cudaStreamWaitEvent(compute, events[slot->number], 0));  // Note [Swap-in]: the copy back -> the node that reads it
        slot->state = RESTORED;
      }
      uses_on_device++;
      used.push_back(slot->index);
      slot->left -= std::exchange(handle->swap_in_number, slot->swap_in_number) != slot->swap_in_number;
    }
    // Of what moves a new reference for each user: the storage's use count then shows every holder.
    const at::Tensor t = slot == nullptr ? handle->save->alias : handle->save->alias.detach();
    note_use(row);  // it may call Python, and all be given back meanwhile
    return THPVariable_Wrap(t);
  }
  PyObject* use_of_python(PyObject* handle) {
    const Row& row = program->rows[hook + 1];
    if (!row.is_known || row.kind != USE || !run(row, hook + 1, true)) return nullptr;
    py::object t = call(use_record, py::handle(handle), row.since);
    if (t.is_none()) return nullptr;
    note_use(row);
    return t.release().ptr();
  }
  void note_use(const Row& row) {
    hook++, last_used = row.since, uses++;
    prefetch(row);
  }
  py::object make_handle(Slot* slot, Save* save) {
    Handle* h = PyObject_New(Handle, handle_type);
    if (h == nullptr) throw py::error_already_set();
    new (&h->loop) std::shared_ptr<Loop>(shared_from_this());
    h->slot = slot, h->save = save, h->python = nullptr, h->epoch = epoch, h->hook = hook + 1, h->swap_in_number = -1;
    handles.insert(h);
    if (slot) slot->handles++;
    return py::reinterpret_steal<py::object>((PyObject*)h);
  }
  // A handle of the slot is gone. With the last of them nobody needs the bytes any more. No call of the device: it may be anywhere.
  void drop(Slot* slot) {
    if (--slot->handles) return;
    const std::unique_ptr<Slot> ended(slot);
    if (slot->is_given_back) return;
    slots[slot->number] = nullptr, Step::ended++;
    by_storage.erase(slot->storage.unsafeGetStorageImpl());
    if (slot->arena >= 0) arenas[slot->arena].live--;
    slot->saves.clear();
    if (slot->state == LEAVING || slot->state == ARRIVING) abandoned.emplace_back(slot->storage, slot->number);
    else if (!slot->came_back && !is_held_by(slot->storage, 1)) outlived.emplace_back(slot->storage.getWeakStorageImpl());
  }

  // --- between Python's state and this one

  void enter(std::shared_ptr<Program> of, uintptr_t compute_stream, const py::dict& at) {
    lock();
    const std::lock_guard<std::mutex> guard(mutex, std::adopt_lock);
    const c10::impl::VirtualGuardImpl current(c10::DeviceType::CUDA);
    settle_abandoned();
    static_cast<Step&>(*this) = Step{};
    program = std::move(of), compute = (void*)compute_stream, stream = current.getStream(current.getDevice());
    home = PyThread_get_thread_ident();
    for (auto [name, field] : numbers()) {
      if (at.contains(name)) *field = at[name].cast<int64_t>();
    }
    slots.resize(program->nbytes.size()), is_record.resize(program->nbytes.size()), arena_of.assign(program->group_bytes.size(), -1);
    for (int n : at["records"].cast<std::vector<int>>()) is_record[n] = 1;
    while (events.size() < slots.size()) {
      events.push_back(nullptr);
      must(cudaEventCreateWithFlags(&events.back(), UNTIMED));
    }
    follows = true, generation++;
  }
  py::object give_back() {
    lock();
    const std::lock_guard<std::mutex> guard(mutex, std::adopt_lock);
    if (!follows) return py::none();
    follows = false;
    const c10::DeviceGuard on(c10::Device(c10::DeviceType::CUDA, (c10::DeviceIndex)index));  // a null stream is the current device's
    int capturing = 0;
    cudaStreamIsCapturing(compute, &capturing);
    decltype(abandoned) later;  // a capture may not wait for what began before it
    if (capturing) later = std::exchange(abandoned, {});
    settle_abandoned();
    std::vector<py::object> held_handles;  // nothing dies where a collection runs in the middle of this: each slot has one
    for (Handle* h : handles) held_handles.push_back(py::reinterpret_borrow<py::object>((PyObject*)h));
    py::list of_slots, of_handles, of_arenas, of_outlived;
    std::unordered_map<const void*, size_t> position;  // of slots, and of saves in theirs
    for (Slot* slot : slots) {
      if (slot == nullptr) continue;
      py::list told;
      for (const auto& save : slot->saves) position[save.get()] = told.size(), told.append(save->told());
      position[slot] = of_slots.size(), slot->is_given_back = true;
      of_slots.append(py::make_tuple(slot->number, slot->nbytes, slot->state, slot->index, slot->first_hook, slot->last_hook, slot->operators,
                                     is_over(*slot), slot->came_back, slot->emptied, std::count(held.begin(), held.end(), slot->number) > 0,
                                     slot->arena, program->offset[slot->number], slot->handles, slot->left, slot->swap_in_number, told));
    }
    for (Handle* h : handles) {
      const auto object = py::reinterpret_borrow<py::object>((PyObject*)h);
      if (h->slot && !position.count(h->slot)) continue;  // it was told before, to who did not come to its end
      if (h->slot) of_handles.append(py::make_tuple(object, h->epoch, h->hook, h->swap_in_number, position.at(h->slot), position.at(h->save)));
      else of_handles.append(py::make_tuple(object, h->epoch, h->hook, -1, -1, h->save->told()));
    }
    for (const auto& arena : arenas) of_arenas.append(arena.python ? arena.python : py::none());
    for (const auto& weak : outlived) {
      if (auto impl = weak.lock()) of_outlived.append(py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(std::move(impl)))));
    }
    py::dict all;
    for (auto [name, field] : numbers()) all[name] = *field;
    all["slots"] = of_slots, all["handles"] = of_handles, all["arenas"] = of_arenas, all["outlived"] = of_outlived, all["late"] = late;
    end_peak();
    all["kept"] = kept, all["growths"] = growths, all["peaks"] = peaks, all["used"] = used;
    static_cast<Step&>(*this) = Step{};
    abandoned = std::move(later);
    return all;
  }
};

void forget(Handle* h) {  // take it out of its loop's handles, and let go of what it saved
  if (h->save == nullptr) return;
  h->loop->handles.erase(h);
  if (h->slot) h->loop->drop(h->slot);
  else delete h->save;
  h->slot = nullptr, h->save = nullptr;
}
void handle_dealloc(PyObject* self) {
  Handle* h = (Handle*)self;
  PyTypeObject* type = Py_TYPE(self);
  forget(h);
  Py_XDECREF(h->python);
  h->loop.~shared_ptr<Loop>();
  PyObject_Free(self);
  Py_DECREF(type);
}
void delegate(const py::object& handle, py::object python) {
  Handle* h = (Handle*)handle.ptr();
  h->python = python.release().ptr();
  forget(h);
}

// --- what autograd calls

struct Hooks {
  std::shared_ptr<Loop> loop;
  py::object save, use, give_back;
};

// Do a hook here, else by `python(argument)`.
template <typename Work>
PyObject* either(Loop& loop, Work work, const py::object& python, PyObject* argument) {
  if (loop.follows && !c10::impl::TorchDispatchModeTLS::stack_len()) {
    loop.lock();
    const std::lock_guard<std::mutex> guard(loop.mutex, std::adopt_lock);
    try {
      if (PyObject* result = loop.follows ? work() : nullptr) return result;
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    } catch (const Refused&) {
      wait_for_all();
    } catch (const Left&) {
    } catch (const std::exception&) {  // a tensor without sizes, a version, or the like
    }
  }
  return python ? PyObject_CallOneArg(python.ptr(), argument) : Py_NewRef(Py_None);
}
PyObject* on_save(PyObject* self, PyObject* t) {
  Hooks& hooks = *static_cast<Hooks*>(PyCapsule_GetPointer(self, nullptr));
  return either(*hooks.loop, [&] { return THPVariable_Check(t) ? hooks.loop->save(t) : nullptr; }, hooks.save, t);
}
PyObject* on_use(PyObject* self, PyObject* argument) {
  Hooks& hooks = *static_cast<Hooks*>(PyCapsule_GetPointer(self, nullptr));
  if (Py_TYPE(argument) == handle_type) {
    Handle* h = (Handle*)argument;
    if (h->python == nullptr) {
      PyObject* t = either(*hooks.loop, [&] { return h->save ? hooks.loop->use(h) : nullptr; }, {}, nullptr);
      if (t != Py_None) return t;
      Py_DECREF(t);
      const auto done = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(hooks.give_back.ptr()));
      if (!done) return nullptr;
      if (!h->python) return PyErr_Format(PyExc_RuntimeError, "a saved tensor: expected its handle to be given back, and it was not");
    }
    argument = h->python;
  }
  return either(*hooks.loop, [&] { return hooks.loop->use_of_python(argument); }, hooks.use, argument);
}
PyMethodDef save_method = {"save", on_save, METH_O, "What autograd calls to save a tensor."};
PyMethodDef use_method = {"use", on_use, METH_O, "What autograd calls to use a saved tensor."};

py::tuple hooks_of(std::shared_ptr<Loop> loop, py::object save, py::object use, py::object give_back) {
  const py::capsule self(new Hooks{std::move(loop), std::move(save), std::move(use), std::move(give_back)}, [](void* of) { delete static_cast<Hooks*>(of); });
  return py::make_tuple(py::reinterpret_steal<py::object>(PyCFunction_New(&save_method, self.ptr())),
                        py::reinterpret_steal<py::object>(PyCFunction_New(&use_method, self.ptr())));
}

PyType_Slot handle_slots[] = {{Py_tp_dealloc, (void*)handle_dealloc}, {0, nullptr}};
PyType_Spec handle_spec = {"chameleon_mm_loop.Handle", sizeof(Handle), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots};

}  // namespace

PYBIND11_MODULE(chameleon_mm_loop, m) {
  handle_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&handle_spec));
  if (handle_type == nullptr) throw py::error_already_set();
  py::class_<Program, std::shared_ptr<Program>>(m, "Program").def(py::init<const std::vector<RowOfPython>&, Numbers, std::vector<bool>, std::array<Numbers, 4>, Numbers>());
  py::class_<Loop, std::shared_ptr<Loop>>(m, "Loop")
      .def(py::init<int, uintptr_t, uintptr_t, int64_t, std::array<py::dict, 3>, std::array<py::object, 7>>())
      .def("hooks", hooks_of).def("enter", &Loop::enter).def("give_back", &Loop::give_back).def_readwrite("follows", &Loop::follows);
  m.def("delegate", delegate, "Have a handle that autograd holds lead to one of Python's.");
}
