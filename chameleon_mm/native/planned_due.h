// Whether a step is as usual, and what is due at each of its hooks: adaptive/plan_follower.py, executor/swap_outs.py and budget.py.
// A part of planned.cpp.

// --------------------------------------------------------------------------------------------------- whether all is as usual

// Note the only compute stream that has been seen. False: there are several.
bool note_main(Parts& p) {
  Ref seen(get(p.streams, n__seen));
  if (!PyList_CheckExact(seen.it) || PyList_GET_SIZE(seen.it) != 1) return false;
  PyObject* stream = PyList_GET_ITEM(seen.it, 0);
  if (stream == p.main) return true;
  if (!Stream.made(stream)) return false;
  p.main_id = as_number(Ref(need(PyObject_GetAttrString(field(stream, Stream.raw), "stream_id"))).it);
  Py_XSETREF(p.main, Py_NewRef(stream));
  return true;
}

// Whether the calling thread may swap here and now: its device, stream, modes and process are those of a plain step.
bool is_here(Hooks* h) {
  Parts& p = h->p;
  if (forks != h->forks || c10::impl::TorchDispatchModeTLS::stack_len() != 0 || c10::InferenceMode::is_enabled()) return false;
  if (!get_truth(p.recording, n_is_over) || is_true(call(p.profiler_is_on).it) || !note_main(p)) return false;
  if (call(p.compiler).it != Py_None) return false;  // dynamo would compile what is called from here
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  const auto device = guard.getDevice();
  if (device.index() != p.device_index || guard.getStream(device).id() != p.main_id) return false;
  int status = 0;
  if (cudaStreamIsCapturing(handle_of(p.main), &status) != 0) {
    cudaGetLastError();
    return false;
  }
  return status == 0;
}

// Whether the step follows its plan so far, and nothing of it is recorded, timed, predicted or recomputed. At its first hook, and
// where a use is not the one that the plan has, the director is asked in Python.
struct Step {
  Ref schedule, planned, cursor;
  long long hook = 0;

  bool follows(const Parts& p) {
    PyObject* d = p.director;
    if (field(d, Follower._steps) == Py_None || field(d, Follower._recorder) != Py_None) return false;
    if (field(d, Follower._diverged) == Py_True) return false;
    if (field_number(d, Follower._epoch) != field_number(p.registry, Registry.epoch)) return false;
    if (field(d, Follower._due) != nothing_due || get_truth(p.metrics, n_timed)) return false;
    if (field(p.budget, Budget.forecast) != p.plan_forecast) return false;
    schedule.it = Py_NewRef(field(d, Follower._schedule));
    planned.it = Py_NewRef(field(d, Follower._planned));
    cursor.it = Py_NewRef(field(d, Follower._cursor));
    if (schedule.it == Py_None || planned.it == Py_None || !Cursor.made(cursor.it)) return false;
    if (get(planned.it, n_predicted_by).it != Py_None || get(field(d, Follower.followed), n_recompute).it != Py_None) return false;
    hook = field_number(p.light, Light.num_hooks);
    return true;
  }
};

PyObject* feature_at(const Parts& p, long long hook) {  // borrowed; null: not known
  PyObject* features = field(p.light, Light._features);
  if (!PyList_CheckExact(features) || hook >= PyList_GET_SIZE(features)) return nullptr;
  PyObject* feature = PyList_GET_ITEM(features, hook);
  return PyTuple_CheckExact(feature) ? feature : nullptr;
}

bool equals(PyObject* number, long long value) { return python_objects::equals(number, value); }

