// The loop of swap/step_loop.py in C++: runs a compiled plan's rows, and calls no Python in a hook that is its row's.
//
//   loop = Loop(index, out_stream, back_stream, min_bytes, python)
//   save, use = loop.hook_of(True, python_save), loop.hook_of(False, python_use)     // what autograd calls
//   loop.hook = 3; ...; loop.enter(Program(rows, ...), compute_stream, is_record)    // it takes the hooks behind the latest
//   state = loop.give_back()                                                         // ... until here: all it has, with its numbers
// That file is the reference, and says what is done where. The GIL is held throughout. Where Python is called, the mutex is not:
// another thread may have all given back meanwhile, and the hook is then Python's (`Left`).

#include "device_memory.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <unordered_set>

namespace py = pybind11;

extern "C" {
int cudaDeviceSynchronize();
int cudaEventCreateWithFlags(void** event, unsigned flags);
int cudaEventDestroy(void* event);
int cudaEventRecord(void* event, void* stream);
int cudaGetLastError();
int cudaMemcpyAsync(void* dst, const void* src, size_t nbytes, int kind, void* stream);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
}

namespace {

constexpr unsigned UNTIMED = 2;                 // cudaEventDisableTiming
constexpr int BY_ADDRESS = 4;                   // cudaMemcpyDefault
constexpr int64_t ALLOCATION_UNIT_BYTES = 512;  // as in units.py
constexpr std::string_view PYTHON_NODE = "N5torch8autograd6PyNodeE";  // the type of a Python function's node

enum Kind { KEPT, FIRST, AGAIN, USE, END };                      // as in plan/step_program.py
enum Code { RECLAIM, RELEASE, OUT };                             // the same
enum State { ON_DEVICE, LEAVING, ON_HOST, ARRIVING, RESTORED };  // as in swap/host_copy.py
constexpr const char* REASONS[] = {"parameter", "leaf", "persistent", "small", "empty"};  // as the first of Reason
enum Reason { PARAMETER, LEAF, PERSISTENT, SMALL, EMPTY, NUM_REASONS, NONE, UNKNOWN };  // to stay; NONE: it may move; UNKNOWN: Python has to look

struct Left : std::exception {};                                              // another thread had all given back
struct Refused : std::runtime_error { using runtime_error::runtime_error; };  // by the device, and all that was begun is over

// What was begun may run without an event at its end.
void wait_for_all() { cudaDeviceSynchronize(), cudaGetLastError(); }

void must(int error) {
  if (error == 0) return;
  wait_for_all();
  throw Refused("a call of the CUDA runtime was refused: error " + std::to_string(error));
}

using Numbers = std::vector<int64_t>;
using Op = std::tuple<int, int, int64_t>;  // code, storage, last bytes of it that move
struct Row {
  int kind, number;  // END: no key tells the hook, which is Python's
  bool is_checked;
  int64_t growth, grew;  // until the next check, and since the last comparison
  std::vector<Op> ops;
  std::vector<int> ins;
  py::object type;  // of a save: class, sizes, dtype, operators since the last save
  Numbers sizes;
  at::ScalarType dtype;
  int64_t since;  // ... of a use: the hook of its save
};
struct Program {
  std::vector<Row> rows;
  Numbers nbytes, group, offset;  // by storage, with its place on the host
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
// What `SavedBytes` and `Origin` in swap/handles.py have of a saved tensor: the node that made it, with its number and output.
struct Origin {
  WeakTensor counter, tensor;
  std::string name;
  int64_t number, output;
};

struct Save {
  PyObject* handle;
  std::shared_ptr<struct Loop> loop;
  struct Slot* slot;  // null: it stays
  int64_t hook;
  at::Tensor alias;
  int64_t version;
  std::unique_ptr<Origin> origin;  // null: the alias is the tensor itself
  bool is_used = false;            // since the storage last came back

