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
// way: a record stays one. The loop calls Python for what its rows do with records (`do_ops`, `fetch`, `save_record`,
// `use_record`); so it does for a storage that leaves in part. Handles that autograd holds stay, and lead to Python's from then on.
//
// The GIL is held throughout. Where Python is called, the mutex is not: another thread may have all given back meanwhile, and the
// hook is then Python's (`Left`).

#include <torch/csrc/utils/pybind.h>

#include "allocator_memory.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <unordered_map>
#include <vector>

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

constexpr unsigned UNTIMED = 2;                 // cudaEventDisableTiming
constexpr int BY_ADDRESS = 4;                   // cudaMemcpyDefault
constexpr int64_t ALLOCATION_UNIT_BYTES = 512;  // as in units.py
constexpr char PYTHON_NODE[] = "N5torch8autograd6PyNodeE";  // the type of a Python function's node

enum Kind { KEPT, FIRST, AGAIN, USE, END };  // as in plan/step_program.py
enum Code { RECLAIM, RELEASE, OUT, DROP };   // the same
enum State { ON_DEVICE, LEAVING, ON_HOST, ARRIVING, RESTORED };
enum Reason { PARAMETER, LEAF, PERSISTENT, SMALL, EMPTY, NUM_REASONS };

struct Left : std::exception {};                                              // another thread had all given back
struct Refused : std::runtime_error { using runtime_error::runtime_error; };  // by the device, and all that was begun is over

// What was begun may run without an event at its end.
void wait_for_all() { cudaDeviceSynchronize(), cudaGetLastError(); }

void must(int error) {
  if (error == 0) return;
  wait_for_all();
  throw Refused("a call of the CUDA runtime was refused: error " + std::to_string(error));
}

bool is_capturing(void* stream) {
  int status = 0;
  return cudaStreamIsCapturing(stream, &status) != 0 || status != 0;
}

using Numbers = std::vector<int64_t>;
using Op = std::tuple<int, int, int64_t>;  // code, storage, last bytes of it that move
struct Row {
  int kind, number;  // END: no key tells the hook, which is Python's
  bool is_checked;
  int64_t growth;
  std::vector<Op> ops;
  std::vector<int> ins;
  py::object type;  // of a save: class, sizes, dtype, operators since the last save
  Numbers sizes;
  at::ScalarType dtype;
  int64_t since;  // ... of a use: the hook of its save
};
struct Program {
  std::vector<Row> rows;
  Numbers nbytes;
  std::vector<bool> in_part;           // by storage: whether only a part of it leaves
  Numbers group, offset, group_bytes;  // places on the host: two by storage, one by group
  Numbers until;                       // by hook: what the model has allocated by then, as cached
};

// A node is held by one or the other, by torch's version.
template <typename T, typename None>
c10::weak_intrusive_ptr<T, None> weakly(const c10::intrusive_ptr<T, None>& it) { return c10::weak_intrusive_ptr<T, None>(it); }
template <typename T>
std::weak_ptr<T> weakly(const std::shared_ptr<T>& it) { return it; }
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

PyObject* in_python(const c10::Storage& storage) { return storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj(); }

// Whether nobody refers to the storage but so many of ours. Its Python object, where it has one, is one reference, and is held by it
// alone unless somebody in Python has it, too.
bool is_held_by(const c10::Storage& storage, size_t ours) {
  PyObject* object = in_python(storage);
  return storage.use_count() == ours + (object != nullptr) && (object == nullptr || Py_REFCNT(object) == 1);
}

struct Loop;
struct Slot;
struct Save;
struct Handle {  // what autograd holds: with the others of its slot, the slot's only owner
  PyObject_HEAD
  Save* save;        // null: it was given back
  PyObject* python;  // Python's handle, once it was
};
PyTypeObject* handle_type = nullptr;