// LightProfiler.saved, but that nothing is noted.
bool save_agrees(const Parts& p, const Step& step, PyObject* kind, const at::Tensor& t, long long since) {
  PyObject* feature = feature_at(p, step.hook);
  if (!feature || PyTuple_GET_SIZE(feature) != 5 || PyTuple_GET_ITEM(feature, 0) != kind) return false;
  PyObject* shape = PyTuple_GET_ITEM(feature, 1);
  const auto sizes = t.sizes();
  if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) != (Py_ssize_t)sizes.size()) return false;
  for (size_t i = 0; i < sizes.size(); i++)
    if (!equals(PyTuple_GET_ITEM(shape, i), sizes[i])) return false;
  return PyTuple_GET_ITEM(feature, 2) == (PyObject*)torch::getTHPDtype(t.scalar_type()) &&
         equals(PyTuple_GET_ITEM(feature, 3), p.operators - field_number(p.light, Light._number)) &&
         equals(PyTuple_GET_ITEM(feature, 4), since);
}

// LightProfiler.used, but that nothing is noted.
bool use_agrees(const Parts& p, const Step& step, long long save) {
  PyObject* feature = feature_at(p, step.hook);
  if (!feature || PyTuple_GET_SIZE(feature) != 2) return false;
  Ref node(call(p.current_node));
  return PyTuple_GET_ITEM(feature, 0) == (PyObject*)Py_TYPE(node.it) &&
         equals(PyTuple_GET_ITEM(feature, 1), field_number(p.light, Light._last_used) - save);
}

// ----------------------------------------------------------------------------------------------- what is due at every hook

Py_ssize_t index_in(PyObject* list, PyObject* it) {  // -1: it is not there
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++)
    if (PyList_GET_ITEM(list, i) == it) return i;
  return -1;
}

// SwapOuts.finished
Ref finished(const Parts& p) {
  Ref over(need(PyList_New(0))), fresh(Py_NewRef(field(p.outs, Outs.fresh)));
  std::vector<Ref> waiting;
  for (Py_ssize_t left = size_of(fresh.it); left > 0; left--) {
    Ref entry(call_method(fresh.it, n_popleft));
    PyObject *saved = PyTuple_GET_ITEM(entry.it, 0), *by = PyTuple_GET_ITEM(entry.it, 1);
    if (equals(PyTuple_GET_ITEM(by, 0), p.thread) && as_number(PyTuple_GET_ITEM(by, 1)) < p.operators) {
      if (index_in(over.it, saved) < 0) need(PyList_Append(over.it, saved));
    } else if (field(saved, Storage.state) == State.on_device) {
      waiting.push_back(std::move(entry));
    }
  }
  for (const Ref& entry : waiting) {
    append(fresh.it, entry.it);
    const Py_ssize_t at = index_in(over.it, PyTuple_GET_ITEM(entry.it, 0));
    if (at >= 0) need(PySequence_DelItem(over.it, at));  // another operator has saved bytes of it since, and has not ended
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(over.it); i++) set(PyList_GET_ITEM(over.it, i), Storage.op_is_over, Py_True);
  return over;
}

// ScheduleCursor.advance_to, of a hook from which on something is due.
Ref advance_to(PyObject* cursor, PyObject* at, long long hook) {
  PyObject *hooks = field(cursor, Cursor._hooks), *due = field(cursor, Cursor._due);
  const Py_ssize_t here = (Py_ssize_t)field_number(cursor, Cursor._at), num = PyList_GET_SIZE(hooks);
  Ref behind_all(new_number(BEHIND_ALL));
  PyObject* next = here + 1 < num ? PyList_GET_ITEM(hooks, here + 1) : behind_all.it;
  if (as_number(next) <= hook) return call_method(cursor, n_advance_to, at);
  set_number(cursor, Cursor._at, here + 1), set(cursor, Cursor.next_hook, next);
  return Ref(Py_NewRef(PyList_GET_ITEM(due, here)));
}

