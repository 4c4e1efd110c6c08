// Notes how storages are made while a forward runs: profiler/call_watch.py below autograd, without the interpreter.
//
//   notes = Notes(facts, settings, parts, before_write, born, is_cuda)     // the functions of profiler/call_notes.py
//   notes.begin(); turn(True)                // this thread's operators are noted, until turn(False), notes.end()
//   notes.given(t), notes.value_of(storage)  // the number of the latest value
//   notes.value(number), notes.call(number)  // what is known of one, as numbers
//
// A fallback on a dispatch key that torch does not use sees each operator below autograd and above its kernel. What an operator
// calls inside of its kernel is no call of its own: the key is excluded there. Not where the kernel is a mode's, a subclass's
// or a composite's, since these call what runs.
//
// Storages and roots of views are held weakly, so no address recurs within a step, and counters are held: a write is known
// from its counter though its tensor is gone. Python is called for an operator that is new in the step, before a write to a
// value that somebody asked for, and where a storage to hold may be born. Never with the lock: Python code may run operators.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <pthread.h>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "free-threaded builds have the Python watch alone"
#endif

extern "C" __attribute__((weak)) int cudaStreamIsCapturing(void* stream, int* status);  // of the runtime that torch's CUDA build loads

namespace {

constexpr auto KEY = c10::DispatchKey::Fake;
constexpr int NONE = -1;

bool forked = false;  // in a child, where a parent's step means nothing

struct Counter {  // a tensor's version counter, and what it says while nobody writes unseen; disabled for inference tensors
  c10::VariableVersion counter{c10::VariableVersion::DISABLED};
  uint32_t version = 0;
  bool moved() const { return counter.enabled() && counter.current_version() != version; }
};

using Root = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Known {  // by what later writes to a tensor's storage are known
  Root root;
  Counter counter;
};

struct Value {
  int storage, call;  // NONE: it was there before
  bool returned;
  int position;
  unsigned writes;
  size_t nbytes;
  Known known;
};

struct StorageNote {
  c10::weak_intrusive_ptr<c10::StorageImpl> it;
  int latest = NONE;
  bool asked = false;  // Python has an object of one of its values
};

struct Argument {
  int value;  // NONE: an element of a list that is no tensor
  int place;  // on the stack
  bool in_list, conj, neg;
  at::ScalarType dtype;
  int64_t offset;
  size_t dims, ndim;  // sizes, then strides
};

struct Facts {  // as profiler/call_notes.py tells them
  int number;
  bool skip, in_parts, in_place, random, product;
  std::vector<int> written, hidden;  // places of the arguments that it writes to, and of those that its schema does not name
  int hidden_if;                     // argument that says whether it does; NONE: it does
  size_t num_args, num_returns;
  std::string name;
};

struct Call {
  const Facts* facts;
  size_t values, arguments, arguments_end;
  int made, made_end, settings, random;
  bool grad, opaque;
};

struct Written {
  int storage, position;
  Known known;
};

bool has_storage(const at::Tensor& t) { return t.has_storage() && !t.is_meta() && !t.key_set().has(c10::DispatchKey::Python); }

bool has_symbols(const at::Tensor& t) { return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides(); }

bool is_plain(const at::Tensor& t) {
  return t.layout() == at::kStrided && has_storage(t) && !t.is_nested() && !t.is_quantized() && !t.is_mkldnn() && !t._is_zerotensor() && !has_symbols(t);
}

Known known_by(const at::Tensor& t, unsigned writes) {
  const auto* view = torch::autograd::impl::get_view_autograd_meta(t);
  const at::Tensor& root = view != nullptr && view->has_bw_view() ? view->get_backward_view().base_ : t;
  const auto& counter = t.unsafeGetTensorImpl()->version_counter();
  return {Root(root.getIntrusivePtr()), {counter, counter.enabled() ? counter.current_version() + writes : 0}};
}

uint64_t product_settings() {  // those of profiler/kernel_settings.py: three bits for each
  using B = at::Float32Backend;
  using O = at::Float32Op;
  auto& c = at::globalContext();
  uint64_t all = 0;
  for (auto [backend, op] : {std::pair{B::GENERIC, O::ALL}, {B::CUDA, O::ALL}, {B::MKLDNN, O::ALL}, {B::CUDA, O::MATMUL}, {B::CUDA, O::CONV}, {B::MKLDNN, O::MATMUL}, {B::MKLDNN, O::CONV}}) {
    all = all << 3 | static_cast<uint64_t>(c.float32Precision(backend, op));
  }
  for (auto one : {int(c.allowFP16ReductionCuBLAS()), int(c.allowBF16ReductionCuBLAS()), int(c.allowFP16AccumulationCuBLAS()), int(c.userEnabledCuDNN()), int(c.benchmarkCuDNN()), int(c.deterministicCuDNN()), int(c.userEnabledMkldnn()), int(c.deterministicMkldnn()), int(c.deterministicAlgorithms()), int(c.blasPreferredBackend())}) {
    all = all << 3 | static_cast<uint64_t>(one);
  }
  return all;
}

c10::IValue number_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble: return *t.const_data_ptr<double>();
    case at::kLong: return *t.const_data_ptr<int64_t>();
    case at::kBool: return *t.const_data_ptr<bool>();
    default: return t.item();
  }
}