// A saved tensor, with what `SavedBytes` and `Origin` in swap/handles.py have of it.
struct Save {
  Handle* handle;
  std::shared_ptr<Loop> loop;
  Slot* slot;  // null: it stays
  int64_t hook;
  bool is_reference;  // it is held as it is; else by an alias, and what tells of its origin
  at::Tensor alias;
  int64_t version, output;
  WeakTensor tensor, counter;
  decltype(weakly(alias.grad_fn())) node;  // autograd holds it as long as the handle
  bool is_used = false;                    // since the storage last came back

  bool is_as_saved() const { return (int64_t)alias._version() == version; }
  py::tuple told() const {
    const auto maker = node.lock();  // an undefined tensor is None
    return py::make_tuple(py::handle((PyObject*)handle), hook, is_used, alias, version, at::Tensor(tensor.lock()), at::Tensor(counter.lock()),
                          maker ? maker->name() : "", maker ? (int64_t)maker->sequence_nr() : -1, output, is_reference);
  }
};

struct Slot {
  c10::Storage storage;
  int number, state = ON_DEVICE;
  int64_t first_hook, index, last_hook = 0, operators = 0;
  bool is_over = false, emptied = false;
  char* host = nullptr;  // its copy's place; null: there is none
  std::vector<Save*> saves;
  bool is_alone() const { return is_held_by(storage, saves.size() + 1) && storage.unsafeGetStorageImpl()->resizable(); }
  bool has_unwritten() const { return std::ranges::any_of(saves, &Save::is_as_saved); }
};

// Host memory for the copies of a group of storages, which are copied out one after the other.
struct Arena {
  py::object python;  // null: it was not taken yet, or was given back
  uintptr_t address = 0;
  int live = 0;  // copies in it
};

// Numbers of a step: what Python gives as the loop takes the hooks, and is told of them afterwards.
#define EACH_NUMBER(of)                                                                                                           \
  of(hook) of(last_used) of(since) of(number) of(latest_operator) of(next_index) of(limit) of(now) of(cumulative) of(taken)       \
  of(growth) of(peak) of(seen) of(saves) of(uses) of(ended) of(bytes_swapped_out) of(bytes_swapped_in) of(bytes_reclaimed)        \
  of(prefetches) of(uses_on_device) of(fallbacks)
#define DECLARED(name) int64_t name = 0;
#define NAMED(name) {#name, &name},

struct Step {
  EACH_NUMBER(DECLARED)
  std::vector<std::pair<const char*, int64_t*>> numbers() { return {EACH_NUMBER(NAMED)}; }
  std::array<int64_t, NUM_REASONS> kept{};
  Numbers growths, used;
  std::vector<std::unique_ptr<Slot>> slots;  // by storage
  std::unordered_set<Save*> all_saves;
  std::vector<bool> is_record;  // by storage: whether Python has it, or will
  std::unordered_map<const c10::StorageImpl*, Slot*> by_storage;
  std::vector<int> held;  // others refer to their memory: each hook tries again
  std::vector<Op> late;
  std::vector<Arena> arenas;  // by group
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outlived;
};