// PlanFollower._locate, of a hook that has the feature of the cached step's: what is due at it; null: nothing.
Ref locate(const Parts& p, const Step& step) {
  PyObject* d = p.director;
  Ref at(new_number(step.hook));
  const long long grows = as_number(PyList_GET_ITEM(field(step.schedule.it, Schedule.growth), step.hook));
  set_number(p.plan_forecast, Forecast.growth_bytes, grows + get_number(step.planned.it, n_margin_bytes));
  Ref due;
  if (step.hook > field_number(d, Follower._reached)) {
    set(d, Follower._reached, at.it);
    set(d, Follower._had_plan, Py_True);
    if (step.hook >= field_number(step.cursor.it, Cursor.next_hook)) due.it = advance_to(step.cursor.it, at.it, step.hook).taken();
  }
  set(d, Follower.at_rest_until, field(step.cursor.it, Cursor.next_hook));
  return due;
}

// The storage of an action, as long as it is one of this step; null: it is not.
Ref storage_for(PyObject* storages, PyObject* action) {
  Ref number(get(action, n_tensor));
  return Ref(Py_XNewRef(PyDict_GetItemWithError(storages, number.it)));
}

void swap_out_due(const Parts& p, PyObject* saved, PyObject* nbytes) {
  if (!swap_out_planned(p, saved, as_number(nbytes))) call_method(p.outs, n_swap_out_planned, saved, nbytes);
}

void reclaim_due(const Parts& p, PyObject* saved, PyObject* action) {
  PyObject* state = field(saved, Storage.state);
  const bool again = get_truth(action, n_again), whole = moves_whole(p, saved);
  if (state == State.restored ? !again : state != State.on_device && state != State.swapping_out) return;
  if (whole && state == State.restored) {  // SavedStorage.drop_restored
    set(saved, Storage._device, Py_None);
    set(saved, Storage.state, State.on_host);
    return;
  }
  if (state == State.swapping_out && reclaim(p, saved)) return;
  if (again && state == State.restored && !PyObject_CallMethodNoArgs(saved, n_drop_restored)) forgive(out_of_memory);
  if (field(saved, Storage.state) == State.on_device) swap_out_due(p, saved, get(action, n_nbytes).it);
  if (field(saved, Storage.state) != State.swapping_out) return;
  PyObject* arguments[] = {saved, Py_True};
  Ref done(need(PyObject_VectorcallMethod(n_reclaim, arguments, 1, in_plan_order)));
  Ref stays(get(field(saved, Storage.form), n_device_bytes));
  if (is_true(stays.it)) call_method(p.budget, n_note_allocated, stays.it);
}

// PlanFollower.due and SwapOuts.carry_out, in that order of things. Returns what is to be swapped in.
Ref carry_out(const Parts& p, PyObject* due, PyObject* over) {
  Ref storages(Py_NewRef(field(p.director, Follower._storages))), back;
  const Lending lending(p);
  lending.settle();
  const long long reached = field_number(p.director, Follower._reached);
  if (due) {
    for (int kind = 0; kind < 2; kind++) {  // reclaims first, so that their memory is there for what follows
      PyObject* actions = PyTuple_GET_ITEM(due, kind);
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(actions); i++) {
        PyObject* action = PyList_GET_ITEM(actions, i);
        Ref saved(storage_for(storages.it, action));
        if (!saved) continue;
        if (kind == 0) reclaim_due(p, saved.it, action);
        else swap_out_due(p, saved.it, get(action, n_nbytes).it);
      }
    }
    PyObject* ins = PyTuple_GET_ITEM(due, 2);
    if (PyList_GET_SIZE(ins)) back.it = need(PyList_New(0));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ins); i++) {
      Ref saved(storage_for(storages.it, PyList_GET_ITEM(ins, i)));
      if (saved) need(PyList_Append(back.it, saved.it));
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(over); i++) {
    PyObject *saved = PyList_GET_ITEM(over, i), *planned = field(saved, Storage.planned);
    if (planned == Py_None) {
      call_method(p.outs, n_swap_out, saved);
      continue;
    }
    PyObject* action = PyTuple_GET_ITEM(planned, 1);
    if (action != Py_None && get_number(action, n_out_at) <= reached) swap_out_due(p, saved, get(action, n_nbytes).it);
  }
  if (size_of(field(p.outs, Outs._small))) call_method(p.outs, n__pack_waiting);
  if (size_of(p.out.queued) && lending.memory_is_short()) {
    Locked lock(p.copy_lock);
    hand_over_all(p.out);
  }
  for (const Queue* queue : {&p.out, &p.in}) {
    if (!size_of(queue->queued)) continue;
    Locked lock(p.copy_lock);
    hand_over(*queue);
  }
  if (size_of(p.reclaim_entries)) call_method(field(p.budget, Budget.reclaim), n_reclaim_complete);
  lending.lend();
  return back;
}

