// A graph's plan: the steps of many calls over one table of memory, as graph/plan.py describes them, and its execution.

#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "record.h"
#include "replay.h"

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
  // Bytes to clear, the advance of a draw, or the index of a drawn number.
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
  return graph;
}

// One execution of a graph.
struct Execution {
  const Graph& graph;
  Replay& replay;
  std::vector<at::Tensor>& inputs;
  // By buffer: the result of a call of Python that is no tensor.
  std::unordered_map<size_t, py::object> objects;

  void run(void (*serve)(State&, Stack*)) {
    replay.buffers.resize(graph.plan.buffers.size());
    allocate(0);
    for (const GraphStep& step : graph.steps) {
      switch (step.kind) {
        case GraphStep::kLaunch: replay.run_launch(step.step.launch); break;
        case GraphStep::kCopy: replay.copy(step.step); break;
        case GraphStep::kClear: replay.clear(step.step.to.source, step.count); break;
        case GraphStep::kDraw: {
          const auto drawn = draw_from(at::globalContext().defaultGenerator(graph.plan.device), step.count);
          replay.drawn.push_back(drawn.first);
          replay.drawn.push_back(drawn.second);
          break;
        }
        case GraphStep::kHold: {
          at::Tensor holder = at::detail::empty_cpu({}, c10::kLong);
          *holder.mutable_data_ptr<int64_t>() = static_cast<int64_t>(replay.drawn[step.count]);
          replay.buffers[step.buffers[0]] = holder;
          break;
        }
        case GraphStep::kBoxed: call(step, serve); break;
        case GraphStep::kPython: call_python(step); break;
        case GraphStep::kAllocate:
          for (const size_t number : step.buffers) allocate(number);
          break;
        case GraphStep::kFree:
          for (const size_t number : step.inputs) inputs[number] = at::Tensor();
          for (const size_t number : step.buffers) {
            replay.buffers[number] = at::Tensor();
            if (!objects.empty()) {
              py::gil_scoped_acquire gil;
              objects.erase(number);
            }
          }
          break;
      }
    }
  }

  void allocate(size_t number) {
    const Buffer& buffer = graph.plan.buffers[number];
    replay.buffers[number] =
        at::detail::empty_strided_generic(buffer.sizes, buffer.strides, buffer.allocator, buffer.keys, buffer.dtype);
    if (poison.load(std::memory_order_relaxed)) replay.fill(replay.buffers[number], 0xff);
  }

  at::Tensor tensor_of(const Argument& argument) const {
    return argument.kind == Argument::kView ? replay.viewed(argument.view) : replay.base(argument.view.source);
  }

  IValue value_of(const Argument& argument) const {
    if (argument.kind == Argument::kConstant) return argument.value;
    if (argument.kind < Argument::kList) return tensor_of(argument);
    // A list of tensors, or of optional ones.
    const auto element = argument.type->castRaw<c10::ListType>()->getElementType();
    if (element->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const Argument& item : argument.items) {
        if (item.kind == Argument::kConstant) list.push_back(std::nullopt);
        else list.push_back(tensor_of(item));
      }
      return list;
    }
    c10::List<at::Tensor> list;
    for (const Argument& item : argument.items) list.push_back(tensor_of(item));
    return list;
  }

  void call(const GraphStep& step, void (*serve)(State&, Stack*)) {
    Stack stack;
    stack.reserve(step.arguments.size());
    for (const Argument& argument : step.arguments) stack.push_back(value_of(argument));
    if (step.state) serve(*step.state, &stack);
    else step.handle->callBoxed(&stack);
    for (const CallResult& result : step.results) {
      // An operator with one result has no index for the result itself.
      const bool several = step.handle->schema().returns().size() > 1;
      const IValue& outer = several ? stack[result.path[0]] : stack[0];
      const size_t depth = several ? 1 : 0;
      replay.buffers[result.buffer] =
          result.path.size() > depth ? outer.toListRef()[result.path[depth]].toTensor() : outer.toTensor();
    }
  }

  py::object object_of(const Argument& argument) const {
    switch (argument.kind) {
      case Argument::kConstant: return argument.object;
      case Argument::kWhole: {
        const auto found = objects.find(argument.view.source.index);
        if (argument.view.source.buffer && found != objects.end()) return found->second;
        return py::cast(replay.base(argument.view.source));
      }
      case Argument::kView: return py::cast(replay.viewed(argument.view));
      default: break;
    }
    py::list list;
    for (const Argument& item : argument.items) list.append(object_of(item));
    return argument.kind == Argument::kTuple ? py::object(py::tuple(list)) : list;
  }

  void call_python(const GraphStep& step) {
    py::gil_scoped_acquire gil;
    py::list args;
    py::dict kwargs;
    for (const Argument& argument : step.arguments) args.append(object_of(argument));
    for (const auto& [name, argument] : step.named) kwargs[name.c_str()] = object_of(argument);
    const py::object returned = step.function(*args, **kwargs);
    for (const CallResult& result : step.results) {
      py::object found = returned;
      for (const size_t index : result.path) found = found[py::int_(index)];
      if (THPVariable_Check(found.ptr())) replay.buffers[result.buffer] = found.cast<at::Tensor>();
      else objects[result.buffer] = found;
    }
  }
};

