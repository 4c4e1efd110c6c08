// Notes how storages are made while a forward runs: record/calls.py below autograd, without the interpreter.
//
//   notes = Notes(tell, is_cuda)                // this thread's operators are noted while it includes the key, until notes.end()
//   notes.given(t), notes.value_of(storage)     // number of the latest value; -1: it is not known
//   notes.value(number), notes.call(number)     // what is known of a value, and of a call
//   tell(name, ...)                             // calls a method of record/call_notes.py, in the middle of an operator
// A fallback on a dispatch key that torch does not use sees each operator below autograd, above modes and kernels. The key is excluded
// inside of a kernel, whose operators are no calls of their own; not where a mode, a subclass or a composite operator calls what runs.
// Storages and tensors are held weakly, so no address recurs within a step. Counters are held: a write shows in its counter though its
// tensor is gone. Python is never called with the lock, since Python code may run operators.

#include "device_memory.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <pthread.h>
#include <mutex>
#include <unordered_map>

namespace {

using c10::IValue;
constexpr auto KEY = c10::DispatchKey::Fake;
constexpr int NONE = -1;
bool forked = false;  // a parent's step means nothing in a child
thread_local int pauses = 0;

struct Facts {  // of an operator, as record/call_notes.py tells them. counts: its writes move version counters
  bool skip, in_parts, in_place, random, product, counts;
  std::vector<int> written;  // places of the arguments that it may write to
  size_t num_args, num_returns;
  int number;
};

struct Value {
  int storage, position;  // which of its call's tensors it is in: of those returned, or of those written
  bool returned;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> root;  // a tensor over the storage, no view
  c10::VariableVersion counter;  // its counter, disabled in inference mode; `version`: while all writes to it are seen
  unsigned version;
  int call;  // NONE: it was there before
  unsigned writes;
  size_t nbytes;
};

struct StorageNote {
  c10::weak_intrusive_ptr<c10::StorageImpl> it;
  int latest = NONE;
  bool asked = false;  // Python has asked for one of its values
};

struct Call {
  const Facts* facts;
  bool grad_enabled;
  int settings, random = NONE;
  bool opaque = false;
  std::vector<IValue> given{};  // None for each tensor, an empty list for each list of tensors
  std::vector<int64_t> numbers{};  // of its tensors: see `note_argument`
  std::pair<size_t, size_t> made{};  // numbers of the values that it made: the first, and behind the last
};

bool has_storage(const at::Tensor& t) {  // a real one: fake tensors have the key Python, or a device without memory
  return t.has_storage() && !t.is_meta() && !t.key_set().has(c10::DispatchKey::Python) && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_strided(const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested(); }
bool is_wrapped(const at::Tensor& t) { return t.unsafeGetTensorImpl()->is_wrapped_number(); }  // a number, which decides less about dtypes

IValue number_in(const at::Tensor& t) {  // None: it is not known
  return t.defined() && is_wrapped(t) && has_storage(t) && t.is_cpu() ? IValue(at::native::_local_scalar_dense_cpu(t)) : IValue();
}

template <typename Do>
void each_tensor(const IValue& one, Do&& act) {
  if (one.isTensor()) {
    if (one.toTensor().defined()) act(one.toTensor());
  } else if (one.isList()) {
    for (const IValue& element : one.toListRef()) each_tensor(element, act);
  }
}

uint64_t product_settings() {  // those of record/calls.py, three bits each: a change shows
  using On = at::Float32Backend;
  using Of = at::Float32Op;
  auto& c = at::globalContext();
  uint64_t all = 0;
  const auto add = [&](auto... settings) { ((all = all << 3 | static_cast<uint64_t>(settings)), ...); };
  for (const auto on : {On::GENERIC, On::CUDA, On::MKLDNN}) add(c.float32Precision(on, Of::ALL));
  for (const auto on : {On::CUDA, On::MKLDNN}) add(c.float32Precision(on, Of::MATMUL), c.float32Precision(on, Of::CONV));
  add(c.allowFP16ReductionCuBLAS(), c.allowBF16ReductionCuBLAS(), c.allowFP16AccumulationCuBLAS(), c.userEnabledCuDNN(), c.benchmarkCuDNN());
  add(c.deterministicCuDNN(), c.userEnabledMkldnn(), c.deterministicMkldnn(), c.deterministicAlgorithms(), c.blasPreferredBackend());
  return all;
}

bool is_capturing() {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  return ::is_capturing(cuda.getStream(cuda.getDevice()).native_handle());
}

class Notes {
 public:
  Notes(py::object tell, bool is_cuda) : tell_(std::move(tell)), is_cuda_(is_cuda) {}
  ~Notes() { if (!PyGILState_Check()) tell_.release(); }  // rather kept than touched

  bool listens() const {
    return !over && !pauses && !forked && torch::autograd::get_current_graph_task_id() == -1 && !(is_cuda_ && is_capturing());
  }

  const Facts& facts_of(const c10::OperatorHandle& op) {
    auto found = by_operator_.find(op);
    if (found == by_operator_.end()) {
      using Told = std::tuple<bool, bool, bool, bool, bool, bool, std::vector<int>, size_t, size_t, int>;
      const auto told = ask<Told>("_facts_of", op.schema().name(), op.schema().overload_name());
      found = by_operator_.emplace(op, std::apply([](auto... one) { return Facts{one...}; }, told)).first;
    }
    return found->second;
  }

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack, const Facts& facts) {
    const auto args = torch::jit::last(*stack, facts.num_args);
    Call call{&facts, at::GradMode::is_enabled(), settings_now(facts.product)};
    if (facts.random) call.random = ask<int>("_note_random", args.vec());
    auto tensors = written_tensors(args, facts);
    std::vector<Value> written;
    std::vector<int> relied;
    {
      const std::lock_guard guard(lock_);
      note_arguments(args, call);
      for (const auto& t : tensors) {
        const int before = latest_of(t);
        if (storages_[values_[before].storage].asked) relied.push_back(before);
        written.push_back(value_in(t, int(written.size()), false, facts.counts ? 1 : 0));
      }
    }
    tensors.clear();
    if (!relied.empty()) ask<void>("_write", relied);
    op.redispatchBoxed(below, stack);
    const auto [made, made_end] = note_made(torch::jit::last(*stack, facts.in_place ? 0 : facts.num_returns), std::move(call), written);
    if (births) ask<void>("_note_born", facts.number, made, made_end);
  }

  int value_of(uintptr_t storage) {
    const std::lock_guard guard(lock_);
    const auto found = by_storage_.find(reinterpret_cast<c10::StorageImpl*>(storage));
    return found == by_storage_.end() ? NONE : asked(known(found->second, found->first->nbytes()));
  }

  int given(const at::Tensor& t) { const std::lock_guard guard(lock_); return asked(latest_of(t)); }
  bool is_latest(int number) { const std::lock_guard guard(lock_); return storages_[values_[number].storage].latest == number; }

  auto value(int number) {  // with its storage, and with the tensor by whose counter it is known, while there are such
    const std::lock_guard guard(lock_);
    const auto& v = values_[asked(number)];
    const auto storage = storages_[v.storage].it.lock();
    const auto root = v.root.lock();
    return std::tuple(v.storage, v.call, v.returned, v.position, v.writes, v.nbytes, v.version,
                      storage ? std::optional(c10::Storage(storage)) : std::nullopt,
                      root.defined() && v.counter.enabled() ? std::optional(at::Tensor(root)) : std::nullopt);
  }

  auto call(int number) {  // with the sizes of the storages that it returned
    const std::lock_guard guard(lock_);
    const auto& c = calls_[number];
    std::vector<size_t> made;
    for (auto i = c.made.first; i < c.made.second; ++i) if (values_[i].returned) made.push_back(values_[i].nbytes);
    return std::tuple(c.facts->number, c.given, c.numbers, c.opaque, c.grad_enabled, c.settings, c.random, made);
  }

  int operator_of(int call) { const std::lock_guard guard(lock_); return calls_[call].facts->number; }

  std::atomic<bool> over{false}, births{false};  // births: Python is told of what is made, until the next hook

 private:
  template <typename Answer, typename... Told>
  Answer ask(const char* method, const Told&... told) const {
    const py::gil_scoped_acquire gil;
    return tell_(method, told...).template cast<Answer>();
  }

  int settings_now(bool product) {
    const auto now = std::pair(c10::get_default_dtype_as_scalartype(), product ? product_settings() : settings_.second);
    if (number_of_settings_ == NONE || now != settings_) {
      settings_ = {now.first, product_settings()};
      number_of_settings_ = ask<int>("_note_settings");
    }
    return number_of_settings_;
  }

  // Tensors that a call writes to: in place of one that is not strided, those that it consists of.
  std::vector<at::Tensor> written_tensors(c10::ArrayRef<IValue> args, const Facts& facts) {
    std::vector<at::Tensor> written;
    for (const int place : facts.written) {
      each_tensor(args[place], [&](const at::Tensor& t) {
        const auto parts = is_strided(t) ? std::vector<at::Tensor>{t} : ask<std::vector<at::Tensor>>("_parts", t);
        std::copy_if(parts.begin(), parts.end(), std::back_inserter(written), has_storage);
      });
    }
    return written;
  }

  int asked(int number) { if (number != NONE) storages_[values_[number].storage].asked = true; return number; }

  int known(int storage, size_t nbytes) const {
    const int latest = storages_[storage].latest;
    return latest != NONE && values_[latest].nbytes == nbytes ? latest : NONE;
  }

  Value value_in(const at::Tensor& t, int position, bool returned, unsigned writes_to_come) {
    const auto& storage = t.unsafeGetTensorImpl()->unsafe_storage();
    const auto [found, is_new] = by_storage_.try_emplace(storage.unsafeGetStorageImpl(), int(storages_.size()));
    if (is_new) storages_.push_back({storage.getWeakStorageImpl()});
    const auto* view = torch::autograd::impl::get_view_autograd_meta(t);
    const auto& root = view != nullptr && view->has_bw_view() ? view->get_backward_view().base_ : t;
    const auto& counter = t.unsafeGetTensorImpl()->version_counter();
    const unsigned version = counter.enabled() ? counter.current_version() + writes_to_come : 0;
    return {found->second, position, returned, decltype(Value::root)(root.getIntrusivePtr()), counter, version, NONE, 0, storage.nbytes()};
  }

  int add(Value value, int call, unsigned writes) {
    value.call = call;
    value.writes = writes;
    values_.push_back(std::move(value));
    return storages_[values_.back().storage].latest = int(values_.size()) - 1;
  }

  int latest_of(const at::Tensor& t) {
    Value now = value_in(t, 0, false, 0);
    const int latest = known(now.storage, now.nbytes);
    const auto* value = latest == NONE ? nullptr : &values_[latest];
    if (value != nullptr && !(value->counter.enabled() && value->counter.current_version() != value->version)) return latest;
    return add(std::move(now), NONE, 0);  // new, or something wrote to it where nobody looks
  }

  // A tensor as numbers: its place among the arguments, its value, then its geometry.
  void note_argument(const at::Tensor& t, int64_t place, bool in_list, Call& call) {
    auto& numbers = call.numbers;
    if (!t.defined()) return void(numbers.insert(numbers.end(), {place, in_list, NONE, 0, 0, 0, 0, 0}));
    call.opaque = call.opaque || !is_strided(t) || !has_storage(t) || t.is_quantized() || t.is_mkldnn() || t._is_zerotensor() || is_wrapped(t);
    if (call.opaque) return;
    numbers.insert(numbers.end(), {place, in_list, latest_of(t), int64_t(t.scalar_type()), t.storage_offset(), t.is_conj(), t.is_neg(), t.dim()});
    numbers.insert(numbers.end(), t.sizes().begin(), t.sizes().end());
    numbers.insert(numbers.end(), t.strides().begin(), t.strides().end());
  }

  void note_arguments(c10::ArrayRef<IValue> args, Call& call) {
    call.given.reserve(args.size());
    for (int64_t place = 0; place < int64_t(args.size()); ++place) {
      const auto& one = args[place];
      const bool many = one.isTensorList() || one.isOptionalTensorList();
      if (one.isTensor()) call.given.push_back(number_in(one.toTensor()));
      else call.given.push_back(many ? IValue(c10::List<int64_t>()) : one.isList() ? one.deepcopy() : one);  // a script may write to lists
      if (one.isTensor() && call.given.back().isNone()) note_argument(one.toTensor(), place, false, call);
      if (!many) continue;
      for (const IValue& t : one.toListRef()) note_argument(t.isTensor() ? t.toTensor() : at::Tensor(), place, true, call);
    }
  }

  std::pair<size_t, size_t> note_made(c10::ArrayRef<IValue> results, Call call, std::vector<Value>& written) {
    const std::lock_guard guard(lock_);
    const int number = int(calls_.size());
    call.made.first = values_.size();
    for (auto& value : written) {
      const auto it = storages_[value.storage].it.lock();
      value.nbytes = it ? it->nbytes() : 0;
      const int before = known(value.storage, value.nbytes);
      add(std::move(value), number, before == NONE ? 0 : values_[before].writes + 1);
    }
    int position = 0;
    const auto note = [&](const at::Tensor& t) {
      const int at = position++;
      if (!has_storage(t)) return;
      Value value = value_in(t, at, true, 0);
      if (known(value.storage, value.nbytes) == NONE) add(std::move(value), number, 0);
    };
    for (const auto& result : results) each_tensor(result, note);
    call.made.second = values_.size();
    calls_.push_back(std::move(call));
    return calls_.back().made;
  }

  py::object tell_;
  const bool is_cuda_;
  std::unordered_map<c10::OperatorHandle, Facts> by_operator_;  // its own thread's, as the settings are
  std::pair<at::ScalarType, uint64_t> settings_;
  int number_of_settings_ = NONE;
  std::unordered_map<c10::StorageImpl*, int> by_storage_;
  std::vector<StorageNote> storages_;
  std::vector<Value> values_;
  std::vector<Call> calls_;
  std::mutex lock_;  // of these four
};

thread_local std::weak_ptr<Notes> mine;  // of the step that this thread began

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  const bool is_python = keys.has(c10::DispatchKey::Python);  // its mode or subclass runs first
  const auto notes = mine.lock();
  const Facts* facts = !is_python && notes && notes->listens() ? &notes->facts_of(op) : nullptr;
  if (is_python || (facts != nullptr && facts->in_parts)) return op.redispatchBoxed(below, stack);
  const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  if (facts == nullptr || facts->skip) return op.redispatchBoxed(below, stack);
  notes->run(op, below, stack, *facts);
}

}  // namespace

PYBIND11_MODULE(chameleon_mm_notes, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const bool is_torchs = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;
  if (is_torchs || dispatcher.hasBackendFallbackForDispatchKey(KEY) || !dispatcher.getRegistrationsForDispatchKey(KEY).empty())
    throw py::import_error("torch, or somebody else, uses the dispatch key Fake");
  static auto* library = new torch::Library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  m.def("pause", [](int more) { pauses += more; });
  m.def("dtype", [](int number) { return static_cast<at::ScalarType>(number); });
  m.def("is_taken", [] { const auto notes = mine.lock(); return notes && !notes->over; });
  py::class_<Notes, std::shared_ptr<Notes>>(m, "Notes")
      .def(py::init([](py::object tell, bool is_cuda) { auto it = std::make_shared<Notes>(tell, is_cuda); mine = it; return it; }))
      .def("end", [](Notes& notes) { notes.over = true; }).def("tell_of_births", [](Notes& notes, bool on) { notes.births = on; })
      .def("value_of", &Notes::value_of).def("given", &Notes::given).def("is_latest", &Notes::is_latest)
      .def("value", &Notes::value).def("call", &Notes::call).def("operator_of", &Notes::operator_of);
}
