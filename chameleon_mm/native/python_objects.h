// References to Python objects, and their attributes as numbers and truth values, for what has a Python function to fall back to.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/python_headers.h>

#include <structmember.h>

namespace python_objects {

struct Ref {  // one owned reference, possibly null
  PyObject* it = nullptr;
  Ref() = default;
  explicit Ref(PyObject* owned) : it(owned) {}
  Ref(const Ref&) = delete;
  Ref(Ref&& other) noexcept : it(other.it) { other.it = nullptr; }
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(it); }
  explicit operator bool() const { return it != nullptr; }
  PyObject* taken() {  // the reference, which is the caller's from then on
    PyObject* out = it;
    it = nullptr;
    return out;
  }
};

// Forget an error that the Python function will meet again. Not an interrupt, which comes once: whoever finds it set returns null.
inline void forget_error() {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

inline bool to_number(PyObject* number, long long& value) {
  if (!PyLong_CheckExact(number)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(number, &overflow);
  return !overflow;
}

// An attribute as a number. False: it is none.
// Whether a container has something that waits: an error counts as that, and leaves the hook to Python.
inline bool some_in(PyObject* container) {
  int truth = PyObject_IsTrue(container);
  if (truth < 0) forget_error();
  return truth != 0;
}

inline PyObject*& slot(PyObject* handle, Py_ssize_t at) { return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(handle) + at); }

// Where in an object of a class one of its slots is. False, with an error set: the class has none of that name.
inline bool slot_offset(PyObject* type, const char* name, Py_ssize_t& at) {
  Ref descriptor(PyObject_GetAttrString(type, name));
  if (!descriptor) return false;
  if (Py_TYPE(descriptor.it) != &PyMemberDescr_Type) {
    PyErr_Format(PyExc_TypeError, "native hooks: expected a slot named %s, got %R", name, descriptor.it);
    return false;
  }
  at = ((PyMemberDescrObject*)descriptor.it)->d_member->offset;
  return true;
}

inline bool equals(PyObject* number, long long value) {
  long long it = 0;
  return to_number(number, it) && it == value;
}

}  // namespace python_objects