template <typename Do>
void each_tensor(const c10::IValue& one, Do&& act) {
  if (one.isTensor()) {
    if (one.toTensor().defined()) act(one.toTensor());
  } else if (one.isList()) {
    for (const c10::IValue& element : one.toListRef()) each_tensor(element, act);
  }
}

class Notes;
thread_local std::weak_ptr<Notes> mine;  // of the step that this thread began
thread_local int pauses = 0;

class Notes : public std::enable_shared_from_this<Notes> {
 public:
  Notes(py::object facts, py::object settings, py::object parts, py::object before_write, py::object born, bool is_cuda)
      : facts_(std::move(facts)), settings_(std::move(settings)), parts_(std::move(parts)), before_write_(std::move(before_write)), born_(std::move(born)), is_cuda_(is_cuda) {}

  ~Notes() {
    if (PyGILState_Check()) return;
    for (py::object* one : {&facts_, &settings_, &parts_, &before_write_, &born_}) one->release();  // rather kept than touched
  }

  void begin() { mine = shared_from_this(); }
  void end() { over_ = true; }
  bool is_over() const { return over_; }

  bool listens() const {
    return !over_ && !pauses && !forked && torch::autograd::get_current_graph_task_id() == -1 && !(is_cuda_ && is_capturing());
  }