// CudaDevice.read_memory: what is allocated, and what was in all.
std::pair<long long, long long> read_memory(const Parts& p) {
  Ref counted(get(p.device, n__counted));
  long long before = as_number(PyTuple_GET_ITEM(counted.it, 0));
  long long now = 0, ever = 0;
  if (p.reads_here) {
    const auto bytes = allocated_bytes(static_cast<c10::DeviceIndex>(p.device_index));
    now = bytes.current, ever = bytes.allocated;
  } else {
    Ref read(call(p.read_allocated));
    now = as_number(PyTuple_GET_ITEM(read.it, 0)), ever = as_number(PyTuple_GET_ITEM(read.it, 1));
  }
  const long long last = as_number(PyTuple_GET_ITEM(counted.it, 1));
  if (ever < last) before += last;
  if (get(p.device, n__counted).it == counted.it) put(p.device, n__counted, Ref(need(Py_BuildValue("(LL)", before, ever))).it);
  return {now, before + ever};
}

// Headroom.record
void record_growth(PyObject* headroom, long long growth) {
  Ref growing(get(headroom, n__growing)), known(get(headroom, n__known)), scale(get(headroom, n__scale)), bytes(new_number(growth));
  const Py_ssize_t at = PyList_GET_SIZE(growing.it);
  if (scale.it != Py_None && at < PyList_GET_SIZE(known.it)) {
    const double most = PyFloat_AsDouble(scale.it) * (double)as_number(PyList_GET_ITEM(known.it, at));
    if ((double)growth > most) {
      call_method(headroom, n_record, bytes.it);
      return;
    }
  }
  need(PyList_Append(growing.it, bytes.it));
}

// PlanFollower.note_growth. `at_hook`: every step like this one checks memory here.
void note_growth(const Parts& p, const Step& step, long long growth, bool at_hook) {
  PyObject* d = p.director;
  if (!at_hook) {
    add_number(d, Follower._growth_bytes, growth);
    return;
  }
  const long long hook = field_number(p.light, Light.num_hooks) - 1, since = field_number(d, Follower._checked_at);
  const long long all = field_number(d, Follower._growth_bytes) + growth;
  set_number(d, Follower._checked_at, hook), set_number(d, Follower._growth_bytes, 0);
  if (hook <= since) return;
  Ref until(get(step.planned.it, n_allocated_until));
  const long long before = since >= 0 ? as_number(PyList_GET_ITEM(until.it, since)) : 0;
  const long long more = all - as_number(PyList_GET_ITEM(until.it, hook)) + before;
  if (!more) return;
  Ref memory(Py_NewRef(field(d, Follower._memory))), differs;
  differs.it = call_method(memory.it, n_differs, Ref(new_number(more)).it, Ref(new_number(since)).it, Ref(new_number(hook)).it,
                           step.planned.it, step.schedule.it, p.budget).taken();
  if (is_true(differs.it)) set(p.budget, Budget.forecast, field(p.budget, Budget.highest_forecast));
}

