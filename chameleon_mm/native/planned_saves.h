// The records and handles of what autograd saves: SavedBytes, SavedStorage, Claim and SwappedView, made as their Python classes do.
// A part of planned.cpp.

// Note the thread and the number of its next differentiable operator: as `current_operator` tells them.
void note_operator(Parts& p) {
  p.thread = get_number(p.this_thread, n_number);
  p.operators = (long long)at::sequence_number::peek();
}

PyObject* type_name(PyObject* argument, const at::Tensor& t) {  // Tensor.type(), which is one for all GPUs
  static PyObject* names[(size_t)at::ScalarType::NumOptions] = {};
  PyObject*& name = names[(size_t)t.scalar_type()];
  if (!name) name = call_method(argument, n_type).taken();
  return Py_NewRef(name);
}

PyObject* numbers(c10::IntArrayRef values) {
  Ref tuple(need(PyTuple_New((Py_ssize_t)values.size())));
  for (size_t i = 0; i < values.size(); i++) PyTuple_SET_ITEM(tuple.it, (Py_ssize_t)i, new_number(values[i]));
  return tuple.taken();
}

Ref probe_of(PyObject* argument, const at::Tensor& t, PyObject* shape) {  // VersionProbe
  Ref probe(Probe.make()), origin(Origin.make()), type(type_name(argument, t));
  const auto& node = t.grad_fn();
  const python_objects::OriginSlots at{Origin._ref, Origin._name, Origin._node_number, Origin._output_nr};
  if (!python_objects::note_origin(origin.it, at, argument, t, node.get())) throw Raised{};
  set_number(probe.it, Probe.expected, t._version()), give(probe.it, Probe.alias, alias_of(t));
  give(probe.it, Probe._what, PyTuple_Pack(2, type.it, shape)), set(probe.it, Probe._origin, origin.it);
  return probe;
}

// SavedBytes, of a tensor that covers all bytes from its first to its last.
Ref bytes_of(PyObject* probe, PyObject* counter, const at::Tensor& t, PyObject* shape, PyObject* stride) {
  Ref bytes(Bytes.make()), geometry(need(Py_BuildValue("(nOOL)", (Py_ssize_t)t.element_size(), shape, stride, (long long)t.storage_offset())));
  const long long begin = t.storage_offset() * (long long)t.element_size();
  set(bytes.it, Bytes.probe, probe), give(bytes.it, Bytes._counter, PyWeakref_NewRef(counter, nullptr));
  set(bytes.it, Bytes._geometry, geometry.it), set(bytes.it, Bytes.is_dense, Py_True);
  set_number(bytes.it, Bytes.begin, begin), set_number(bytes.it, Bytes.end, begin + (long long)t.nbytes());
  return bytes;
}

// SavedStorage, of a storage that `t` covers, without a checksum.
Ref record_of(const Parts& p, PyObject* storage, PyObject* bytes, const at::Tensor& t, PyObject* epoch, PyObject* index) {
  Ref made(Storage.make()), last(LastSave.make()), first(need(PyWeakref_NewRef(storage, nullptr))), id(need(PyLong_FromVoidPtr(storage)));
  Ref nbytes(new_number((long long)t.storage().nbytes())), one(new_number(1)), none(new_number(-1));
  PyObject* s = made.it;
  give(s, Storage._saved_bytes, PyList_New(1));
  PyList_SET_ITEM(field(s, Storage._saved_bytes), 0, Py_NewRef(bytes));
  for (const auto at : {Storage._lent, Storage._out, Storage._block, Storage._checksum, Storage._in, Storage._read, Storage._arrived_on,
                        Storage._began_in, Storage.traced, Storage.planned, Storage.relied, Storage.proof})
    set(s, at, Py_None);
  for (const auto at : {Storage.copies, Storage.views, Storage.uses_left}) set(s, at, one.it);
  set(s, Storage.nbytes, nbytes.it), set(s, Storage._saved_nbytes, nbytes.it), set(s, Storage.epoch, epoch), set(s, Storage.index, index);
  set(s, Storage.first, first.it), set(s, Storage.latest, first.it), set(s, Storage.storage_id, id.it);
  set(s, Storage._device, storage), set(s, Storage._context, p.context), set(s, Storage.form, whole_form);
  set(s, Storage.alloc_stream, p.main), set(s, Storage.state, State.on_device), set(s, Storage.last_save, last.it);
  set(s, Storage.dtype, (PyObject*)torch::getTHPDtype(t.scalar_type())), set_number(s, Storage.swap_in_number, 0);
  set(s, Storage.op_is_over, Py_False), set(s, Storage.is_held_for_recipes, Py_False), set(s, Storage._noted_in, none.it);
  set(last.it, LastSave.storage, first.it), set(last.it, LastSave.epoch, none.it), set_number(last.it, LastSave.hook, 0);
  set_number(last.it, LastSave.num_claims, 0), set(last.it, LastSave.lent, Py_None);
  return made;
}