  // Run an operator, noted. The key is excluded.
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack, const Facts& facts) {
    Call call{&facts};
    call.grad = at::GradMode::is_enabled();
    call.settings = settings_now(facts.product);
    std::optional<std::pair<at::Generator, at::Tensor>> random = facts.random ? random_state(stack, facts) : std::nullopt;
    std::vector<at::Tensor> written = written_tensors(stack, facts);
    std::vector<Written> writes;
    std::vector<int> asked;
    int number;
    {
      std::lock_guard<std::mutex> guard(lock_);
      call.random = random ? int(random_.size()) : NONE;
      if (random) random_.push_back(std::move(*random));
      note_arguments(torch::jit::last(*stack, facts.num_args), call);
      for (const auto& t : written) {
        const int value = given(t);
        const int storage = values_[value].storage, position = int(writes.size());
        writes.push_back({storage, position, known_by(t, facts.hidden.empty() ? 1 : 0)});
        if (storages_[storage].asked) asked.push_back(value);
      }
      number = int(calls_.size());
      calls_.push_back(call);
    }
    if (!asked.empty()) {
      py::gil_scoped_acquire gil;
      before_write_(asked);
    }
    written.clear();
    op.redispatchBoxed(below, stack);
    std::pair<int, std::vector<int>> birth;
    {
      std::lock_guard<std::mutex> guard(lock_);
      note_made(*stack, facts, number, writes);
      birth = birth_of(facts, number);
    }
    if (!birth.second.empty()) {
      py::gil_scoped_acquire gil;
      born_(facts.name, birth.first, birth.second);
    }
  }

  const Facts& facts_of(const c10::OperatorHandle& op) {
    auto found = by_operator_.find(op);
    if (found != by_operator_.end()) return found->second;
    py::gil_scoped_acquire gil;
    const auto& schema = op.schema();
    Facts facts;
    facts.name = c10::toString(op.operator_name());
    std::tie(facts.number, facts.skip, facts.in_parts, facts.in_place, facts.random, facts.product, facts.written, facts.hidden, facts.hidden_if) =
        py::cast<std::tuple<int, bool, bool, bool, bool, bool, std::vector<int>, std::vector<int>, int>>(facts_(schema.name(), schema.overload_name()));
    facts.num_args = schema.arguments().size();
    facts.num_returns = schema.returns().size();
    return by_operator_.emplace(op, std::move(facts)).first->second;
  }

  // --- what Python asks for

  int value_of(uintptr_t storage) {
    std::lock_guard<std::mutex> guard(lock_);
    auto* impl = reinterpret_cast<c10::StorageImpl*>(storage);
    auto found = by_storage_.find(impl);
    return found == by_storage_.end() ? NONE : asked(known_value(storages_[found->second], impl->nbytes()));
  }

  int given_to_hook(py::handle t) {
    std::lock_guard<std::mutex> guard(lock_);
    return asked(given(THPVariable_Unpack(t.ptr())));
  }

  bool is_latest(int number) {
    std::lock_guard<std::mutex> guard(lock_);
    return storages_[values_[number].storage].latest == number;
  }

  py::tuple value(int number) {
    std::unique_lock<std::mutex> guard(lock_);
    asked(number);
    const Value v = values_[number];
    guard.unlock();
    const auto& counter = v.known.counter;
    return py::make_tuple(v.storage, v.call, v.returned, v.position, v.writes, v.nbytes, counter.counter.enabled(), counter.version);
  }

  py::object storage(int number) {
    c10::intrusive_ptr<c10::StorageImpl> it;
    {
      std::lock_guard<std::mutex> guard(lock_);
      it = storages_[number].it.lock();
    }
    return it ? py::reinterpret_steal<py::object>(THPStorage_Wrap(c10::Storage(std::move(it)))) : py::none();
  }

  py::object root(int number) {
    c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> it;
    {
      std::lock_guard<std::mutex> guard(lock_);
      it = values_[number].known.root.lock();
    }
    return it.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(at::Tensor(std::move(it)))) : py::none();
  }

  py::tuple call(int number) {
    Call call;
    std::vector<c10::IValue> values;
    std::vector<Argument> arguments;
    std::vector<int64_t> dims;
    std::optional<std::pair<at::Generator, at::Tensor>> random;
    {
      std::lock_guard<std::mutex> guard(lock_);
      call = calls_[number];
      values.assign(given_.begin() + call.values, given_.begin() + call.values + (call.opaque ? 0 : call.facts->num_args));
      arguments.assign(arguments_.begin() + call.arguments, arguments_.begin() + call.arguments_end);
      if (!arguments.empty()) dims.assign(dims_.begin() + arguments.front().dims, dims_.begin() + arguments.back().dims + 2 * arguments.back().ndim);
      if (call.random != NONE) random = random_[call.random];
    }
    py::list given, tensors;
    for (auto& one : values) given.append(torch::jit::toPyObject(std::move(one)));
    for (const auto& a : arguments) {
      const auto* at = dims.data() + (a.dims - arguments.front().dims);
      tensors.append(py::make_tuple(a.value, a.place, a.in_list, py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(a.dtype))), std::vector<int64_t>(at, at + a.ndim), std::vector<int64_t>(at + a.ndim, at + 2 * a.ndim), a.offset, a.conj, a.neg));
    }
    py::object state = py::none();
    if (random) state = py::make_tuple(py::reinterpret_steal<py::object>(THPGenerator_Wrap(random->first)), py::reinterpret_steal<py::object>(THPVariable_Wrap(random->second)));
    return py::make_tuple(call.facts->number, given, tensors, call.opaque, call.grad, call.settings, state, call.made, call.made_end);
  }

  void hold(std::set<std::pair<int, std::string>> places) {
    std::lock_guard<std::mutex> guard(lock_);
    places_ = std::move(places);
  }

  void at_hook(int hooks) {
    std::lock_guard<std::mutex> guard(lock_);
    hooks_ = hooks;
    since_hook_ = calls_.size();
  }

 private:
  static bool is_capturing() {
    int status = 0;
    if (cudaStreamIsCapturing == nullptr) return false;
    const c10::impl::VirtualGuardImpl impl(c10::DeviceType::CUDA);
    cudaStreamIsCapturing(impl.getStream(impl.getDevice()).native_handle(), &status);
    return status != 0;
  }

  int settings_now(bool product) {
    const auto dtype = c10::get_default_dtype_as_scalartype();
    const auto of_products = product ? product_settings() : of_products_;
    if (seen_settings_ == NONE || dtype != dtype_ || of_products != of_products_) {
      py::gil_scoped_acquire gil;
      of_products_ = product_settings();
      dtype_ = dtype;
      seen_settings_ = py::cast<int>(settings_());
    }
    return seen_settings_;
  }

  static std::optional<std::pair<at::Generator, at::Tensor>> random_state(torch::jit::Stack* stack, const Facts& facts) {
    at::Generator generator;
    std::optional<c10::Device> of_tensor, named;
    for (const auto& one : torch::jit::last(*stack, facts.num_args)) {
      if (one.isGenerator() && !generator.defined()) generator = one.toGenerator();
      if (one.isDevice()) named = one.toDevice();
      each_tensor(one, [&](const at::Tensor& t) { if (!of_tensor) of_tensor = t.device(); });
    }
    const auto device = of_tensor ? *of_tensor : named.value_or(c10::Device(c10::kCPU));
    if (!generator.defined() && (device.is_cpu() || device.is_cuda())) generator = at::globalContext().defaultGenerator(device);
    if (!generator.defined()) return std::nullopt;
    std::lock_guard<std::mutex> guard(generator.mutex());
    return std::pair{generator, generator.get_state()};
  }

  // Tensors that it writes to, those that a sparse one consists of in its place.
  std::vector<at::Tensor> written_tensors(torch::jit::Stack* stack, const Facts& facts) {
    std::vector<at::Tensor> written;
    const auto args = torch::jit::last(*stack, facts.num_args);
    const auto add = [&](const at::Tensor& t) {
      if (t.layout() == at::kStrided && !t.is_nested()) {
        if (has_storage(t)) written.push_back(t);
        return;
      }
      py::gil_scoped_acquire gil;
      for (const auto& part : py::cast<py::list>(parts_(py::reinterpret_steal<py::object>(THPVariable_Wrap(t))))) written.push_back(THPVariable_Unpack(part.ptr()));
    };
    for (int place : facts.written) each_tensor(args[place], add);
    if (facts.hidden_if == NONE || args[facts.hidden_if].toBool()) {
      for (int place : facts.hidden) each_tensor(args[place], add);
    }
    return written;
  }

  // --- with the lock

  int asked(int number) {
    if (number != NONE) storages_[values_[number].storage].asked = true;
    return number;
  }

  int known_value(const StorageNote& storage, size_t nbytes) const {
    return storage.latest != NONE && values_[storage.latest].nbytes == nbytes ? storage.latest : NONE;
  }

  int storage_of(const at::Tensor& t) {
    const auto& storage = t.unsafeGetTensorImpl()->unsafe_storage();
    const auto [found, is_new] = by_storage_.try_emplace(storage.unsafeGetStorageImpl(), int(storages_.size()));
    if (is_new) storages_.push_back({storage.getWeakStorageImpl()});
    return found->second;
  }

  int add(Value value) {
    storages_[value.storage].latest = int(values_.size());
    values_.push_back(std::move(value));
    return int(values_.size()) - 1;
  }

  int given(const at::Tensor& t) {
    const int storage = storage_of(t);
    const size_t nbytes = t.unsafeGetTensorImpl()->unsafe_storage().nbytes();
    const int latest = known_value(storages_[storage], nbytes);
    if (latest != NONE && !values_[latest].known.counter.moved()) return latest;
    return add({storage, NONE, false, 0, 0, nbytes, known_by(t, 0)});  // else something wrote to it where nobody looks
  }

  void note_argument(const at::Tensor& t, int place, bool in_list, Call& call) {
    if (!is_plain(t)) {
      call.opaque = true;
      return;
    }
    arguments_.push_back({given(t), place, in_list, t.is_conj(), t.is_neg(), t.scalar_type(), t.storage_offset(), dims_.size(), size_t(t.dim())});
    dims_.insert(dims_.end(), t.sizes().begin(), t.sizes().end());
    dims_.insert(dims_.end(), t.strides().begin(), t.strides().end());
  }

  void note_arguments(c10::ArrayRef<c10::IValue> args, Call& call) {
    call.values = given_.size();
    call.arguments = arguments_.size();
    for (int place = 0; place < int(args.size()); ++place) {
      const auto& one = args[place];
      if (one.isTensor()) {
        const auto& t = one.toTensor();
        const bool number = t.defined() && t.unsafeGetTensorImpl()->is_wrapped_number();  // decides no dtype, as a tensor would
        if (t.defined() && !number) note_argument(t, place, false, call);
        given_.push_back(number ? number_of(t) : c10::IValue());
      } else if (one.isList() && (one.isTensorList() || one.isOptionalTensorList())) {
        for (const c10::IValue& element : one.toListRef()) {
          if (element.isTensor() && element.toTensor().defined()) {
            note_argument(element.toTensor(), place, true, call);
          } else {
            arguments_.push_back({NONE, place, true, false, false, at::kFloat, 0, dims_.size(), 0});
          }
        }
        given_.emplace_back(c10::List<int64_t>());  // to be filled
      } else {
        given_.push_back(one);
      }
    }
    call.arguments_end = arguments_.size();
  }

  void note_made(const torch::jit::Stack& stack, const Facts& facts, int number, std::vector<Written>& writes) {
    calls_[number].made = int(values_.size());
    for (auto& one : writes) {
      const auto it = storages_[one.storage].it.lock();
      const size_t nbytes = it ? it->nbytes() : 0;
      const int before = known_value(storages_[one.storage], nbytes);
      add({one.storage, number, false, one.position, before == NONE ? 0 : values_[before].writes + 1, nbytes, std::move(one.known)});
    }
    int position = 0;
    for (const auto& result : torch::jit::last(stack, facts.in_place ? 0 : facts.num_returns)) {
      each_tensor(result, [&](const at::Tensor& t) {
        if (has_storage(t) && !has_symbols(t)) {
          const int storage = storage_of(t);
          const size_t nbytes = t.unsafeGetTensorImpl()->unsafe_storage().nbytes();
          if (known_value(storages_[storage], nbytes) == NONE) add({storage, number, true, position, 0, nbytes, known_by(t, 0)});
        }
        ++position;
      });
    }
    calls_[number].made_end = int(values_.size());
  }

  // Where a storage to hold may have been made: which of its name the call is since the last hook, and what it made.
  std::pair<int, std::vector<int>> birth_of(const Facts& facts, int number) const {
    if (places_.empty() || !(places_.count({hooks_, facts.name}) || places_.count({hooks_, ""}))) return {};
    int same_name = 0;
    for (size_t i = since_hook_; i <= size_t(number); ++i) same_name += calls_[i].facts == &facts;
    std::vector<int> made;
    for (int value = calls_[number].made; value < calls_[number].made_end; ++value) made.push_back(value);
    return {same_name, std::move(made)};
  }

  py::object facts_, settings_, parts_, before_write_, born_;
  const bool is_cuda_;
  std::atomic<bool> over_{false};
  std::unordered_map<c10::OperatorHandle, Facts> by_operator_;  // this and the settings are its own thread's
  at::ScalarType dtype_ = at::kFloat;
  uint64_t of_products_ = 0;
  int seen_settings_ = NONE;
  std::mutex lock_;  // for what is below
  std::unordered_map<c10::StorageImpl*, int> by_storage_;
  std::vector<StorageNote> storages_;
  std::vector<Value> values_;
  std::vector<Call> calls_;
  std::vector<c10::IValue> given_;
  std::vector<Argument> arguments_;
  std::vector<int64_t> dims_;
  std::vector<std::pair<at::Generator, at::Tensor>> random_;
  std::set<std::pair<int, std::string>> places_;
  int hooks_ = 0;
  size_t since_hook_ = 0;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, KEY);
  if (keys.has(c10::DispatchKey::Python)) return op.redispatchBoxed(below, stack);
  const auto notes = mine.lock();
  const Facts* facts = notes && notes->listens() ? &notes->facts_of(op) : nullptr;
  if (facts != nullptr && facts->in_parts) return op.redispatchBoxed(below, stack);
  c10::impl::ExcludeDispatchKeyGuard guard(KEY);
  if (facts == nullptr || facts->skip) return op.redispatchBoxed(below, stack);
  notes->run(op, below, stack, *facts);
}