struct Loop : std::enable_shared_from_this<Loop>, Step {
  int index;
  void *out, *back, *compute = nullptr, *ready = nullptr;
  int64_t min_bytes, generation = 0;
  std::array<py::dict, 3> dicts;
  py::dict &safe = dicts[0], &claimed = dicts[1], &records_held = dicts[2];
  std::array<py::object, 6> calls;
  py::object &take = calls[0], &grown = calls[1], &do_ops = calls[2], &fetch = calls[3], &save_record = calls[4], &use_record = calls[5];
  std::vector<void*> events;                            // by storage: after its latest copy; the last is `ready`
  std::vector<std::pair<c10::Storage, int>> abandoned;  // under a copy when their last handle went
  std::mutex mutex;
  bool follows = false;
  std::shared_ptr<Program> program;
  c10::Stream stream{c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, 0)};
  unsigned long home = 0;  // the thread whose saves these are

  Loop(int device, uintptr_t out_stream, uintptr_t back_stream, int64_t least, std::array<py::dict, 3> of_dicts, std::array<py::object, 6> of_calls)
      : index(device), out((void*)out_stream), back((void*)back_stream), min_bytes(least), dicts(std::move(of_dicts)), calls(std::move(of_calls)) {}
  ~Loop() {
    if (!abandoned.empty()) wait_for_all();
    for (void* event : events) cudaEventDestroy(event);
  }
  void lock() {
    if (mutex.try_lock()) return;
    const py::gil_scoped_release no_gil;
    mutex.lock();
  }
  void unlock() { mutex.unlock(); }
  // Call Python, which may enter the executor's lock: who is in there may be waiting to have all given back.
  template <typename... Arguments>
  py::object call(const py::object& function, Arguments... arguments) {
    const auto before = std::pair(generation, hook);
    const auto told = py::make_tuple(arguments...);
    unlock();
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallObject(function.ptr(), told.ptr()));
    lock();
    if (!result) throw py::error_already_set();
    if (!follows || before != std::pair(generation, hook)) throw Left();
    return result;
  }

  // --- the ops

  bool is_current() const {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const auto device = guard.getDevice();
    return device.index() == index && guard.getStream(device) == stream && !is_capturing(compute);
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
  void settle_abandoned() {  // Note [Reclaim]: its copy -> the memory's next owner
    for (auto& [storage, n] : std::exchange(abandoned, {})) {
      if (cudaStreamWaitEvent(compute, events[n], 0) != 0) wait_for_all();
    }
  }
  // The place for a copy on the host; null: there is none. Calls Python.
  char* place(int n) {
    Arena& arena = arenas[program->group[n]];
    if (!arena.python) {
      py::list free;
      for (auto& other : arenas) {
        if (other.python && !other.live) free.append(std::exchange(other.python, {}));
      }
      const py::object found = call(take, program->group_bytes[program->group[n]], free);
      if (found.is_none()) return nullptr;
      std::tie(arena.python, arena.address) = found.cast<std::pair<py::object, uintptr_t>>();
    }
    return (char*)arena.address + program->offset[n];
  }
  void copy_out(Slot& slot, char* host) {
    const int n = slot.number;
    must(cudaEventRecord(ready, compute));
    must(cudaStreamWaitEvent(out, ready, 0));  // Note [Swap-out]: the operators that wrote it -> its copy
    must(cudaMemcpyAsync(host, slot.storage.data(), program->nbytes[n], BY_ADDRESS, out));
    must(cudaEventRecord(events[n], out));
    slot.state = LEAVING, slot.host = host;
    arenas[program->group[n]].live++, bytes_swapped_out += program->nbytes[n];
  }
  // Execute an op on a slot. False: there is no place on the host.
  bool carry_out(int code, int n) {
    if (code == RELEASE && slots[n]->state == RESTORED) let_go(*slots[n]);
    if (slots[n]->state == ON_DEVICE && (int64_t)slots[n]->storage.nbytes() == program->nbytes[n] && slots[n]->has_unwritten()) {
      char* host = place(n);
      if (host == nullptr) return false;
      if (slots[n] != nullptr) copy_out(*slots[n], host);
    }
    if (code == OUT || slots[n] == nullptr || slots[n]->state != LEAVING) return true;
    must(cudaStreamWaitEvent(compute, events[n], 0));  // Note [Reclaim]: its copy -> the next owner of its memory
    bytes_reclaimed += program->nbytes[n];
    let_go(*slots[n]);
    return true;
  }
  void copy_back(Slot& slot) try {
    const int n = slot.number;
    const int64_t nbytes = program->nbytes[n];
    auto* impl = slot.storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::getDeviceAllocator(c10::DeviceType::CUDA)->allocate(nbytes));
    impl->set_nbytes(nbytes);
    must(cudaEventRecord(ready, compute));
    must(cudaStreamWaitEvent(back, ready, 0));      // Note [Swap-in]: what the memory was last used for -> the copy into it
    must(cudaStreamWaitEvent(back, events[n], 0));  // ... and the copy out -> the copy back
    must(cudaMemcpyAsync(slot.storage.mutable_data(), slot.host, nbytes, BY_ADDRESS, back));
    must(cudaEventRecord(events[n], back));
    slot.state = ARRIVING;
    for (Save* save : slot.saves) save->is_used = false;
    taken += (nbytes + ALLOCATION_UNIT_BYTES - 1) & -ALLOCATION_UNIT_BYTES, bytes_swapped_in += nbytes, prefetches++;
  } catch (const c10::OutOfMemoryError&) {  // its use brings it back
  } catch (const Refused&) {
    empty(slot);
    fallbacks++;
  }
  // Do what is due before the hook's own storage is used. False: Python has to do this hook.
  bool run(const Row& row, int64_t at, bool moves) {
    const bool any_held = PyDict_GET_SIZE(records_held.ptr()) != 0, is_pending = any_held || !held.empty() || !late.empty() || !abandoned.empty();
    if (!moves && !is_pending && row.ops.empty() && row.ins.empty() && !row.is_checked) return true;
    if (!is_current()) return false;
    settle_abandoned();
    for (int n : std::exchange(held, {})) {
      if (slots[n] != nullptr && slots[n]->state == RESTORED) let_go(*slots[n]);
    }
    std::vector<Op> due = late, still_late, of_records;
    due.insert(due.end(), row.ops.begin(), row.ops.end());
    for (const auto& [code, n, nbytes] : due) {
      if (code == DROP) return false;
      if (is_record[n]) of_records.emplace_back(code, n, nbytes);
      else if (slots[n] == nullptr) continue;
      else if (slots[n]->state == ON_DEVICE && !is_over(*slots[n])) still_late.emplace_back(OUT, n, nbytes);
      else if (!carry_out(code, n)) return false;
    }
    if (any_held || !of_records.empty()) {
      const auto [took, of_them] = call(do_ops, of_records, at, latest_operator).template cast<std::pair<int64_t, std::vector<Op>>>();
      taken += took;
      still_late.insert(still_late.end(), of_them.begin(), of_them.end());
    }
    late = std::move(still_late);
    return !row.is_checked || check(row, at);
  }
  bool check(const Row& row, int64_t at) {
    const auto bytes = allocated_bytes((c10::DeviceIndex)index);
    // Room has to be made, or somebody has reset the readings.
    if (bytes.current + row.growth > limit || bytes.allocated < cumulative || bytes.peak < peak) return false;
    const int64_t grew = std::max<int64_t>(0, bytes.allocated - cumulative - taken);
    growths.push_back(grew);
    growth += grew, cumulative = bytes.allocated, taken = 0, now = bytes.current, peak = bytes.peak, seen = std::max(seen, now);
    if (row.number < 0) return true;
    const int64_t from = std::exchange(since, std::max(since, at));
    const int64_t all = std::exchange(growth, 0);
    if (at <= from || all == program->until[at] - (from < 0 ? 0 : program->until[from])) return true;
    return call(grown, from, all, at).cast<bool>();
  }
  void prefetch(const Row& row) try {
    for (int n : row.ins) {
      if (is_record[n]) taken += call(fetch, n).cast<int64_t>();
      else if (slots[n] != nullptr && slots[n]->state == ON_HOST) copy_back(*slots[n]);
    }
  } catch (const Left&) {  // uses bring back what is left of it
  }

  // --- the hooks. Null without a Python error: Python has to do it

  PyObject* save(PyObject* argument) {
    const Row& row = program->rows[hook + 1];
    if (row.kind >= USE || (PyObject*)Py_TYPE(argument) != row.type.ptr() || PyThread_get_thread_ident() != home) return nullptr;
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
  static PyObject* class_of(const at::Tensor& t) {  // what Python has not seen will be a plain tensor
    PyObject* object = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    return object == nullptr ? THPVariableClass : (PyObject*)Py_TYPE(object);
  }
  // As `reason_to_stay` in swap/classify.py.
  int reason_to_stay(const at::Tensor& t, const at::Tensor& base) const {
    for (const at::Tensor* of : {&t, base.defined() ? &base : &t}) {
      if (class_of(*of) != THPVariableClass) return class_of(*of) == ParameterClass ? PARAMETER : -1;
    }
    if (t.requires_grad() && t.is_leaf()) return LEAF;
    if (!t.has_storage()) return -1;
    if (has(safe, t.storage())) return PERSISTENT;
    const auto nbytes = (int64_t)t.storage().nbytes();
    return nbytes >= min_bytes ? -1 : nbytes ? SMALL : EMPTY;
  }
  py::object save_kept(const at::Tensor& t, const at::Tensor& base, const Row& row, int64_t operators) {
    const int reason = reason_to_stay(t, base);
    if (reason < 0 || !run(row, hook + 1, false)) return {};
    const auto& node = t.grad_fn();  // as `KeptTensor`
    const bool is_made_now = node && ((int64_t)node->sequence_nr() == operators - 1 || !std::strcmp(typeid(*node).name(), PYTHON_NODE));
    kept[reason]++;
    return make_handle(t, base, nullptr, reason == PARAMETER || !(base.defined() || is_made_now));
  }
  // As `StepLoop.save`.
  bool may_move(const at::Tensor& t, const at::Tensor& base, const Row& row) const {
    const at::Tensor& holder = base.defined() ? base : t;
    if (class_of(t) != THPVariableClass || class_of(holder) != THPVariableClass || t.layout() != at::kStrided || !t.has_storage()) return false;
    if (!t.is_cuda() || t.get_device() != index || t._is_zerotensor() || (t.requires_grad() && !holder.requires_grad())) return false;
    const auto& storage = t.storage();
    if ((holder.requires_grad() && holder.is_leaf()) || !storage.unsafeGetStorageImpl()->resizable() || has(safe, storage)) return false;
    return (int64_t)storage.nbytes() == program->nbytes[row.number];
  }
  py::object save_moving(const at::Tensor& t, const at::Tensor& base, const Row& row, int64_t operators) {
    const int n = row.number;
    if (!may_move(t, base, row) || !run(row, hook + 1, true)) return {};
    const auto& storage = t.storage();
    if (row.kind == FIRST && (slots[n] || by_storage.count(storage.unsafeGetStorageImpl()) || has(claimed, storage))) return {};
    if (is_record[n]) {
      py::object handle = call(save_record, t, hook + 1, next_index);
      if (handle.is_none()) return {};
      latest_operator = operators, next_index += row.kind == FIRST;
      return handle;
    }
    if (row.kind == FIRST) {
      slots[n].reset(new Slot{.storage = storage, .number = n, .first_hook = hook + 1, .index = next_index++});
      by_storage[storage.unsafeGetStorageImpl()] = slots[n].get();
    }
    Slot* slot = slots[n].get();
    if (slot == nullptr || !slot->storage.is_alias_of(storage) || slot->state != ON_DEVICE) return {};  // a copy may lack these bytes
    slot->last_hook = hook + 1, slot->operators = latest_operator = operators, slot->is_over = false;
    return make_handle(t, base, slot, false);
  }
  PyObject* use(Save& save) {
    const Row& row = program->rows[hook + 1];
    if (row.kind != USE || save.hook != row.since || !save.is_as_saved() || !run(row, hook + 1, save.slot != nullptr)) return nullptr;
    if (Slot* slot = save.slot; slot != nullptr) {
      if (slot->state == ON_HOST) return nullptr;  // room has to be made
      if (slot->state == ARRIVING) {
        must(cudaStreamWaitEvent(compute, events[slot->number], 0));  // Note [Swap-in]: the copy back -> the node that reads it
        slot->state = RESTORED;
      }
      uses_on_device++, save.is_used = true;
      used.push_back(slot->index);
    }
    // Of what moves a new reference for each user: the storage's use count then shows every holder.
    const at::Tensor t = save.slot == nullptr ? save.alias : save.alias.detach();
    note_use(row);  // it may call Python, and all be given back meanwhile
    return THPVariable_Wrap(t);
  }
  PyObject* use_of_python(PyObject* handle) {
    const Row& row = program->rows[hook + 1];
    if (row.kind != USE || !run(row, hook + 1, true)) return nullptr;
    py::object t = call(use_record, py::handle(handle), row.since);
    if (t.is_none()) return nullptr;
    note_use(row);
    return t.release().ptr();
  }
  void note_use(const Row& row) {
    hook++, last_used = row.since, uses++;
    prefetch(row);
  }
  py::object make_handle(const at::Tensor& t, const at::Tensor& base, Slot* slot, bool is_reference) {
    std::unique_ptr<Save> save(new Save{nullptr, shared_from_this(), slot, hook + 1, is_reference, is_reference ? t : t.detach(), t._version(),
                                        t.output_nr(), weakly(t.getIntrusivePtr()), weakly((base.defined() ? base : t).getIntrusivePtr()),
                                        weakly(t.grad_fn())});
    Handle* h = save->handle = PyObject_New(Handle, handle_type);
    if (h == nullptr) throw py::error_already_set();
    all_saves.insert(save.get());
    if (slot != nullptr) slot->saves.push_back(save.get());
    h->save = save.release(), h->python = nullptr;
    return py::reinterpret_steal<py::object>((PyObject*)h);
  }
  // The handle of a save is gone. With the last of its slot nobody needs the bytes any more. No call of the device: it may be anywhere.
  void drop(Save* save) {
    Slot* slot = save->slot;
    all_saves.erase(save);
    if (slot != nullptr) std::erase(slot->saves, save);
    delete save;
    if (slot == nullptr || !slot->saves.empty()) return;
    const auto last = std::move(slots[slot->number]);
    ended++;
    by_storage.erase(slot->storage.unsafeGetStorageImpl());
    if (slot->host != nullptr) arenas[program->group[slot->number]].live--;
    if (slot->state == LEAVING || slot->state == ARRIVING) abandoned.emplace_back(slot->storage, slot->number);
    else if (!slot->emptied && !is_held_by(slot->storage, 1)) outlived.emplace_back(slot->storage.getWeakStorageImpl());
  }

  // --- between Python's state and this one

  void enter(std::shared_ptr<Program> of, uintptr_t compute_stream, const py::dict& at) {
    const std::lock_guard<Loop> guard(*this);
    const c10::impl::VirtualGuardImpl current(c10::DeviceType::CUDA);
    settle_abandoned();
    static_cast<Step&>(*this) = Step{};
    program = std::move(of), compute = (void*)compute_stream, stream = current.getStream(current.getDevice());
    home = PyThread_get_thread_ident();
    for (auto [name, field] : numbers()) {
      if (at.contains(name)) *field = at[name].cast<int64_t>();
    }
    slots.resize(program->nbytes.size()), arenas.resize(program->group_bytes.size()), is_record = program->in_part;
    for (int n : at["records"].cast<std::vector<int>>()) is_record[n] = true;
    while (events.size() <= slots.size()) {
      events.push_back(nullptr);
      must(cudaEventCreateWithFlags(&events.back(), UNTIMED));
    }
    ready = events.back();
    follows = true, generation++;
  }
  py::object give_back() {
    const std::lock_guard<Loop> guard(*this);
    if (!follows) return py::none();
    const c10::DeviceGuard on(c10::Device(c10::DeviceType::CUDA, (c10::DeviceIndex)index));  // a null stream is the current device's
    if (!is_capturing(compute)) settle_abandoned();  // a capture may not wait for what began before it
    std::vector<py::object> alive;  // nothing dies where a collection runs in the middle of this: each slot has a handle
    for (const Save* save : all_saves) alive.push_back(py::reinterpret_borrow<py::object>((PyObject*)save->handle));
    const py::dict state = told();
    follows = false;
    for (Save* save : all_saves) {
      save->handle->save = nullptr;
      delete save;
    }
    static_cast<Step&>(*this) = Step{};
    return state;
  }
  py::dict told() {
    py::dict all;
    py::list of_slots, of_kept, of_arenas, of_outlived;
    for (const auto& slot : slots) {
      if (slot == nullptr) continue;
      py::list of_saves;
      for (const Save* save : slot->saves) of_saves.append(save->told());
      const py::object arena = slot->host == nullptr ? py::none() : arenas[program->group[slot->number]].python;
      of_slots.append(py::make_tuple(slot->number, slot->state, slot->index, slot->first_hook, slot->last_hook, slot->operators, is_over(*slot),
                                     slot->emptied, std::ranges::count(held, slot->number) > 0, arena, program->offset[slot->number], of_saves));
    }
    for (const Save* save : all_saves) {
      if (save->slot == nullptr) of_kept.append(save->told());
    }
    for (const auto& arena : arenas) {
      if (arena.python) of_arenas.append(arena.python);
    }
    for (const auto& weak : outlived) {
      if (auto impl = weak.lock()) of_outlived.append(py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(std::move(impl)))));
    }
    for (auto [name, field] : numbers()) all[name] = *field;
    all["slots"] = of_slots, all["kept_saves"] = of_kept, all["arenas"] = of_arenas, all["outlived"] = of_outlived, all["late"] = late;
    all["kept"] = kept, all["growths"] = growths, all["used"] = used;
    return all;
  }
};