Ref claim_on(const Parts& p, PyObject* saved) {  // Claim
  Ref claim(Claim.make()), end(End.make());
  set(end.it, End.saved, saved), set(end.it, End.retire, p.on_claim_end);
  set(claim.it, Claim.saved, saved), set(claim.it, Claim._end, end.it);
  return claim;
}

// SwappedView
Ref view_of(PyObject* claim, PyObject* probe, const at::Tensor& t, PyObject* shape, PyObject* stride, PyObject* saved_at) {
  Ref view(View.make());
  set(view.it, View.claim, claim), set(view.it, View.probe, probe), set(view.it, View.saved_at, saved_at);
  set(view.it, View._dtype, (PyObject*)torch::getTHPDtype(t.scalar_type())), set(view.it, View._shape, shape);
  set(view.it, View._stride, stride), set_number(view.it, View._offset, t.storage_offset());
  set(view.it, View._conj, Py_False), set(view.it, View._neg, Py_False), set_number(view.it, View.swap_in_number, -1);
  return view;
}

// SwappedView.rebuild, of what is neither conjugate nor negative.
Ref rebuild(PyObject* handle, PyObject* storage) {
  const at::Tensor& alias = THPVariable_Unpack(field(field(handle, View.probe), Probe.alias));
  c10::SmallVector<int64_t, 6> all[2];
  for (int i = 0; i < 2; i++) {
    PyObject* tuple = field(handle, i ? View._stride : View._shape);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(tuple); k++) all[i].push_back(as_number(PyTuple_GET_ITEM(tuple, k)));
  }
  const int64_t offset = field_number(handle, View._offset);
  int64_t last = offset;
  for (size_t i = 0; i < all[0].size(); i++) last += (all[0][i] - 1) * all[1][i];
  const c10::Storage& there = storage_of(storage);
  if ((last + 1) * (int64_t)alias.element_size() > (int64_t)there.nbytes()) return call_method(handle, n_rebuild, storage);
  return Ref(view_over(there, alias, all[0], all[1], offset));
}

// Executor._count_use, in a step that follows its plan.
void count_use(const Parts& p, PyObject* handle, PyObject* saved) {
  if (equals(field(saved, Storage.epoch), field_number(p.registry, Registry.epoch))) {
    put(p.executor, n__used_any, Py_True);
    Ref current(get(p.order, n__current));
    if (!PyDict_SetDefault(current.it, field(saved, Storage.index), Py_None)) throw Raised{};
  }
  PyObject* number = field(saved, Storage.swap_in_number);
  if (field_number(handle, View.swap_in_number) != as_number(number))
    set_number(saved, Storage.uses_left, field_number(saved, Storage.uses_left) - 1);
  set(handle, View.swap_in_number, number);
}

// Whether a tensor is one of this GPU as others are: whatever else it may be, `facts_of` tells.
bool is_plain(const Parts& p, const at::Tensor& t) {
  static const c10::DispatchKeySet wrapped{
      c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
      c10::DispatchKey::Batched, c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};
  const auto* impl = t.unsafeGetTensorImpl();
  if (!impl->has_storage() || t.is_inference() || t.layout() != c10::kStrided || t.is_nested() || t.is_quantized()) return false;
  if (t._is_zerotensor() || t.is_conj() || t.is_neg() || t.key_set().has_any(wrapped) || impl->has_symbolic_sizes_strides()) return false;
  return t.is_cuda() && t.device().index() == p.device_index;
}

bool is_protected(const Parts& p, PyObject* storage, PyObject* id) {
  const int known = PyDict_Contains(p.protected_refs, id);
  need(known);
  return known && is_true(call(p.is_protected, storage).it);
}

