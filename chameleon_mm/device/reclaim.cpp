// Device storages whose copies to the host are queued, held for torch's caching allocator, which reclaims them inside malloc.
//
//   hook = Hook(device)                                             // for one session: its limits and its counts
//   held = hook.hold(storage, event, event_handle, stream_handle, stream_id)      // or None: it may not be held
//   held.withdraw()                                                 // whether its memory is still there
//
// The allocator asks on every miss of its pools: with nothing held that costs one load. It does not say how much it wants. So what
// is copied goes at once, and what is not goes oldest first, behind a wait of the stream that owns it, up to what is missing
// by the limits. Note [Reclaim].
//
// The allocator asks under its own lock and as a rule without the GIL, so nothing here may take the GIL then: memory goes by taking
// it out of its storage, which stays, with no bytes. Locks are taken in one order: the allocator's, then the
// queue's; a thread with the GIL gives it up before it waits for the queue's, and has given that back before it waits for the GIL.

#include <pybind11/pybind11.h>

#include "device_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Registry.h>
#include <torch/csrc/Storage.h>

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

#ifdef WITH_CUDA
namespace c10 {
// What torch's caching allocator calls where it finds no block. As in c10/cuda/CUDACachingAllocator.h, which needs CUDA's headers.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};
C10_DECLARE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);
}  // namespace c10
#endif

namespace {

// Calls into the CUDA runtime, each returns an error or 0. A test gives its own.
enum Call { QUERY_EVENT, WAIT_EVENT, IS_CAPTURING, EXCHANGE_CAPTURE_MODE, FREE_MEMORY, LAST_ERROR, NUM_CALLS };
constexpr std::array<const char*, NUM_CALLS> NAMES = {
    "cudaEventQuery", "cudaStreamWaitEvent", "cudaStreamIsCapturing", "cudaThreadExchangeStreamCaptureMode", "cudaMemGetInfo", "cudaGetLastError"};
std::array<void*, NUM_CALLS> driver{};

template <typename... Arguments>
int call(Call which, Arguments... arguments) {
  return reinterpret_cast<int (*)(Arguments...)>(driver[which])(arguments...);
}
// Whether the call succeeds. What it refuses is no error of anybody's, nor is "not ready".
template <typename... Arguments>
bool succeeds(Call which, Arguments... arguments) {
  if (call(which, arguments...) == 0) return true;
  call(LAST_ERROR);
  return false;
}
bool driver_is_complete() { return std::all_of(driver.begin(), driver.end(), [](void* function) { return function != nullptr; }); }

constexpr int RELAXED = 2;  // cudaStreamCaptureModeRelaxed: queries of this thread break no capture of another one

// Limits and counts of one session.
struct Session {
  std::atomic<size_t> limit_bytes{SIZE_MAX};   // what the allocator may reserve
  std::atomic<size_t> growth_bytes{0};         // what may be allocated until the limits are set again
  std::atomic<bool> needs_gil{false};          // a free may run Python code: memory history with stacks
  std::atomic<size_t> reclaimed{0}, waits{0};
};

struct Entry {
  c10::Storage storage;
  void* event;
  void* stream;
  c10::StreamId stream_id;
  std::shared_ptr<Session> session;
  size_t tensors;         // over the storage, which are the lender's own
  Py_ssize_t references;  // to its Python object, while the lender alone has it
  size_t nbytes = storage.nbytes();
  std::atomic<bool> reclaimed{false};