void handle_dealloc(PyObject* self) {
  Handle* h = (Handle*)self;
  PyTypeObject* type = Py_TYPE(self);
  if (h->save != nullptr) std::shared_ptr<Loop>(h->save->loop)->drop(h->save);
  Py_XDECREF(h->python);
  PyObject_Free(self);
  Py_DECREF(type);
}

// --- what autograd calls

struct Hooks {
  std::shared_ptr<Loop> loop;
  py::object save, use, give_back;
};

// Do a hook here. None: Python has to do it.
template <typename Work>
std::optional<PyObject*> here(Loop& loop, Work work) {
  if (!loop.follows || c10::impl::TorchDispatchModeTLS::stack_len()) return {};
  const std::lock_guard<Loop> guard(loop);
  try {
    if (PyObject* result = loop.follows ? work() : nullptr) return result;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception&) {  // Left, Refused; a tensor without sizes, a version, or the like
  }
  return {};
}
PyObject* on_save(PyObject* self, PyObject* t) {
  Hooks& hooks = *static_cast<Hooks*>(PyCapsule_GetPointer(self, nullptr));
  const auto done = here(*hooks.loop, [&] { return hooks.loop->save(t); });
  return done ? *done : PyObject_CallOneArg(hooks.save.ptr(), t);
}
PyObject* on_use(PyObject* self, PyObject* argument) {
  Hooks& hooks = *static_cast<Hooks*>(PyCapsule_GetPointer(self, nullptr));
  Handle* h = Py_TYPE(argument) == handle_type ? (Handle*)argument : nullptr;
  if (h != nullptr && h->python != nullptr) argument = h->python, h = nullptr;
  const auto work = [&] { return h == nullptr ? hooks.loop->use_of_python(argument) : h->save ? hooks.loop->use(*h->save) : nullptr; };
  if (const auto done = here(*hooks.loop, work)) return *done;
  if (h != nullptr) {
    if (!py::reinterpret_steal<py::object>(PyObject_CallNoArgs(hooks.give_back.ptr()))) return nullptr;
    if (!h->python) return PyErr_Format(PyExc_RuntimeError, "a saved tensor: expected its handle to be given back, and it was not");
    argument = h->python;
  }
  return PyObject_CallOneArg(hooks.use.ptr(), argument);
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
  py::class_<Row>(m, "Row").def(py::init<int, int, bool, int64_t, std::vector<Op>, std::vector<int>, py::object, Numbers, at::ScalarType, int64_t>());
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<std::vector<Row>, Numbers, std::vector<bool>, Numbers, Numbers, Numbers, Numbers>());
  py::class_<Loop, std::shared_ptr<Loop>>(m, "Loop")
      .def(py::init<int, uintptr_t, uintptr_t, int64_t, std::array<py::dict, 3>, std::array<py::object, 6>>())
      .def("hooks", hooks_of).def("enter", &Loop::enter).def("give_back", &Loop::give_back).def_readwrite("follows", &Loop::follows);
  m.def("delegate", [](py::handle handle, py::object python) { ((Handle*)handle.ptr())->python = python.release().ptr(); },
        "Have a handle that was given back lead to one of Python's.");
}