  bool is_as_saved() const { return (int64_t)alias._version() == version; }
};

struct Handle {  // what autograd holds, in a capsule: with the others of its slot, the slot's only owner
  std::optional<Save> save;        // none: it was given back
  py::object python = py::none();  // Python's handle, once it was
};
Handle* handle_of(PyObject* capsule) { return static_cast<Handle*>(PyCapsule_GetPointer(capsule, nullptr)); }

struct Slot {  // a saved storage
  c10::Storage storage;
  int number, state = ON_DEVICE;
  int64_t operators = 0;
  bool emptied = false;
  std::vector<Save*> saves;
  bool is_alone() const { return is_held_by(storage, saves.size() + 1) && storage.unsafeGetStorageImpl()->resizable(); }
  bool has_unwritten() const { return std::ranges::any_of(saves, &Save::is_as_saved); }
  bool includes(const at::Tensor& t, const at::Tensor& holder) const {
    return std::ranges::any_of(saves, [&](const Save* s) {
      const bool is_same = s->is_as_saved() && s->version == (int64_t)t._version() && s->origin->counter.lock() == holder.getIntrusivePtr();
      return is_same && s->alias.is_contiguous() && s->alias.nbytes() == storage.nbytes();
    });
  }
};

// Host memory for the copies of a group of storages, which are copied out one after the other. Python has its block.
struct Arena {
  uintptr_t address = 0;  // 0: it was not taken yet, or was given back
  int live = 0;           // copies in it
};

struct Step {
  std::array<int64_t, NUM_REASONS> kept{};
  Numbers growths;
  std::vector<std::unique_ptr<Slot>> slots;  // by storage
  std::unordered_set<Save*> all_saves;
  std::unordered_map<const c10::StorageImpl*, Slot*> by_storage;
  std::vector<Op> late, later;  // of earlier hooks, and of this one
  std::vector<Arena> arenas;    // by group
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> outlived;
};

// Numbers of a step: Python sets them as the loop takes the hooks, and reads them afterwards. `home`: thread whose saves it does.
#define EACH_NUMBER(of)                                                                                    \
  of(hook) of(home) of(operators) of(limit) of(now) of(cumulative) of(taken) of(since) of(growth) of(peak) of(seen) \
  of(bytes_swapped_out) of(bytes_swapped_in) of(bytes_reclaimed) of(prefetches) of(swap_ins_on_demand) of(fallbacks)
#define DECLARED(name) int64_t name = 0;
#define BOUND(name) .def_readwrite(#name, &Loop::name)

struct Loop : std::enable_shared_from_this<Loop>, Step {
  EACH_NUMBER(DECLARED)
  int index;
  void *out, *back, *compute = nullptr;
  int64_t min_bytes, generation = 0;
  py::dict python, safe, claimed, records_held;         // what is called by name; storages that stay, that have records, that others held
  std::vector<void*> events;                            // by storage: after its latest copy
  std::vector<std::pair<c10::Storage, int>> abandoned;  // under a copy when their last handle went
  std::mutex mutex;
  bool follows = false;
  std::shared_ptr<Program> program;
  std::vector<bool> is_record;  // by storage: whether Python has it, or will, as only a part of it leaves