// Budget.check_memory and what the director makes of it.
void check_memory(const Parts& p, const Step& step, bool at_hook) {
  PyObject* budget = p.budget;
  Ref limits(Py_NewRef(field(budget, Budget._limits))), most(get(limits.it, n_hbm_budget_bytes));
  long long budget_bytes = 0;
  const bool has_budget = to_number(most.it, budget_bytes) && get(limits.it, n_leaving_bytes).it == Py_None;
  if (!has_budget || field(budget, Budget.forecast) != p.plan_forecast) {
    note_growth(p, step, as_number(call_method(budget, n_check_memory).it), at_hook);
    return;
  }
  const auto [allocated, cumulative] = read_memory(p);
  Ref last(Py_NewRef(field(budget, Budget._cumulative))), since;
  since.it = last.it == Py_None ? Py_NewRef(field(budget, Budget._cumulative_at_begin)) : Py_NewRef(last.it);
  const long long taken = field_number(budget, Budget._taken);
  const long long growth = since.it == Py_None ? 0 : std::max(0LL, cumulative - as_number(since.it) - taken);
  if (last.it != Py_None) record_growth(field(budget, Budget.headroom), growth);
  Ref now(new_number(allocated)), none(new_number(0));
  set(budget, Budget._allocated, now.it), set_number(budget, Budget._cumulative, cumulative);
  set(budget, Budget._unused, none.it), set(budget, Budget._taken, none.it);
  if (allocated > field_number(budget, Budget.peak_seen_bytes)) set(budget, Budget.peak_seen_bytes, now.it);
  Ref ahead(Py_NewRef(field(p.plan_forecast, Forecast.growth_bytes)));
  Lending(p).set_limits(most.it, ahead.it, now.it);
  if (allocated + as_number(ahead.it) > budget_bytes) {
    Ref nobody(need(PyTuple_New(0)));
    call_method(budget, n__make_room, none.it, ahead.it, nobody.it);
  }
  note_growth(p, step, growth, at_hook);
}

// Whether nothing is due at a hook of what stays, which then is only numbered: `saves_at_rest`, and what autograd_hooks.py asks before.
bool is_at_rest(const Parts& p, const Step& step) {
  return step.hook < field_number(p.director, Follower.at_rest_until) && !size_of(field(p.outs, Outs.fresh)) &&
         !size_of(p.reclaim_entries) && !field_number(p.outs, Outs.waiting_bytes) && !size_of(p.out.queued) && !size_of(p.in.queued);
}

// Executor._advance at a hook that is the one of the plan; `moves`: of what moves. Returns what is to be swapped in.
Ref advance(const Parts& p, const Step& step, PyObject* due, PyObject* over, bool moves) {
  Ref back(carry_out(p, due, over));
  if (moves || (due && PyList_GET_SIZE(PyTuple_GET_ITEM(due, 0)))) check_memory(p, step, moves);
  return back;
}

// Executor._advance once Python's director was told of the hook: here where the step follows its plan all the same.
Ref advance_as_told(const Parts& p, PyObject* over, bool moves) {
  Ref due(Py_NewRef(field(p.director, Follower._due)));
  set(p.director, Follower._due, nothing_due);
  Step step;
  if (step.follows(p)) return advance(p, step, due.it == nothing_due ? nullptr : due.it, over, moves);
  set(p.director, Follower._due, due.it);
  PyObject* arguments[] = {p.executor, over, moves ? Py_True : Py_False, Py_True};
  return Ref(need(PyObject_VectorcallMethod(n__advance, arguments, 2, check_memory_at_hook)));
}

// SwapIns.prefetch_planned
void prefetch_planned(const Parts& p, PyObject* due) {
  if (!due || !size_of(due)) return;
  if (field(p.budget, Budget.forecast) != p.plan_forecast || !PyList_Check(due)) {
    call_method(p.ins, n_prefetch_planned, due, p.main);
    return;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(due); i++) {
    PyObject* saved = PyList_GET_ITEM(due, i);
    if (Storage.made(saved) && field(saved, Storage.form) == whole_form) {
      if (field(saved, Storage.state) != State.on_host || call(field(saved, Storage.first)).it != Py_None) continue;
      if (prefetch(p, saved)) continue;
    }
    call_method(p.ins, n_prefetch_planned, Ref(need(PyTuple_Pack(1, saved))).it, p.main);
  }
}