// Runs a graph on its inputs and constants, and empties their list. Returns its outputs, or None if a kernel refuses the data.
py::object run_graph(const std::shared_ptr<Graph>& graph, const py::list& inputs, void (*serve)(State&, Stack*)) {
  std::vector<at::Tensor> tensors(inputs.size());
  Call call;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_tensor = THPVariable_Check(inputs[i].ptr());
    if (is_tensor) tensors[i] = THPVariable_Unpack(inputs[i].ptr());
    call.leaves.push_back({&tensors[i], is_tensor, is_tensor && graph->written[i]});
  }
  Replay replay{nullptr, graph->plan, call, {}, graph->numbers, {}, {}};
  Execution execution{*graph, replay, tensors, {}};
  // So that an input is freed after its last use.
  inputs.attr("clear")();
  {
    py::gil_scoped_release nobody;
    c10::OptionalDeviceGuard guard;
    if (!graph->plan.device.is_cpu()) guard.reset_device(graph->plan.device);
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      execution.run(serve);
    } catch (const Refused&) {
      py::gil_scoped_acquire gil;
      return py::none();
    }
  }
  py::list outputs;
  for (const Argument& result : graph->results) outputs.append(execution.object_of(result));
  return outputs;
}

// Returns all facts about a graph's inputs that the steps of its plan depend on, or None for an input that words cannot
// describe.
py::object graph_key(const py::list& inputs) {
  Words words;
  words.push_back(ambient());
  std::unordered_map<uintptr_t, size_t> first;
  for (size_t i = 0; i < inputs.size(); ++i) {
    PyObject* value = inputs[i].ptr();
    if (THPVariable_Check(value)) {
      const at::Tensor& tensor = THPVariable_Unpack(value);
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (impl->layout() != c10::kStrided || !impl->has_storage() || impl->has_symbolic_sizes_strides()) return py::none();
      const auto pointer = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
      const auto keys = impl->key_set();
      words.push_back(
          kTensor | static_cast<uint64_t>(tensor.scalar_type()) << 8 |
          static_cast<uint64_t>(tensor.device().type()) << 16 |
          static_cast<uint64_t>(tensor.device().index() & 0xff) << 24 |
          static_cast<uint64_t>((pointer & 15) != 0) << 32 |
          static_cast<uint64_t>(keys.has(c10::DispatchKey::Negative)) << 33 |
          static_cast<uint64_t>(keys.has(c10::DispatchKey::Conjugate)) << 34 | static_cast<uint64_t>(impl->dim()) << 40);
      for (const int64_t size : impl->sizes()) words.push_back(size);
      for (const int64_t stride : impl->strides()) words.push_back(stride);
      if (!pointer) continue;
      const auto shared = first.emplace(pointer, i);
      if (!shared.second) words.push_back(kUndefined | i << 8 | shared.first->second << 32);
    } else if (PyBool_Check(value)) {
      words.push_back(kBool | static_cast<uint64_t>(value == Py_True) << 8);
    } else if (PyLong_Check(value)) {
      words.push_back(kInt);
      words.push_back(py::cast<int64_t>(py::handle(value)));
    } else if (PyFloat_Check(value)) {
      words.push_back(kDouble);
      words.push_back(bits_of(PyFloat_AS_DOUBLE(value)));
    } else if (value == Py_None) {
      words.push_back(kNone);
    } else {
      return py::none();
    }
  }
  return py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(uint64_t));
}

}  // namespace