// The key has to be free: who else has a fallback or a kernel for it would not be called, or not call us.
void take_key() {
  if (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14) throw py::import_error("this torch has a use of its own for the dispatch key Fake");
  auto& dispatcher = c10::Dispatcher::singleton();
  bool taken = dispatcher.hasBackendFallbackForDispatchKey(KEY);
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    taken = taken || (op && op->hasKernelForDispatchKey(KEY));
  }
  if (taken) throw py::import_error("somebody else has the dispatch key Fake");
  static auto* library = new torch::Library(torch::Library::IMPL, "_", KEY, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

PYBIND11_MODULE(chameleon_mm_notes, m) {
  take_key();
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  m.def("turn", [](bool on) { c10::impl::tls_set_dispatch_key_included(KEY, on); });
  m.def("is_on", [] { return c10::impl::tls_is_dispatch_key_included(KEY); });
  m.def("pause", [](int more) { pauses += more; });
  m.def("is_taken", [] { const auto notes = mine.lock(); return notes && !notes->is_over(); });
  py::class_<Notes, std::shared_ptr<Notes>>(m, "Notes")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, bool>())
      .def("begin", &Notes::begin).def("end", &Notes::end).def("value_of", &Notes::value_of).def("given", &Notes::given_to_hook)
      .def("is_latest", &Notes::is_latest).def("value", &Notes::value).def("storage", &Notes::storage).def("root", &Notes::root)
      .def("call", &Notes::call).def("hold", &Notes::hold).def("at_hook", &Notes::at_hook);
}
