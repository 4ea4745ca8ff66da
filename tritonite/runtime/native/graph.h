// A graph's plan: the steps of many calls over one table of memory, as graph/plan.py describes them.

#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "prepared.h"
#include "record.h"

namespace {

// An argument of a call step: a constant, a buffer or an input, a view of one, or a sequence of arguments.
struct Argument {
  enum Kind { kConstant, kWhole, kView, kList, kTuple } kind = kConstant;
  // A constant of a boxed call, and of a call of Python.
  IValue value;
  py::object object;
  View view;
  std::vector<Argument> items;
  // For a boxed call: the type of the schema's argument.
  c10::TypePtr type;
};

// A fresh result of a call: the indices that lead to it, and its buffer.
struct CallResult {
  std::vector<size_t> path;
  size_t buffer = 0;
};

struct GraphStep {
  enum Kind { kLaunch, kCopy, kClear, kDraw, kHold, kBoxed, kPython, kAllocate, kFree } kind = kLaunch;
  Step step;
  // Bytes to clear, the advance of a draw, the index of a drawn number, or the number of a prepared launch.
  uint64_t count = 0;
  std::vector<size_t> buffers, inputs;
  // A call of an operator: its handle, and its state if it has a kernel of ours.
  std::optional<c10::OperatorHandle> handle;
  State* state = nullptr;
  py::object function;
  std::vector<Argument> arguments;
  std::vector<std::pair<std::string, Argument>> named;
  std::vector<CallResult> results;
};

struct Graph {
  // Has the device, the buffers, and whether each number is a float. Buffer 0 is the arena. A buffer without an
  // allocator is a step's result.
  Plan plan;
  c10::SmallVector<Number, 8> numbers;
  std::vector<GraphStep> steps;
  std::vector<Argument> results;
  // By input: whether a step writes it.
  std::vector<bool> written;
  Prepared prepared;