  // Whether nobody but the lender refers to the storage. Whoever is to become a holder has to be one already, or to withdraw this.
  bool is_sole_holder() const { return is_held_by(storage, tensors + 1, references); }
};

std::atomic<size_t> num_held{0};  // on all devices

// Entries of one device, oldest first.
struct Queue {
  std::mutex mutex;
  std::list<std::shared_ptr<Entry>> entries;
};

constexpr int MAX_DEVICES = 128;
// Never destroyed: the allocator may ask after the interpreter is gone.
std::array<Queue, MAX_DEVICES>& queues = *new std::array<Queue, MAX_DEVICES>;

// Memory of the CPU, which tests hold, has the index -1.
Queue& queue_of(int device) { return queues[device + 1]; }

// Calls `change` under the queue's lock, from a thread that holds the GIL. It never waits for one of the two while it holds the
// other: whoever holds the GIL may wait for the allocator, and that for the queue.
template <typename Change>
void change_from_python(Queue& queue, const Change& change) {
  std::optional<py::gil_scoped_release> released;  // taken again after the lock is given back
  std::unique_lock<std::mutex> lock(queue.mutex, std::try_to_lock);
  if (!lock) released.emplace(), lock.lock();
  change();
}

// What the allocator says of itself when it asks.
struct Request {
  size_t reserved_bytes;
  size_t free_bytes;  // what the device has beside
};

size_t missing_bytes(const Session& session, const Request& request) {
  const size_t growth = session.growth_bytes, limit = session.limit_bytes;
  const size_t room = std::min(limit - std::min(limit, request.reserved_bytes), request.free_bytes);
  return growth - std::min(growth, room);
}

// Reclaims what is copied, and of the rest what is missing. Returns the bytes reclaimed. Memory of another stream's would not be found.
template <typename Ask>
size_t reclaim(Queue& queue, c10::StreamId stream_id, const Ask& ask) {
  std::vector<c10::DataPtr> freed;  // freed without the queue's lock
  size_t bytes = 0;
  std::unique_lock<std::mutex> lock(queue.mutex);
  int capturing = 0;
  for (const auto& entry : queue.entries) {
    if (entry->stream_id != stream_id) continue;
    if (!succeeds(IS_CAPTURING, entry->stream, &capturing)) capturing = 1;
    break;
  }
  if (capturing) return 0;
  std::optional<Request> request;
  bool copies_are_complete = true;  // they end in the order in which they are held
  const auto may_go = [&](const Entry& entry) {
    return entry.stream_id == stream_id && entry.is_sole_holder() && (!entry.session->needs_gil || PyGILState_Check());
  };
  // The memory's next owner, on the same stream, comes after the copy, which is complete or waited for.
  const auto is_ordered = [&](const Entry& entry) {
    copies_are_complete = copies_are_complete && succeeds(QUERY_EVENT, entry.event);
    if (copies_are_complete) return true;
    if (!request) request = ask();
    if (missing_bytes(*entry.session, *request) <= bytes) return false;
    return succeeds(WAIT_EVENT, entry.stream, entry.event, 0u);
  };
  for (auto at = queue.entries.begin(); at != queue.entries.end();) {
    Entry& entry = **at;
    if (!may_go(entry) || !is_ordered(entry) || !entry.is_sole_holder()) {  // asked again: the wait has taken its time
      ++at;
      continue;
    }
    bytes += entry.nbytes;
    entry.session->waits += !copies_are_complete;
    freed.push_back(take_memory(entry.storage));
    entry.reclaimed = true;
    entry.session->reclaimed++;
    at = queue.entries.erase(at);
    num_held--;
  }
  lock.unlock();
  freed.clear();
  return bytes;
}

#ifdef WITH_CUDA
struct ReclaimInMalloc final : c10::FreeMemoryCallback {
  bool Execute() override {
    if (num_held == 0) return false;  // as a rule
    if (c10::impl::GPUTrace::get_trace() != nullptr) return false;  // a free would call Python
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const c10::Device device = guard.getDevice();  // the allocator is asked for memory of the current one
    Queue& queue = queue_of(device.index());
    int mode = RELAXED;
    if (!succeeds(EXCHANGE_CAPTURE_MODE, &mode)) return false;
    const c10::StreamId stream = guard.getStream(device).id();
    const size_t bytes = reclaim(queue, stream, [&] {
      const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(device.index());
      size_t free = 0, total = 0;
      succeeds(FREE_MEMORY, &free, &total);
      return Request{static_cast<size_t>(stats.reserved_bytes[0].current), free};
    });
    call(EXCHANGE_CAPTURE_MODE, &mode);
    return bytes > 0;
  }
};

// Symbols of the runtime that torch itself uses: of libc10_cuda and what that is linked with.
void find_driver() {
  Dl_info torch_library;
  const auto registry = reinterpret_cast<const void*>(&c10::FreeCudaMemoryCallbacksRegistry);
  void* library = dladdr(registry, &torch_library) ? dlopen(torch_library.dli_fname, RTLD_NOLOAD | RTLD_NOW) : nullptr;
  for (size_t i = 0; i < NUM_CALLS; ++i) driver[i] = library ? dlsym(library, NAMES[i]) : nullptr;
  if (!driver_is_complete()) throw std::runtime_error("torch's CUDA runtime lacks a call that the helper needs");
}
#endif

struct Held {
  std::shared_ptr<Entry> entry;
  int device;
  py::object event;  // whose handle the entry has

