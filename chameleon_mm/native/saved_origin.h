// What `Origin(t)` of saved/version.py notes of a tensor, written into an object of that class.
#pragma once

#include "python_objects.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

namespace python_objects {

struct OriginSlots {  // offsets
  Py_ssize_t ref, name, node_number, output_nr;
};

// `argument` is `t` in Python, whose node is `node` or null. False, with an error set: an object could not be made.
inline bool note_origin(
    PyObject* origin, const OriginSlots& at, PyObject* argument, const at::Tensor& t, const torch::autograd::Node* node) {
  const std::string text = node ? node->name() : "";
  Ref ref(PyWeakref_NewRef(argument, nullptr)), name(PyUnicode_FromStringAndSize(text.data(), (Py_ssize_t)text.size()));
  Ref number(node ? PyLong_FromUnsignedLongLong(node->sequence_nr()) : PyLong_FromLong(-1));
  Ref output_nr(PyLong_FromLongLong(t.output_nr()));
  if (!ref || !name || !number || !output_nr) return false;
  slot(origin, at.ref) = ref.taken();
  slot(origin, at.name) = name.taken();
  slot(origin, at.node_number) = number.taken();
  slot(origin, at.output_nr) = output_nr.taken();
  return true;
}

}  // namespace python_objects