// The live claim on all of a storage whose copy has the bytes of `t`: as `Claims.find` begins; null: there is none, or it takes Python.
Ref shared_claim(PyObject* reference, PyObject* storage, PyObject* counter, const at::Tensor& t) {
  Ref claim(call(reference));
  if (Py_TYPE(claim.it) != Claim.type) return Ref();
  PyObject* saved = field(claim.it, Claim.saved);
  if (!Storage.made(saved) || call(field(saved, Storage.first)).it != storage) return Ref();
  if ((size_t)field_number(saved, Storage._saved_nbytes) != t.storage().nbytes()) return Ref();
  const long long begin = t.storage_offset() * (long long)t.element_size(), end = begin + (long long)t.nbytes();
  PyObject* all = field(saved, Storage._saved_bytes);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); i++) {
    PyObject *earlier = PyList_GET_ITEM(all, i), *probe = field(earlier, Bytes.probe);
    if (has_moved(probe) || field_number(probe, Probe.expected) != (long long)t._version()) continue;
    const bool covers = field(earlier, Bytes.is_dense) == Py_True && field_number(earlier, Bytes.begin) <= begin &&
                        end <= field_number(earlier, Bytes.end);
    if (covers && call(field(earlier, Bytes._counter)).it == counter) return claim;
  }
  return Ref();
}

// Executor._new_claim and what is noted of it.
Ref new_claim(const Parts& p, PyObject* storage, PyObject* bytes, const at::Tensor& t) {
  Ref epoch(Py_NewRef(field(p.registry, Registry.epoch))), index(get(p.registry, n_next_index)), key(need(PyTuple_Pack(2, epoch.it, index.it)));
  Ref made(record_of(p, storage, bytes, t, epoch.it, index.it)), claim(claim_on(p, made.it));
  PyObject *id = field(made.it, Storage.storage_id), *last = field(made.it, Storage.last_save);
  Ref reference(need(PyWeakref_NewRef(claim.it, nullptr))), by(current_operator(p)), entry(need(PyTuple_Pack(2, made.it, by.it)));
  need(PyDict_SetItem(p.storages, key.it, made.it));
  add_number(p.registry, Registry.next_index, 1), add_number(p.registry, Registry.of_epoch, 1);
  put(p.executor, n__saved_any, Py_True);
  append(field(p.outs, Outs.fresh), entry.it);
  need(PyDict_SetItem(p.last_saves, id, last));
  set_number(last, LastSave.num_claims, 1);
  need(PyDict_SetItem(p.by_storage, id, reference.it));
  return claim;
}

// PlanFollower.on_save, where a storage is saved for the first time in the step.
void note_first_save(const Parts& p, const Step& step, PyObject* made, PyObject* hook, PyObject* epoch) {
  set(made, Storage._noted_in, epoch);
  need(PyDict_SetItem(field(p.director, Follower._first_saves), hook, made));
  Ref actions(Py_NewRef(field(step.schedule.it, Schedule.storage_actions))), storages(Py_NewRef(field(p.director, Follower._storages)));
  PyObject* action = PyDict_GetItemWithError(actions.it, hook);
  if (!action) return;
  set(made, Storage.planned, action);
  need(PyDict_SetItem(storages.it, PyTuple_GET_ITEM(action, 0), made));
}

// What `facts_of` and the rule say of a plain tensor.
struct Facts {
  PyObject* reason = nullptr;  // why it stays; null: it moves
  bool is_unusual = false;     // it is Python's to tell
};

Facts facts_of(const Parts& p, PyObject* argument, PyObject* base, PyObject* storage, PyObject* id, const at::Tensor& t) {
  const auto is_one = [](PyObject* it, PyObject* of) { return (PyObject*)Py_TYPE(it) == of; };
  if (is_one(argument, ParameterClass) || is_one(base, ParameterClass)) return {n_parameter};
  if (!is_one(base, THPVariableClass)) return {nullptr, true};
  const at::Tensor& holder = THPVariable_Unpack(base);
  if (holder.requires_grad() && holder.is_leaf()) return {n_leaf};
  if (t.requires_grad() && !holder.requires_grad()) return {nullptr, true};  // it may be a part of a parameter
  if (is_protected(p, storage, id)) return {n_persistent};
  const long long nbytes = (long long)t.storage().nbytes();
  if (nbytes < p.least_bytes) return {nbytes ? n_small : n_empty};
  return {nullptr, !t.is_non_overlapping_and_dense() || !t.numel()};
}