  ~Graph() {
    if (!Py_IsInitialized()) return;
    for (const GraphStep& step : steps) Py_XDECREF(step.step.launch.owner);
  }
};

Argument argument_of(const py::handle& described, const c10::TypePtr& type) {
  Argument argument;
  argument.type = type;
  const auto kind = py::type::of(described).attr("__name__").cast<std::string>();
  if (kind == "Source") {
    argument.kind = Argument::kWhole;
    argument.view.source = source_of(py::reinterpret_borrow<py::tuple>(described));
  } else if (kind == "View") {
    argument.kind = Argument::kView;
    argument.view = view_of_python(described);
  } else if (py::isinstance<py::list>(described) || py::isinstance<py::tuple>(described)) {
    argument.kind = py::isinstance<py::list>(described) ? Argument::kList : Argument::kTuple;
    for (const py::handle item : described) argument.items.push_back(argument_of(item, nullptr));
  }
  if (argument.kind == Argument::kConstant || (type && argument.kind >= Argument::kList)) {
    const auto is_fixed = [](const Argument& item) { return item.kind == Argument::kConstant; };
    if (!std::all_of(argument.items.begin(), argument.items.end(), is_fixed)) return argument;
    argument.kind = Argument::kConstant;
    if (type) argument.value = to_ivalue(described, type);
    else argument.object = py::reinterpret_borrow<py::object>(described);
  }
  return argument;
}

std::vector<CallResult> call_results_of(const py::handle& described) {
  std::vector<CallResult> results;
  for (const py::handle item : described) {
    const auto pair = item.cast<py::tuple>();
    results.push_back({pair[0].cast<std::vector<size_t>>(), pair[1].cast<size_t>()});
  }
  return results;
}

// Converts a step. A call is ("boxed", operator, whether it has a kernel of ours, values, results) or ("python",
// function, args, kwargs, results).
GraphStep graph_step_of(
    const py::handle& described, State* (*find)(const std::string&), const Driver* driver) {
  GraphStep step;
  const auto kind = py::type::of(described).attr("__name__").cast<std::string>();
  if (kind == "LaunchStep" || kind == "CopyStep") {
    step.kind = kind == "LaunchStep" ? GraphStep::kLaunch : GraphStep::kCopy;
    step.step = step_of(described, driver);
  } else if (kind == "ClearStep") {
    step.kind = GraphStep::kClear;
    step.step.to.source = source_of(described.attr("source"));
    step.count = described.attr("bytes").cast<uint64_t>();
  } else if (kind == "DrawStep") {
    step.kind = GraphStep::kDraw;
    step.count = described.attr("advance").cast<uint64_t>();
  } else if (kind == "HoldStep") {
    step.kind = GraphStep::kHold;
    step.buffers = {described.attr("buffer").cast<size_t>()};
    step.count = 2 * described.attr("draw").cast<uint64_t>() + described.attr("which").cast<uint64_t>();
  } else if (kind == "FreeStep") {
    step.kind = GraphStep::kFree;
    step.buffers = described.attr("buffers").cast<std::vector<size_t>>();
    step.inputs = described.attr("inputs").cast<std::vector<size_t>>();
  } else if (kind == "AllocateStep") {
    step.kind = GraphStep::kAllocate;
    step.buffers = described.attr("buffers").cast<std::vector<size_t>>();
  } else {
    const auto fields = described.cast<py::tuple>();
    if (fields[0].cast<std::string>() == "boxed") {
      step.kind = GraphStep::kBoxed;
      const auto name = fields[1].cast<std::string>();
      step.handle = handle_of(name);
      if (fields[2].cast<bool>()) step.state = find(name);
      size_t i = 0;
      for (const py::handle value : fields[3]) {
        step.arguments.push_back(argument_of(value, step.handle->schema().arguments()[i++].real_type()));
      }
    } else {
      step.kind = GraphStep::kPython;
      step.function = fields[1];
      for (const py::handle value : fields[2]) step.arguments.push_back(argument_of(value, nullptr));
      for (const auto& item : fields[3].cast<py::dict>()) {
        step.named.emplace_back(item.first.cast<std::string>(), argument_of(item.second, nullptr));
      }
    }
    step.results = call_results_of(fields[4]);
  }
  return step;
}

// Prepares the arguments of all launches of compiled kernels.
void prepare(Graph& graph) {
  Preparation preparation(graph.prepared, graph.plan, graph.numbers, graph.written);
  for (GraphStep& step : graph.steps) {
    switch (step.kind) {
      case GraphStep::kLaunch:
        if (step.step.launch.function) step.count = preparation.add(step.step.launch);
        else preparation.forget();
        break;
      case GraphStep::kAllocate:
      case GraphStep::kFree:
        for (const size_t number : step.buffers) preparation.forget(true, number);
        for (const size_t number : step.inputs) preparation.forget(false, number);
        break;
      case GraphStep::kDraw: break;
      // A call may move any memory, and what writes an input may move it once.
      default: preparation.forget();
    }
  }
  graph.prepared.give_back(graph.prepared.take());
}

std::shared_ptr<Graph> graph_of(const py::handle& described, State* (*find)(const std::string&)) {
  auto graph = std::make_shared<Graph>();
  graph->plan.device = reinterpret_cast<THPDevice*>(py::object(described.attr("device")).ptr())->device;
  graph->plan.driver = driver_of(graph->plan.device);
  for (const py::handle number : described.attr("numbers")) {
    const bool floating = PyFloat_Check(number.ptr());
    graph->plan.slots.push_back({0, -1, floating, false});
    if (floating) graph->numbers.push_back({true, true, 0, number.cast<double>()});
    else graph->numbers.push_back({false, true, number.cast<int64_t>(), 0});
  }
  for (const py::handle item : described.attr("buffers")) {
    graph->plan.buffers.push_back(item.is_none() ? Buffer() : buffer_of(item));
  }
  for (const py::handle item : described.attr("steps")) graph->steps.push_back(graph_step_of(item, find, graph->plan.driver));
  for (const py::handle item : described.attr("results")) graph->results.push_back(argument_of(item, nullptr));
  graph->written = described.attr("written").cast<std::vector<bool>>();
  prepare(*graph);
  return graph;
}

}  // namespace
