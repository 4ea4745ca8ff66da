// Samples of calls for `tritonite.audit`: Python sees the arguments before a sampled call, and its results after.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/utils/pybind.h>

#include "record.h"

namespace {

struct Audit {
  Audit(py::object begin, uint64_t share, uint64_t seed) : begin(begin.release().ptr()), share(share), seed(seed) {}

  // The last call that holds an audit may end it in a thread without the GIL.
  ~Audit() {
    py::gil_scoped_acquire gil;
    Py_DECREF(begin);
  }

  // Whether to sample the next call: the hash of its number (splitmix64) is below a share of 2**64.
  bool samples() {
    uint64_t word = seed + 0x9E3779B97F4A7C15ull * (1 + calls.fetch_add(1, std::memory_order_relaxed));
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return (word ^ (word >> 31)) <= share;
  }

  // Takes an overload and all its arguments. Returns a function of the results, or None to leave the call alone.
  PyObject* begin;
  const uint64_t share, seed;
  std::atomic<uint64_t> calls{0};
};

// Whether there is an audit: calls read the pointer, which takes longer, only if there is.
std::atomic<bool> auditing{false};
// Whether this thread repeats a call for an audit, which no count includes.
thread_local bool repeats = false;

// Never freed, because an audit may run until the process ends, after Python has.
std::shared_ptr<Audit>& audit_in_force() {
  static auto* audit = new std::shared_ptr<Audit>();
  return *audit;
}

void set_audit(const py::object& begin, uint64_t share, uint64_t seed) {
  auto audit = begin.is_none() ? nullptr : std::make_shared<Audit>(begin, share, seed);
  auditing.store(audit != nullptr, std::memory_order_relaxed);
  std::atomic_store(&audit_in_force(), std::move(audit));
}

// Serves a call by `serve`, which returns whether a kernel ran, and shows a sampled call to the audit.
template <typename Serve>
void serve_audited(const State& state, Stack* stack, const Serve& serve) {
  const auto audit = std::atomic_load(&audit_in_force());
  const auto& schema = state.handle.schema();
  const size_t arguments = schema.arguments().size();
  const IValue* first = stack->data() + (stack->size() - arguments);
  bool sampled = audit && audit->samples();
  for (size_t i = 0; sampled && i < arguments; ++i) sampled = !is_invalid_enumeration(first[i], schema.arguments()[i]);
  if (!sampled) {
    serve();
    return;
  }
  PyObject* check = nullptr;
  {
    py::gil_scoped_acquire gil;
    py::list values;
    for (size_t i = 0; i < arguments; ++i) values.append(to_python(first[i], schema.arguments()[i]));
    const auto name = state.is_atens() ? state.name : state.space + "::" + state.name;
    check = py::handle(audit->begin)(name, values).release().ptr();
  }
  bool ran = false;
  try {
    ran = serve();
  } catch (...) {
    py::gil_scoped_acquire gil;
    Py_DECREF(check);
    throw;
  }
  py::gil_scoped_acquire gil;
  const auto function = py::reinterpret_steal<py::object>(check);
  if (!ran || function.is_none()) return;
  const size_t count = schema.returns().size();
  py::list results;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const IValue& result = (*stack)[i];
    results.append(result.isTensor() && !result.toTensor().defined() ? py::none() : torch::jit::toPyObject(result));
  }
  function(results);
}

}  // namespace
