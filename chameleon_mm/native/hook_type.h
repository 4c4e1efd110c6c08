// The Python type of a pair of hooks: an object that holds what they work with, and has them as its methods `save` and `use`.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <torch/csrc/python_headers.h>

namespace python_objects {

// `Hooks` begins with PyObject_HEAD; its `each(visit)` calls `visit` with a reference to each pointer to an object that it holds.
template <typename Hooks>
struct HookType {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    int stop = 0;
    ((Hooks*)self)->each([&](PyObject*& part) {
      if (part && !stop) stop = visit(part, arg);
    });
    return stop;
  }

  static int clear(PyObject* self) {
    ((Hooks*)self)->each([](PyObject*& part) { Py_CLEAR(part); });
    return 0;
  }

  static void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
  }

  static PyObject* make(const char* name, PyCFunction save, PyCFunction use) {
    static PyMethodDef methods[] = {
        {"save", save, METH_O, "on_save: as that of executor/autograd_hooks.py."},
        {"use", use, METH_O, "on_use: as that of executor/autograd_hooks.py."},
        {nullptr, nullptr, 0, nullptr}};
    PyType_Slot slots[] = {
        {Py_tp_traverse, (void*)traverse},
        {Py_tp_clear, (void*)clear},
        {Py_tp_dealloc, (void*)dealloc},
        {Py_tp_methods, methods},
        {0, nullptr}};
    constexpr unsigned flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    PyType_Spec spec = {name, sizeof(Hooks), 0, flags, slots};
    return PyType_FromSpec(&spec);
  }
};

}  // namespace python_objects