  ~Held() { take_out(); }
  bool reclaimed() const { return !entry || entry->reclaimed; }

  // Returns whether its memory is still there. Once.
  bool withdraw() {
    if (!entry) throw std::runtime_error("withdraw: expected a storage that is held, got one that was withdrawn");
    return take_out();
  }

  bool take_out() {
    if (!entry) return false;
    Queue& queue = queue_of(device);
    change_from_python(queue, [&] { num_held -= queue.entries.remove(entry); });
    return !std::exchange(entry, {})->reclaimed;
  }
};

struct Hook {
  const int device;
  const std::shared_ptr<Session> session = std::make_shared<Session>();

  explicit Hook(int index) : device(index) {
    if (device < -1 || device + 1 >= MAX_DEVICES) throw py::value_error("Hook: expected a device's index, got " + std::to_string(device));
  }

  py::object hold(
      const py::object& storage, py::object event, uintptr_t event_handle, uintptr_t stream, c10::StreamId stream_id, size_t tensors,
      Py_ssize_t references) {
    if (!driver_is_complete()) throw std::runtime_error("hold: expected torch's CUDA build, got another one");
    if (!THPStorage_Check(storage.ptr())) throw py::type_error("hold: expected a torch.UntypedStorage");
    const c10::Storage& held = THPStorage_Unpack(storage.ptr());
    const c10::Device on = held.device();
    // Memory that another allocator made may need Python when it goes.
    if (on.index() != device || held.data_ptr().get_deleter() != c10::GetAllocator(on.type())->raw_deleter()) return py::none();
    const std::shared_ptr<Entry> entry(new Entry{
        held, reinterpret_cast<void*>(event_handle), reinterpret_cast<void*>(stream), stream_id, session, tensors, references});
    Queue& queue = queue_of(device);
    change_from_python(queue, [&] { queue.entries.push_back(entry), num_held++; });
    return py::cast(std::unique_ptr<Held>(new Held{entry, device, std::move(event)}));
  }

  void set_limits(size_t limit_bytes, size_t growth_bytes, bool needs_gil) {
    session->limit_bytes = limit_bytes;
    session->growth_bytes = growth_bytes;
    session->needs_gil = needs_gil;
  }
};

}  // namespace

PYBIND11_MODULE(chameleon_mm_reclaim, m) {
#ifdef WITH_CUDA
  find_driver();
  c10::FreeCudaMemoryCallbacksRegistry()->Register(
      "chameleon_mm reclaim", [] { return std::unique_ptr<c10::FreeMemoryCallback>(new ReclaimInMalloc); });
#endif
  py::class_<Held>(m, "Held").def("withdraw", &Held::withdraw).def_property_readonly("reclaimed", &Held::reclaimed);
  py::class_<Hook>(m, "Hook")
      .def(py::init<int>())
      .def("hold", &Hook::hold)
      .def("set_limits", &Hook::set_limits)
      .def_property_readonly("reclaimed", [](const Hook& hook) { return hook.session->reclaimed.load(); })
      .def_property_readonly("waits", [](const Hook& hook) { return hook.session->waits.load(); });
  m.def("held", [] { return num_held.load(); });
  // For tests of the queue on machines without CUDA: another driver, and the allocator's question.
  m.def("use_driver", [](const py::args& functions) {
    for (size_t i = 0; i < NUM_CALLS; ++i) driver[i] = reinterpret_cast<void*>(functions[i].cast<uintptr_t>());
  });
  m.def("reclaim", [](int device, c10::StreamId stream, size_t reserved, size_t free) {
    py::gil_scoped_release released;
    return reclaim(queue_of(device), stream, [&] { return Request{reserved, free}; });
  });
}
