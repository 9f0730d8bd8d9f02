#include <cstddef>
#include <stdexcept>
#include <string>

#include "metrics/counters.hpp"

namespace nb = nanobind;

namespace ssdkv {
namespace {

nb::object sequence(nb::handle values, const char* message) {
  nb::object found = nb::steal(PySequence_Fast(values.ptr(), message));
  if (!found.is_valid()) throw nb::python_error();
  return found;
}

nb::object item(const nb::object& values, Py_ssize_t i) {
  return nb::borrow(PySequence_Fast_GET_ITEM(values.ptr(), i));
}

}  // namespace

size_t Counters::place_of(nb::handle key) const {
  PyObject* place = PyDict_GetItemWithError(places_.ptr(), key.ptr());
  if (place != nullptr) return PyLong_AsSize_t(place);
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return kNowhere;
}

Counters::Counter& Counters::at(nb::handle key) {
  const size_t place = place_of(key);
  if (place != kNowhere) return counters_[place];
  places_[key] = counters_.size();
  counters_.push_back({nb::borrow(key)});
  return counters_.back();
}

void Counters::add(nb::handle keys, nb::handle values) {
  const nb::object names = sequence(keys, "keys must be a sequence");
  const nb::object numbers = sequence(values, "values must be a sequence");
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(names.ptr());
  if (count != PySequence_Fast_GET_SIZE(numbers.ptr())) {
    throw std::invalid_argument("keys and values differ in length");
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    const nb::object number = item(numbers, i);
    const double value = PyFloat_AsDouble(number.ptr());
    if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    const nb::object key = item(names, i);
    if (!(value >= 0.0)) {
      throw std::invalid_argument("cannot add " + std::string(nb::str(number).c_str()) +
                                  " to the counter " + nb::str(key).c_str());
    }
    at(key).gained += value;
  }
}

nb::dict Counters::take() {
  nb::dict gained;
  for (Counter& one : counters_) {
    if (one.gained == 0.0 && !one.untold) continue;
    gained[one.key] = one.gained;
    one.taken += one.gained;
    one.gained = 0.0;
    one.untold = false;
  }
  return gained;
}

double Counters::total(nb::handle key) const {
  const size_t place = place_of(key);
  return place == kNowhere ? 0.0 : counters_[place].taken + counters_[place].gained;
}

nb::dict Counters::totals() const {
  nb::dict all;
  for (const Counter& one : counters_) all[one.key] = one.taken + one.gained;
  return all;
}

void bind_counters(nb::module_& m) {
  nb::class_<Counters>(m, "Counters")
      .def(nb::init<>())
      .def("add", &Counters::add, nb::arg("keys"), nb::arg("values"))
      .def("take", &Counters::take)
      .def("total", &Counters::total, nb::arg("key"))
      .def("totals", &Counters::totals);
}

}  // namespace ssdkv
