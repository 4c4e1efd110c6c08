// Takes a session's two hooks off its thread for a step that has nothing to move, and puts them back in the middle of the step where
// torch's caching allocator finds no block and is about to ask the device for more.
//
//   switch = HookSwitch(device, save)      // the hook of a save, as autograd has it
//   switch.off(limit_bytes)                // True: both are off on this thread, and no more than that is reserved. False: nothing changed
//   switch.on()                            // True: they were off until now, and nothing was asked of the device meanwhile
//
// What the allocator has reserved it hands out without a word. So a step without hooks takes no more memory than there was when it
// began, or has hooks from the operator on that wants more; what it saved before that stays on the device.
//
// The allocator calls under its own lock and as a rule without the GIL, so the hooks are moved there and back: no reference is counted.

#include <pybind11/pybind11.h>

#include <ATen/SavedTensorHooks.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Registry.h>
#include <torch/csrc/PyInterpreter.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds keep their hooks"
#endif

namespace py = pybind11;

#ifdef WITH_CUDA
namespace c10 {
// As in c10/cuda/CUDACachingAllocator.h, which needs CUDA's own headers.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};
C10_DECLARE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);
}  // namespace c10
#endif

namespace {

using Hooks = std::pair<c10::SafePyObject, c10::SafePyObject>;
using Stack = at::SavedTensorDefaultHooks;

std::atomic<size_t> misses{0};  // of the allocator, on any thread

class HookSwitch;
thread_local std::shared_ptr<HookSwitch> off_here;  // the one whose hooks are off on this thread

class HookSwitch : public std::enable_shared_from_this<HookSwitch> {
 public:
  HookSwitch(int device, py::object save) : device_(device), save_(std::move(save)) {}
  HookSwitch(const HookSwitch&) = delete;

  bool off(size_t limit_bytes) {
    if (off_here || taken_) return false;
    const auto& state = Stack::get_tls_state();
    if (state.stack.empty() || state.is_tracing || state.disabled_error_message) return false;
    if (state.stack.top().first.ptr(getPyInterpreter()) != save_.ptr()) return false;  // others are on top of them
    const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(device_));
    if (static_cast<size_t>(stats.reserved_bytes[0].current) > limit_bytes) return false;
    misses_before_ = misses;
    taken_.emplace(Stack::pop_hooks());
    below_ = state.stack.size();
    off_here = shared_from_this();
    return true;
  }

  // On another thread it changes nothing and returns False: the hooks are put back by the first call where they were taken.
  bool on() {
    if (off_here.get() != this) return false;
    const auto kept = std::exchange(off_here, nullptr);
    const bool were_off = taken_.has_value();
    if (were_off) put_back();
    return were_off && misses == misses_before_;
  }

  // In the middle of an allocation on the thread that has them off.
  void on_again() {
    if (taken_ && !Stack::get_tls_state().disabled_error_message) put_back();
  }

 private:
  // Below whatever was entered meanwhile. Objects are moved alone.
  void put_back() {
    std::vector<Hooks> above;
    const auto& state = Stack::get_tls_state();
    const std::optional<std::string> disabled = state.disabled_error_message;
    if (disabled) Stack::enable();
    while (state.stack.size() > below_) above.push_back(Stack::pop_hooks());
    Stack::push_hooks(std::move(taken_->first), std::move(taken_->second));
    taken_.reset();
    for (; !above.empty(); above.pop_back()) Stack::push_hooks(std::move(above.back().first), std::move(above.back().second));
    if (disabled) Stack::disable(*disabled, false);
  }

  int device_;
  py::object save_;
  std::optional<Hooks> taken_;
  size_t below_ = 0;  // hooks on the stack beneath them
  size_t misses_before_ = 0;
};

#ifdef WITH_CUDA
struct HooksInMalloc final : c10::FreeMemoryCallback {
  bool Execute() override {
    misses++;
    if (off_here) off_here->on_again();
    return false;  // nothing was freed
  }
};
#endif

}  // namespace

PYBIND11_MODULE(chameleon_mm_switch, m) {
#ifdef WITH_CUDA
  c10::FreeCudaMemoryCallbacksRegistry()->Register(
      "chameleon_mm switch", [] { return std::unique_ptr<c10::FreeMemoryCallback>(new HooksInMalloc); });
#endif
  py::class_<HookSwitch, std::shared_ptr<HookSwitch>>(m, "HookSwitch")
      .def(py::init<int, py::object>())
      .def("off", &HookSwitch::off)
      .def("on", &HookSwitch::on);
}
