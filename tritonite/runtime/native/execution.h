// The execution of a graph's plan, and the key of a graph's inputs.

#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "graph.h"

namespace {

// One execution of a graph.
struct Execution {
  const Graph& graph;
  Replay& replay;
  std::vector<at::Tensor>& inputs;
  LaunchArguments& arguments;
  // By buffer: the result of a call of Python that is no tensor.
  std::unordered_map<size_t, py::object> objects;

  void run(void (*serve)(State&, Stack*)) {
    replay.buffers.resize(graph.plan.buffers.size());
    allocate(0);
    for (const GraphStep& step : graph.steps) {
      switch (step.kind) {
        case GraphStep::kLaunch: launch(step); break;
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
        // A call may change the current stream.
        case GraphStep::kBoxed:
          call(step, serve);
          replay.known_stream.reset();
          break;
        case GraphStep::kPython:
          call_python(step);
          replay.known_stream.reset();
          break;
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
              replay.known_stream.reset();
            }
          }
          break;
      }
    }
  }

  void launch(const GraphStep& step) {
    const Launch& own = step.step.launch;
    if (own.function) replay.submit(own, graph.prepared.arguments_of(step.count, own, replay, arguments));
    else replay.launch_on_host(own);
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
  const Lease lease(graph->prepared);
  Execution execution{*graph, replay, tensors, lease.arguments(), {}};
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
