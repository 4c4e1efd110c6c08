// What the C++ loop has of saved tensors: a handle for each, which autograd holds, and a slot for each storage that moves.
#pragma once

#include "device_memory.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

namespace {

enum State { ON_DEVICE, LEAVING, ON_HOST, ARRIVING, RESTORED };  // as in swap/host_copy.py

// A node is held by one or the other, by torch's version.
template <typename T, typename None>
c10::weak_intrusive_ptr<T, None> weakly(const c10::intrusive_ptr<T, None>& it) { return c10::weak_intrusive_ptr<T, None>(it); }
template <typename T>
std::weak_ptr<T> weakly(const std::shared_ptr<T>& it) { return it; }
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Loop;
struct Slot;

// A saved tensor, with what `SavedBytes` and `Origin` in swap/handles.py have of it.
struct Save {
  PyObject* handle;
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
};

struct Handle {  // what autograd holds, in a capsule: with the others of its slot, the slot's only owner
  std::optional<Save> save;                    // none: it was given back
  pybind11::object python = pybind11::none();  // Python's handle, once it was
};
Handle* handle_of(PyObject* capsule) { return static_cast<Handle*>(PyCapsule_GetPointer(capsule, nullptr)); }

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

}  // namespace