// The claim on the storage of a tensor that moves, and how many hooks ago it was saved; `claim` null and `since` NEW_STORAGE: there is
// none yet. False: it takes Python.
bool find_claim(const Parts& p, const Step& step, PyObject* storage, PyObject* id, PyObject* base, const at::Tensor& t, Ref& claim,
                long long& since) {
  since = NEW_STORAGE;
  PyObject* reference = PyDict_GetItemWithError(p.by_storage, id);
  if (!reference) return t.nbytes() == t.storage().nbytes() && !PyDict_Contains(p.last_saves, id);
  claim.it = shared_claim(reference, storage, base, t).taken();
  if (!claim) return false;
  PyObject *made = field(claim.it, Claim.saved), *last = field(made, Storage.last_save);
  const long long epoch = field_number(p.registry, Registry.epoch);
  since = step.hook - field_number(last, LastSave.hook);
  return field_number(made, Storage._noted_in) == epoch && field_number(last, LastSave.epoch) == epoch;
}

// Executor._keep
Ref kept(const Parts& p, PyObject* argument, PyObject* reason, PyObject* saved_at) {
  Ref by_reason(get(p.totals, n_kept_by_reason)), count(call_method(by_reason.it, n_get, reason, Ref(new_number(0)).it));
  need(PyObject_SetItem(by_reason.it, reason, Ref(new_number(as_number(count.it) + 1)).it));
  PyObject* arguments[] = {argument, saved_at, reason == n_parameter ? Py_True : Py_False};
  return Ref(need(PyObject_Vectorcall((PyObject*)Kept.type, arguments, 2, by_reference)));
}

// What becomes of a save here: its handle; null without an error: it is Python's.
Ref saved(Hooks* h, PyObject* argument) {
  Parts& p = h->p;
  PyObject* kind = (PyObject*)Py_TYPE(argument);
  if (kind != THPVariableClass && kind != ParameterClass) return Ref();
  const at::Tensor& t = THPVariable_Unpack(argument);
  if (!is_plain(p, t) || !is_here(h)) return Ref();
  Ref base(t.is_view() ? need(THPVariable_Wrap(t._base())) : Py_NewRef(argument)), storage(need(THPStorage_Wrap(t.storage())));
  Ref id(need(PyLong_FromVoidPtr(storage.it))), claim;
  const Facts facts = facts_of(p, argument, base.it, storage.it, id.it, t);
  if (facts.is_unusual) return Ref();
  TriedLock lock(p);
  Step step;
  if (!lock.is_free() || !step.follows(p)) return Ref();
  note_operator(p);
  const bool moves = !facts.reason;
  long long since = FIXED_STORAGE;
  if (moves && !find_claim(p, step, storage.it, id.it, base.it, t, claim, since)) return Ref();
  if (step.hook > 0 && !save_agrees(p, step, kind, t, since)) return Ref();

  Ref shape, stride, probe, hook(new_number(step.hook)), epoch(Py_NewRef(field(p.registry, Registry.epoch)));
  Ref saved_at(need(PyTuple_Pack(2, epoch.it, hook.it)));
  if (moves) {
    shape.it = get(argument, n_shape).taken(), stride.it = numbers(t.strides()), probe.it = probe_of(argument, t, shape.it).taken();
    if (claim) {
      for (const auto at : {Storage.views, Storage.uses_left}) add_number(field(claim.it, Claim.saved), at, 1);
    } else {
      claim.it = new_claim(p, storage.it, bytes_of(probe.it, base.it, t, shape.it, stride.it).it, t).taken();
    }
  }
  add_to(p.counts, n_saves, 1);
  if (step.hook > 0) set_number(p.light, Light._number, p.operators), set_number(p.light, Light.num_hooks, step.hook + 1);
  if (!moves && is_at_rest(p, step)) {
    Ref handle(kept(p, argument, facts.reason, saved_at.it));
    lock.finish();
    return handle;
  }
  Ref over(finished(p)), made(Py_NewRef(moves ? field(claim.it, Claim.saved) : Py_None)), back;
  if (step.hook == 0) {  // which step it is
    call_method(p.director, n_on_save, argument, made.it, over.it);
    back.it = advance_as_told(p, over.it, moves).taken();
  } else {
    if (moves) {
      PyObject* last = field(made.it, Storage.last_save);
      set(last, LastSave.epoch, epoch.it), set(last, LastSave.hook, hook.it);
    }
    Ref due(locate(p, step));
    if (moves && since == NEW_STORAGE) note_first_save(p, step, made.it, hook.it, epoch.it);
    back.it = advance(p, step, due.it, over.it, moves).taken();
  }
  prefetch_planned(p, back.it);
  Ref handle(moves ? view_of(claim.it, probe.it, t, shape.it, stride.it, saved_at.it) : kept(p, argument, facts.reason, saved_at.it));
  lock.finish();
  return handle;
}
