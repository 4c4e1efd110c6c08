// Notes how storages are made while a forward runs: profiler/call_watch.py below autograd, without the interpreter.
//
//   notes = Notes(tell, is_cuda)                // this thread's operators are noted while it includes the key, until notes.end()
//   notes.given(t), notes.value_of(storage)     // number of the latest value; -1: it is not known
//   notes.value(number), notes.call(number)     // what is known of a value, and of a call
//   tell(name, ...)                             // calls a method of profiler/call_notes.py, in the middle of an operator
//
// A fallback on a dispatch key that torch does not use sees each operator below autograd, above modes and kernels. The key is excluded
// inside of a kernel, whose operators are no calls of their own; not where a mode, a subclass or a composite operator calls what runs.
//
// Storages and tensors are held weakly, so no address recurs within a step. Counters are held: a write shows in its counter though its
// tensor is gone. Python is never called with the lock, since Python code may run operators.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <pthread.h>
#include <mutex>
#include <set>
#include <unordered_map>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds have the Python watch alone"
#endif

extern "C" __attribute__((weak)) int cudaStreamIsCapturing(void* stream, int* status);  // there with torch's CUDA build

namespace {

using c10::IValue;
using Guard = std::lock_guard<std::mutex>;

constexpr auto KEY = c10::DispatchKey::Fake;
constexpr int NONE = -1;

bool forked = false;  // a parent's step means nothing in a child

struct Facts {  // of an operator, as profiler/call_notes.py tells them. counts: its writes move version counters
  bool skip, in_parts, in_place, random, product, counts;
  std::vector<int> written;  // places of the arguments that it may write to
  int number;
  size_t num_args, num_returns;
  std::string name;
};

struct Value {
  int storage, position;  // which of its call's tensors it is in: of those returned, or of those written
  bool returned;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> root;  // a tensor over the storage, no view
  c10::VariableVersion counter;  // its counter, disabled in inference mode; `version`: while all writes to it are seen
  unsigned version;
  int call = NONE;  // NONE: it was there before
  unsigned writes = 0;
  size_t nbytes = 0;
};

struct StorageNote {
  c10::weak_intrusive_ptr<c10::StorageImpl> it;
  int latest = NONE;
  bool asked = false;  // Python has asked for one of its values
};

struct Call {
  const Facts* facts;
  bool grad_enabled, opaque;
  int settings, random;
  size_t given, numbers, numbers_end, made, made_end;
};

size_t nbytes_of(const at::Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().nbytes(); }

bool has_storage(const at::Tensor& t) {  // a real one: fake tensors have the key Python, or a device without memory
  return t.has_storage() && !t.is_meta() && !t.key_set().has(c10::DispatchKey::Python) && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_strided(const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested(); }

bool is_wrapped(const at::Tensor& t) { return t.unsafeGetTensorImpl()->is_wrapped_number(); }  // a number, which decides less about dtypes

IValue number_in(const at::Tensor& t) {  // None: it is not known
  if (!t.defined() || !is_wrapped(t) || !has_storage(t) || !t.is_cpu()) return {};
  switch (t.scalar_type()) {
    case at::kDouble: return *t.const_data_ptr<double>();
    case at::kLong: return *t.const_data_ptr<int64_t>();
    case at::kBool: return *t.const_data_ptr<bool>();
    default: return {};
  }
}

template <typename Do>
void each_tensor(const IValue& one, Do&& act) {
  if (one.isTensor()) {
    if (one.toTensor().defined()) act(one.toTensor());
  } else if (one.isList()) {
    for (const IValue& element : one.toListRef()) each_tensor(element, act);
  }
}

uint64_t product_settings() {  // those of profiler/kernel_settings.py: a change shows
  using On = at::Float32Backend;
  using Of = at::Float32Op;
  auto& c = at::globalContext();
  uint64_t all = 0;
  const auto add = [&](auto... settings) { ((all = all << 3 | static_cast<uint64_t>(settings)), ...); };
  for (const auto on : {On::GENERIC, On::CUDA, On::MKLDNN}) {
    add(c.float32Precision(on, Of::ALL));
    if (on != On::GENERIC) add(c.float32Precision(on, Of::MATMUL), c.float32Precision(on, Of::CONV));
  }
  add(c.allowFP16ReductionCuBLAS(), c.allowBF16ReductionCuBLAS(), c.allowFP16AccumulationCuBLAS(), c.userEnabledCuDNN());
  add(c.benchmarkCuDNN(), c.deterministicCuDNN(), c.userEnabledMkldnn(), c.deterministicMkldnn(), c.deterministicAlgorithms());
  add(c.blasPreferredBackend());
  return all;
}

bool is_capturing() {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  int status = 0;
  if (cudaStreamIsCapturing != nullptr) cudaStreamIsCapturing(cuda.getStream(cuda.getDevice()).native_handle(), &status);
  return status != 0;
}

thread_local int pauses = 0;

class Notes {
 public:
  Notes(py::object tell, bool is_cuda) : tell_(std::move(tell)), is_cuda_(is_cuda) {}
  ~Notes() {
    if (!PyGILState_Check()) tell_.release();  // rather kept than touched
  }

  bool listens() const {
    return !over && !pauses && !forked && torch::autograd::get_current_graph_task_id() == -1 && !(is_cuda_ && is_capturing());
  }

  const Facts& facts_of(const c10::OperatorHandle& op) {
    const auto found = by_operator_.find(op);
    if (found != by_operator_.end()) return found->second;
    const auto& schema = op.schema();
    using Told = std::tuple<bool, bool, bool, bool, bool, bool, std::vector<int>, int>;
    const auto told = ask<Told>("_facts_of", schema.name(), schema.overload_name());
    auto facts = std::apply([](auto... one) { return Facts{one...}; }, told);
    facts.num_args = schema.arguments().size();
    facts.num_returns = schema.returns().size();
    facts.name = c10::toString(op.operator_name());
    return by_operator_.emplace(op, std::move(facts)).first->second;
  }

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack, const Facts& facts) {
    const auto args = torch::jit::last(*stack, facts.num_args);
    Call call{&facts, at::GradMode::is_enabled(), false, settings_now(facts.product), facts.random ? random_state(args) : NONE};
    auto tensors = written_tensors(args, facts);
    std::vector<Value> written;
    std::vector<int> asked;
    size_t number;
    {
      const Guard guard(lock);
      note_arguments(args, call);
      for (const auto& t : tensors) {
        const int before = latest_of(t);
        if (storages_[values_[before].storage].asked) asked.push_back(before);
        written.push_back(value_in(t, int(written.size()), false, facts.counts ? 1 : 0));
      }
      number = calls_.size();
      calls_.push_back(call);
    }
    tensors.clear();
    if (!asked.empty()) ask<void>("_write", asked);
    op.redispatchBoxed(below, stack);
    std::pair<size_t, size_t> born;
    {
      const Guard guard(lock);
      note_made(torch::jit::last(*stack, facts.in_place ? 0 : facts.num_returns), number, written);
      if (names_.count(facts.name) || names_.count("")) born = {calls_[number].made, calls_[number].made_end};
    }
    if (born.second) ask<void>("_note_born", facts.name, born.first, born.second);
  }

  // --- what Python asks for, with the lock

  int value_of(uintptr_t storage) {
    const auto found = by_storage_.find(reinterpret_cast<c10::StorageImpl*>(storage));
    return found == by_storage_.end() ? NONE : asked(known(found->second, found->first->nbytes()));
  }

  int given(const at::Tensor& t) { return asked(latest_of(t)); }

  bool is_latest(int number) { return storages_[values_[number].storage].latest == number; }

  auto value(int number) {  // with its storage, and with the tensor by whose counter it is known, while there are such
    const auto& v = values_[asked(number)];
    const auto storage = storages_[v.storage].it.lock();
    const auto root = v.root.lock();
    return std::tuple(v.storage, v.call, v.returned, v.position, v.writes, v.nbytes, v.version,
                      storage ? std::optional(c10::Storage(storage)) : std::nullopt,
                      root.defined() && v.counter.enabled() ? std::optional(at::Tensor(root)) : std::nullopt);
  }

  auto call(int number) {
    const auto& c = calls_[number];
    const auto given = given_.begin() + c.given;
    std::vector<int64_t> numbers(numbers_.begin() + c.numbers, numbers_.begin() + c.numbers_end);
    return std::tuple(c.facts->number, std::vector<IValue>(given, given + c.facts->num_args), std::move(numbers), c.opaque, c.grad_enabled, c.settings,
                      c.random, c.made, c.made_end);
  }

  void hold(std::set<std::string> names) { names_ = std::move(names); }

  std::atomic<bool> over{false};
  std::mutex lock;

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

  int random_state(c10::ArrayRef<IValue> args) const {
    IValue generator, device, named;
    for (const auto& one : args) {
      if (one.isGenerator()) generator = one;
      if (one.isDevice()) named = one;
      each_tensor(one, [&](const at::Tensor& t) { device = device.isNone() ? t.device() : device; });
    }
    return ask<int>("_note_random", generator, device.isNone() ? named : device);
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

  int asked(int number) {
    if (number != NONE) storages_[values_[number].storage].asked = true;
    return number;
  }

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
    return {found->second, position, returned, decltype(Value::root)(root.getIntrusivePtr()), counter, version};
  }

  int add(Value value, int call, unsigned writes, size_t nbytes) {
    value.call = call;
    value.writes = writes;
    value.nbytes = nbytes;
    const int number = storages_[value.storage].latest = int(values_.size());
    values_.push_back(std::move(value));
    return number;
  }

  int latest_of(const at::Tensor& t) {
    Value now = value_in(t, 0, false, 0);
    const int latest = known(now.storage, nbytes_of(t));
    const auto* value = latest == NONE ? nullptr : &values_[latest];
    if (value != nullptr && !(value->counter.enabled() && value->counter.current_version() != value->version)) return latest;
    return add(std::move(now), NONE, 0, nbytes_of(t));  // new, or something wrote to it where nobody looks
  }

  // A tensor as numbers: its place among the arguments, its value, then its geometry.
  void note_argument(const at::Tensor& t, int64_t place, bool in_list, Call& call) {
    call.opaque = call.opaque || !is_strided(t) || !has_storage(t) || t.is_quantized() || t.is_mkldnn() || t._is_zerotensor() || is_wrapped(t);
    if (call.opaque) return;
    const int64_t value = latest_of(t), dtype = int64_t(t.scalar_type());
    numbers_.insert(numbers_.end(), {place, in_list, value, dtype, t.storage_offset(), t.is_conj(), t.is_neg(), t.dim()});
    numbers_.insert(numbers_.end(), t.sizes().begin(), t.sizes().end());
    numbers_.insert(numbers_.end(), t.strides().begin(), t.strides().end());
  }

  void note_arguments(c10::ArrayRef<IValue> args, Call& call) {
    call.given = given_.size();
    call.numbers = numbers_.size();
    for (int64_t place = 0; place < int64_t(args.size()); ++place) {
      const auto& one = args[place];
      if (one.isTensor()) {
        given_.push_back(number_in(one.toTensor()));
        if (one.toTensor().defined() && given_.back().isNone()) note_argument(one.toTensor(), place, false, call);
      } else if (one.isList() && (one.isTensorList() || one.isOptionalTensorList())) {
        given_.push_back(c10::List<int64_t>());
        for (const IValue& element : one.toListRef()) {
          if (element.isTensor() && element.toTensor().defined()) note_argument(element.toTensor(), place, true, call);
          else numbers_.insert(numbers_.end(), {place, true, NONE, 0, 0, 0, 0, 0});
        }
      } else {
        given_.push_back(one.isList() ? one.deepcopy() : one);  // a script may write to its own list
      }
    }
    call.numbers_end = numbers_.size();
  }

  void note_made(c10::ArrayRef<IValue> results, size_t number, std::vector<Value>& written) {
    calls_[number].made = values_.size();
    for (auto& value : written) {
      const auto it = storages_[value.storage].it.lock();
      const size_t nbytes = it ? it->nbytes() : 0;
      const int before = known(value.storage, nbytes);
      add(std::move(value), int(number), before == NONE ? 0 : values_[before].writes + 1, nbytes);
    }
    int position = 0;
    for (const auto& result : results) {
      each_tensor(result, [&](const at::Tensor& t) {
        if (has_storage(t)) {
          Value value = value_in(t, position, true, 0);
          if (known(value.storage, nbytes_of(t)) == NONE) add(std::move(value), int(number), 0, nbytes_of(t));
        }
        ++position;
      });
    }
    calls_[number].made_end = values_.size();
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
  std::vector<IValue> given_;
  std::vector<int64_t> numbers_;
  std::set<std::string> names_;  // of operators whose results may be held, until the next hook; "": of any
};

thread_local std::weak_ptr<Notes> mine;  // of the step that this thread began

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  if (keys.has(c10::DispatchKey::Python)) return op.redispatchBoxed(below, stack);
  const auto notes = mine.lock();
  const Facts* facts = notes && notes->listens() ? &notes->facts_of(op) : nullptr;
  if (facts != nullptr && facts->in_parts) return op.redispatchBoxed(below, stack);
  const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  if (facts == nullptr || facts->skip) return op.redispatchBoxed(below, stack);
  notes->run(op, below, stack, *facts);
}

void take_key() {
  auto& dispatcher = c10::Dispatcher::singleton();
  const bool is_torchs = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;
  if (is_torchs || dispatcher.hasBackendFallbackForDispatchKey(KEY) || !dispatcher.getRegistrationsForDispatchKey(KEY).empty())
    throw py::import_error("torch, or somebody else, uses the dispatch key Fake");
  static auto* library = new torch::Library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

template <typename Result, typename... Given>
auto locked(Result (Notes::*method)(Given...)) {  // what it returns becomes Python's after the lock
  return [method](Notes& notes, Given... given) {
    const Guard guard(notes.lock);
    return (notes.*method)(std::forward<Given>(given)...);
  };
}

}  // namespace

PYBIND11_MODULE(chameleon_mm_notes, m) {
  take_key();
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  m.def("pause", [](int more) { pauses += more; });
  m.def("dtype", [](int number) { return static_cast<at::ScalarType>(number); });
  m.def("is_taken", [] { const auto notes = mine.lock(); return notes && !notes->over; });
  py::class_<Notes, std::shared_ptr<Notes>>(m, "Notes")
      .def(py::init([](py::object tell, bool is_cuda) { auto it = std::make_shared<Notes>(tell, is_cuda); mine = it; return it; }))
      .def("end", [](Notes& notes) { notes.over = true; })
      .def("value_of", locked(&Notes::value_of)).def("given", locked(&Notes::given)).def("is_latest", locked(&Notes::is_latest))
      .def("value", locked(&Notes::value)).def("call", locked(&Notes::call)).def("hold", locked(&Notes::hold));
}