  Loop(int device, uintptr_t out_stream, uintptr_t back_stream, int64_t least, py::dict of)
      : index(device), out((void*)out_stream), back((void*)back_stream), min_bytes(least), python(std::move(of)), safe(python["safe"]),
        claimed(python["claimed"]), records_held(python["held"]) {}
  ~Loop() {
    if (!abandoned.empty()) wait_for_all();
    std::erase(events, nullptr);
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
  py::object call(const char* name, Arguments... arguments) {
    const auto before = std::pair(generation, hook);
    const auto told = py::make_tuple(arguments...);
    const py::object function = python[name];
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
    return device.index() == index && guard.getStream(device).native_handle() == compute && !is_capturing(compute);
  }
  bool is_over(const Slot& slot) const {  // Note [Swap-out]; as `SwapOuts.is_over`
    return slot.operators < ((int64_t)PyThread_get_thread_ident() == home ? (int64_t)at::sequence_number::peek() : operators);
  }
  void empty(Slot& slot) {
    take_memory(slot.storage);
    slot.state = ON_HOST, slot.emptied = true;
  }
  void let_go(Slot& slot) {
    if (slot.is_alone()) return empty(slot);
    slot.state = RESTORED;
    later.emplace_back(RELEASE, slot.number, program->nbytes[slot.number]);  // others refer to it: each hook tries again
  }
  void settle_abandoned() {  // Note [Reclaim]: its copy -> the memory's next owner
    for (auto& [storage, n] : std::exchange(abandoned, {})) {
      if (cudaStreamWaitEvent(compute, events[n], 0) != 0) wait_for_all();
    }
  }
  // Have memory on the host for its copy. False: there is none. Calls Python.
  bool has_place(int n) {
    if (Arena& arena = arenas[program->group[n]]; arena.address == 0) {
      std::vector<size_t> empty;
      for (size_t group = 0; group < arenas.size(); group++)
        if (arenas[group].live == 0 && std::exchange(arenas[group].address, 0) != 0) empty.push_back(group);
      if (const auto memory = call("take", program->group[n], empty); !memory.is_none()) arena.address = (uintptr_t)memory.cast<at::Tensor>().data_ptr();
    }
    return arenas[program->group[n]].address != 0;
  }
  void copy(Slot& slot, bool is_out) {
    const int n = slot.number;
    void *stream = is_out ? out : back, *host = (char*)arenas[program->group[n]].address + program->offset[n];
    void* memory = slot.storage.data_ptr().get();
    if (events[n] == nullptr) must(cudaEventCreateWithFlags(&events[n], UNTIMED));
    if (!is_out) must(cudaStreamWaitEvent(back, events[n], 0));  // Note [Swap-in]: the copy out -> the copy back
    must(cudaEventRecord(events[n], compute));
    must(cudaStreamWaitEvent(stream, events[n], 0));  // Note [Swap-out], [Swap-in]: what wrote or used the memory last -> the copy
    must(cudaMemcpyAsync(is_out ? host : memory, is_out ? memory : host, program->nbytes[n], BY_ADDRESS, stream));
    must(cudaEventRecord(events[n], stream));
    slot.state = is_out ? LEAVING : ARRIVING;
  }
  // Execute an op on a slot. False: there is no place on the host.
  bool carry_out(int code, int n) {
    if (code == RELEASE && slots[n]->state == RESTORED) let_go(*slots[n]);
    if (slots[n]->state == ON_DEVICE && (int64_t)slots[n]->storage.nbytes() == program->nbytes[n] && slots[n]->has_unwritten()) {
      if (!has_place(n)) return false;
      if (slots[n] != nullptr) copy(*slots[n], true), arenas[program->group[n]].live++, bytes_swapped_out += program->nbytes[n];
    }
    if (code == OUT || slots[n] == nullptr || slots[n]->state != LEAVING) return true;
    must(cudaStreamWaitEvent(compute, events[n], 0));  // Note [Reclaim]: its copy -> the next owner of its memory
    bytes_reclaimed += program->nbytes[n];
    let_go(*slots[n]);
    return true;
  }
  void copy_back(Slot& slot, int64_t& counter) try {
    const int64_t nbytes = program->nbytes[slot.number];
    auto* impl = slot.storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(c10::getDeviceAllocator(c10::DeviceType::CUDA)->allocate(nbytes));
    impl->set_nbytes(nbytes);
    copy(slot, false);
    for (Save* save : slot.saves) save->is_used = false;
    taken += (nbytes + ALLOCATION_UNIT_BYTES - 1) & -ALLOCATION_UNIT_BYTES, bytes_swapped_in += nbytes, counter++;
  } catch (const c10::OutOfMemoryError&) {  // its use brings it back
  } catch (const Refused&) {
    empty(slot);
    fallbacks++;
  }
  // Do what is due before the hook's own storage is used. False: Python has to do this hook.
  bool run(const Row& row, int64_t at, bool moves) {
    const bool any_held = PyDict_GET_SIZE(records_held.ptr()) != 0, is_pending = any_held || !late.empty() || !abandoned.empty();
    if (!moves && !is_pending && row.ops.empty() && row.ins.empty() && !row.is_checked) return true;
    if (!is_current()) return false;
    settle_abandoned();
    later.clear();
    std::vector<Op> due = late, of_records;
    due.insert(due.end(), row.ops.begin(), row.ops.end());
    const auto do_ops = [&] {  // in their turn: the link copies in the order of the plan
      const auto [took, of_them] = call("do_ops", std::exchange(of_records, {}), at, operators).template cast<std::pair<int64_t, std::vector<Op>>>();
      taken += took;
      later.insert(later.end(), of_them.begin(), of_them.end());
    };
    for (const auto& [code, n, nbytes] : due) {
      if (is_record[n]) {
        of_records.emplace_back(code, n, nbytes);
        continue;
      }
      if (!of_records.empty()) do_ops();
      if (slots[n] == nullptr) continue;
      else if (slots[n]->state == ON_DEVICE && ((n == row.number && row.kind == AGAIN) || !is_over(*slots[n]))) later.emplace_back(OUT, n, nbytes);
      else if (!carry_out(code, n)) return false;
    }
    if (any_held || !of_records.empty()) do_ops();
    late = std::exchange(later, {});
    return !row.is_checked || check(row, at);
  }
  bool check(const Row& row, int64_t at) {
    const auto bytes = allocated_bytes((c10::DeviceIndex)index);
    // Room has to be made, or somebody has reset the readings.
    if (bytes.current + row.growth > limit || bytes.allocated < cumulative || bytes.peak < peak) return false;
    const int64_t grew = std::max<int64_t>(0, bytes.allocated - cumulative - taken);
    growths.push_back(grew);
    growth += grew, cumulative = bytes.allocated, taken = 0, now = bytes.current, peak = bytes.peak, seen = std::max(seen, now);
    if (row.number < 0 || at == since) return true;
    const int64_t from = std::exchange(since, at), all = std::exchange(growth, 0);
    return all == row.grew || call("grown", from, all, at).cast<bool>();
  }
  void prefetch(const Row& row) try {
    for (int n : row.ins) {
      if (is_record[n]) taken += call("fetch", n).cast<int64_t>();
      else if (slots[n] != nullptr && slots[n]->state == ON_HOST) copy_back(*slots[n], prefetches);
    }
  } catch (const Left&) {  // uses bring back what is left of it
  }

  // --- the hooks. Null without a Python error: Python has to do it

  PyObject* save(PyObject* argument, Save*) {
    const Row& row = program->rows[hook + 1];
    if (row.kind >= USE || (PyObject*)Py_TYPE(argument) != row.type.ptr() || (int64_t)PyThread_get_thread_ident() != home) return nullptr;
    const at::Tensor& t = THPVariable_Unpack(argument);
    const auto operators_now = (int64_t)at::sequence_number::peek();
    if (operators_now - operators != row.since || t.scalar_type() != row.dtype || t.is_nested() || !t.sizes().equals(row.sizes)) return nullptr;
    const at::Tensor holder(t.is_view() ? t._base() : t);
    const int reason = reason_to_stay(t, holder);
    if (row.kind == KEPT ? reason > NUM_REASONS : reason != NONE || (int64_t)t.storage().nbytes() != program->nbytes[row.number]) return nullptr;
    if (!run(row, hook + 1, row.kind != KEPT)) return nullptr;
    const auto& node = t.grad_fn();  // as `KeptTensor`
    const bool is_made_now = node && ((int64_t)node->sequence_nr() == operators_now - 1 || typeid(*node).name() == PYTHON_NODE);
    const bool is_reference = reason == PARAMETER || !(t.is_view() || is_made_now);
    py::object made = row.kind == KEPT ? make_handle(t, holder, nullptr, is_reference) : move(t, holder, row, operators_now);
    if (!made || made.is_none()) return nullptr;
    if (row.kind == KEPT) kept[reason]++;
    hook++, operators = operators_now;
    prefetch(row);
    return made.release().ptr();
  }
  static bool has(const py::dict& dict, const c10::Storage& storage) {  // by the id of its object, which lives as long as it does
    PyObject* object = in_python(storage);
    return object && dict.contains(py::int_((uintptr_t)object));
  }
  static PyObject* class_of(const at::Tensor& t) {  // what Python has not seen will be a plain tensor
    PyObject* object = t.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    return object == nullptr ? THPVariableClass : (PyObject*)Py_TYPE(object);
  }
  // As in swap/classify.py.
  Reason reason_to_stay(const at::Tensor& t, const at::Tensor& holder) const {
    if (class_of(t) != THPVariableClass || !t.has_storage()) return class_of(t) == ParameterClass ? PARAMETER : UNKNOWN;
    const auto& storage = t.storage();
    if ((int64_t)storage.nbytes() < min_bytes) return storage.nbytes() ? SMALL : EMPTY;
    if (class_of(holder) != THPVariableClass) return class_of(holder) == ParameterClass ? PARAMETER : UNKNOWN;
    if (holder.requires_grad() && holder.is_leaf()) return LEAF;
    if (has(safe, storage)) return PERSISTENT;
    const bool is_plain = t.layout() == at::kStrided && t.is_cuda() && t.get_device() == index && !t._is_zerotensor();
    return is_plain && !(t.requires_grad() && !holder.requires_grad()) && storage.unsafeGetStorageImpl()->resizable() ? NONE : UNKNOWN;
  }
  // As `StepLoop._move`. Null or None: Python has to do it.
  py::object move(const at::Tensor& t, const at::Tensor& holder, const Row& row, int64_t operators_now) {
    const int n = row.number;
    const auto& storage = t.storage();
    if (row.kind == FIRST && (slots[n] || by_storage.count(storage.unsafeGetStorageImpl()) || has(claimed, storage))) return {};
    if (is_record[n]) return call("save_record", t, hook + 1);
    if (row.kind == FIRST) {
      slots[n].reset(new Slot{.storage = storage, .number = n});
      by_storage[storage.unsafeGetStorageImpl()] = slots[n].get();
    }
    Slot* slot = slots[n].get();
    if (slot == nullptr || !slot->storage.is_alias_of(storage) || (slot->state != ON_DEVICE && !slot->includes(t, holder))) return {};  // a copy may lack these bytes
    slot->operators = operators_now;
    return make_handle(t, holder, slot, false);
  }
  PyObject* use(PyObject* argument, Save* save) {  // no save: Python's handle
    const Row& row = program->rows[hook + 1];
    if (row.kind != USE || (save != nullptr && (save->hook != row.since || !save->is_as_saved()))) return nullptr;
    Slot* slot = save == nullptr ? nullptr : save->slot;
    if (!run(row, hook + 1, save == nullptr || slot != nullptr)) return nullptr;
    if (slot != nullptr) {
      if (slot->state == ON_HOST && !row.ins.empty() && row.ins[0] == row.number) copy_back(*slot, swap_ins_on_demand);  // as planned
      if (slot->state == ON_HOST) return nullptr;  // room has to be made
      if (slot->state == ARRIVING) {
        must(cudaStreamWaitEvent(compute, events[slot->number], 0));  // Note [Swap-in]: the copy back -> the node that reads it
        slot->state = RESTORED;
      }
      save->is_used = true;
    }
    // Of what moves a new reference for each user: the storage's use count then shows every holder.
    py::object t = save == nullptr ? call("use_record", py::handle(argument), row.since)
                                   : py::cast(slot == nullptr ? save->alias : save->alias.detach());
    if (t.is_none()) return nullptr;
    hook++;
    prefetch(row);  // it may call Python, and all be given back meanwhile
    return t.release().ptr();
  }
  py::object make_handle(const at::Tensor& t, const at::Tensor& holder, Slot* slot, bool is_reference) {
    auto* h = new Handle;
    const py::capsule handle(h, nullptr, drop);
    Save& save = h->save.emplace(handle.ptr(), shared_from_this(), slot, hook + 1, is_reference ? t : t.detach(), t._version());
    if (!is_reference) {
      const auto& node = t.grad_fn();
      save.origin.reset(new Origin{WeakTensor(holder.getIntrusivePtr()), WeakTensor(t.getIntrusivePtr()), node ? node->name() : "",
                                   node ? (int64_t)node->sequence_nr() : -1, t.output_nr()});
    }
    all_saves.insert(&save);
    if (slot != nullptr) slot->saves.push_back(&save);
    return handle;
  }
  // The handle of a save is gone. With the last of its slot nobody needs the bytes any more. No call of the device: it may be anywhere.
  static void drop(PyObject* capsule) {
    const std::unique_ptr<Handle> h(handle_of(capsule));
    if (!h->save) return;
    const std::shared_ptr<Loop> of = h->save->loop;
    Slot* slot = h->save->slot;
    of->all_saves.erase(&*h->save);
    if (slot != nullptr) std::erase(slot->saves, &*h->save);
    h->save.reset();
    if (slot == nullptr || !slot->saves.empty()) return;
    const auto last = std::move(of->slots[slot->number]);
    of->by_storage.erase(slot->storage.unsafeGetStorageImpl());
    if (slot->state != ON_DEVICE) of->arenas[of->program->group[slot->number]].live--;
    if (slot->state == LEAVING || slot->state == ARRIVING) of->abandoned.emplace_back(slot->storage, slot->number);
    else if (!slot->emptied && !is_held_by(slot->storage, 1)) of->outlived.emplace_back(slot->storage.getWeakStorageImpl());
  }

  // --- between Python's state and this one

  void enter(std::shared_ptr<Program> of, uintptr_t compute_stream, std::vector<bool> of_python) {
    const std::lock_guard<Loop> guard(*this);
    settle_abandoned();
    program = std::move(of), compute = (void*)compute_stream, is_record = std::move(of_python);
    slots.resize(is_record.size()), arenas.resize(is_record.size());
    events.resize(std::max(events.size(), slots.size()));
    follows = true, generation++;
  }
  py::object give_back() {
    const std::lock_guard<Loop> guard(*this);
    if (!follows) return py::none();
    const c10::DeviceGuard on(c10::Device(c10::DeviceType::CUDA, (c10::DeviceIndex)index));  // a null stream is the current device's
    if (!is_capturing(compute)) settle_abandoned();  // a capture may not wait for what began before it
    std::vector<py::object> alive;  // nothing dies where a collection runs in the middle of this: each slot has a handle
    for (const Save* save : all_saves) alive.push_back(py::reinterpret_borrow<py::object>(save->handle));
    py::dict all, of_reasons;
    py::list of_slots, of_saves, of_outlived;
    for (const auto& slot : slots)
      if (slot) of_slots.append(py::make_tuple(slot->number, slot->state, slot->operators, is_over(*slot), slot->emptied));
    for (const Save* s : all_saves) {
      py::object save = py::make_tuple(s->slot ? s->slot->number : -1, py::handle(s->handle), s->hook, s->is_used, s->alias, s->version);
      if (const Origin* o = s->origin.get())  // None: it is gone
        save += py::make_tuple(at::Tensor(o->counter.lock()), at::Tensor(o->tensor.lock()), o->name, o->number, o->output);
      of_saves.append(save);
    }
    for (const auto& weak : outlived)
      if (auto impl = weak.lock()) of_outlived.append(c10::Storage(std::move(impl)));
    late.insert(late.end(), later.begin(), later.end());
    all["slots"] = of_slots, all["all_saves"] = of_saves, all["outlived"] = of_outlived, all["late"] = late;
    for (int reason = 0; reason < NUM_REASONS; reason++) of_reasons[REASONS[reason]] = kept[reason];
    all["kept"] = of_reasons, all["growths"] = growths;
    follows = false;
    for (const auto& handle : alive) handle_of(handle.ptr())->save.reset();
    static_cast<Step&>(*this) = Step{};
    return all;
  }
};

// --- what autograd calls

struct Hook {
  std::shared_ptr<Loop> loop;
  PyObject* (Loop::*here)(PyObject*, Save*);
  py::object python;  // what does the others
};

PyObject* on_hook(PyObject* self, PyObject* argument) {
  const Hook& hook = *static_cast<Hook*>(PyCapsule_GetPointer(self, nullptr));
  Loop& loop = *hook.loop;
  Handle* h = PyCapsule_CheckExact(argument) ? handle_of(argument) : nullptr;
  if (h != nullptr && !h->python.is_none()) argument = h->python.ptr(), h = nullptr;
  if (loop.follows && !c10::impl::TorchDispatchModeTLS::stack_len()) try {
    const std::lock_guard<Loop> guard(loop);
    const bool is_here = loop.follows && (h == nullptr || h->save);
    if (PyObject* result = is_here ? (loop.*hook.here)(argument, h == nullptr ? nullptr : &*h->save) : nullptr) return result;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception&) {  // Left, Refused; a tensor without sizes, a version, or the like
  }
  if (h != nullptr) {
    if (!py::reinterpret_steal<py::object>(PyObject_CallNoArgs(py::object(loop.python["come_back"]).ptr()))) return nullptr;
    argument = h->python.ptr();
  }
  return PyObject_CallOneArg(hook.python.ptr(), argument);
}
PyMethodDef method = {"hook", on_hook, METH_O, "What autograd calls to save a tensor, or to use a saved one."};

py::object hook_of(std::shared_ptr<Loop> loop, bool saves, py::object python) {
  auto* of = new Hook{std::move(loop), saves ? &Loop::save : &Loop::use, std::move(python)};
  const py::capsule self(of, [](void* it) { delete static_cast<Hook*>(it); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

PYBIND11_MODULE(chameleon_mm_loop, m) {
  py::class_<Row>(m, "Row")
      .def(py::init<int, int, bool, int64_t, int64_t, std::vector<Op>, std::vector<int>, py::object, Numbers, at::ScalarType, int64_t>());
  py::class_<Program, std::shared_ptr<Program>>(m, "Program").def(py::init<std::vector<Row>, Numbers, Numbers, Numbers>());
  py::class_<Loop, std::shared_ptr<Loop>>(m, "Loop") EACH_NUMBER(BOUND)
      .def(py::init<int, uintptr_t, uintptr_t, int64_t, py::dict>())
      .def("hook_of", hook_of).def("enter", &Loop::enter).def("give_back", &Loop::give_back).def_readwrite("follows", &Loop::follows);
  m.def("delegate", [](py::handle handle, py::object python) { handle_of(handle.ptr())->python = std::move(python); },
        "Have a handle that was given back lead to one of Python's.");
}
