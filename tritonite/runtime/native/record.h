// A call without a plan: runs the host function in Python, and converts the plan that Python returns.

#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "cache.h"

namespace {

c10::TypeKind kind_of(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind();
}

// Whether an argument is an int that is not a valid dtype, layout or memory format.
bool is_invalid_enumeration(const IValue& value, const c10::Argument& argument) {
  if (!value.isInt()) return false;
  int64_t count = 0;
  switch (kind_of(argument)) {
    case c10::TypeKind::ScalarTypeType: count = static_cast<int64_t>(at::ScalarType::Undefined); break;
    case c10::TypeKind::LayoutType: count = static_cast<int64_t>(at::Layout::NumOptions); break;
    case c10::TypeKind::MemoryFormatType: count = static_cast<int64_t>(at::MemoryFormat::NumOptions); break;
    default: return false;
  }
  return value.toInt() < 0 || value.toInt() >= count;
}

// Returns a layout as a Python object. PyTorch's own conversion does not work before 2.13.
py::object python_of(at::Layout layout) {
  const char* name = layout == at::kStrided     ? "strided"
                     : layout == at::kSparse    ? "sparse_coo"
                     : layout == at::kSparseCsr ? "sparse_csr"
                     : layout == at::kSparseCsc ? "sparse_csc"
                     : layout == at::kSparseBsr ? "sparse_bsr"
                     : layout == at::kSparseBsc ? "sparse_bsc"
                     : layout == at::kMkldnn    ? "_mkldnn"
                                                : "jagged";
  return py::module_::import("torch").attr(name);
}

// Converts an argument as PyTorch does for a Python kernel. Dtypes, layouts and memory formats are ints on the stack.
py::object to_python(const IValue& value, const c10::Argument& argument) {
  if (value.isInt()) {
    switch (kind_of(argument)) {
      case c10::TypeKind::ScalarTypeType: return py::cast(static_cast<at::ScalarType>(value.toInt()));
      case c10::TypeKind::LayoutType: return python_of(static_cast<at::Layout>(value.toInt()));
      case c10::TypeKind::MemoryFormatType: return py::cast(static_cast<at::MemoryFormat>(value.toInt()));
      default: break;
    }
  }
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    return torch::jit::toPyObject(value.toTensor().item());
  }
  if (value.isTensor() && !value.toTensor().defined()) return py::none();
  return torch::jit::toPyObject(value);
}

// Converts an argument from Python as PyTorch's dispatcher does: a number for a tensor becomes a wrapped number.
IValue to_ivalue(const py::handle& value, const c10::TypePtr& type) {
  const bool number = PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr()) || PyComplex_Check(value.ptr());
  if (number && type->kind() == c10::TypeKind::TensorType) {
    at::Tensor wrapped = at::scalar_to_tensor(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
    wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
    return wrapped;
  }
  return torch::jit::toIValue(value, type);
}

// Returns the handle of an overload, whose name starts with the namespace unless that is aten.
c10::OperatorHandle handle_of(const std::string& name) {
  const size_t colons = name.find("::");
  const std::string space = colons == std::string::npos ? "aten" : name.substr(0, colons);
  const std::string own = colons == std::string::npos ? name : name.substr(colons + 2);
  const size_t dot = own.find('.');
  const std::string overload = dot == std::string::npos ? "" : own.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow((space + "::" + own.substr(0, dot)).c_str(), overload.c_str());
}

Integers integers(const py::handle& values) {
  Integers result;
  for (const py::handle value : values) result.push_back(value.cast<int64_t>());
  return result;
}

c10::ScalarType dtype_of(const py::handle& dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

// The converters below take the objects that plan.py describes.

Source source_of(const py::tuple& described) {
  return {described[0].cast<bool>(), described[1].cast<size_t>(), described[2].cast<int64_t>()};
}

Parameter parameter_of(const py::handle& described, Launch& launch, const Driver* driver) {
  Parameter parameter;
  if (PyLong_Check(described.ptr())) {
    parameter.bits = described.cast<uint64_t>();
    return parameter;
  }
  const auto items = py::reinterpret_borrow<py::tuple>(described);
  if (py::isinstance<py::str>(items[0])) {
    const auto kind = items[0].cast<std::string>();
    parameter.index = items[1].cast<size_t>();
    parameter.kind = kind == "slot" ? Parameter::kSlot : kind == "size" ? Parameter::kSize : Parameter::kDrawn;
    if (parameter.kind == Parameter::kDrawn) parameter.index = 2 * parameter.index + items[2].cast<size_t>();
    return parameter;
  }
  parameter.source = source_of(items);
  const py::object dtype_or_map = items[3];
  if (PyBytes_Check(dtype_or_map.ptr())) {
    const auto bytes = dtype_or_map.cast<std::string>();
    TORCH_CHECK(
        bytes.size() == sizeof(TensorMap) && driver && driver->replace_address,
        "tritonite: a tensor descriptor of ", std::to_string(bytes.size()), " bytes, which this driver does not support");
    parameter.kind = Parameter::kDescriptor;
    parameter.index = launch.descriptors.size();
    std::memcpy(launch.descriptors.emplace_back().bytes, bytes.data(), bytes.size());
    return parameter;
  }
  parameter.kind = Parameter::kPointer;
  parameter.dtype = dtype_of(dtype_or_map);
  return parameter;
}

Launch launch_of(const py::handle& described, const Driver* driver) {
  Launch launch;
  const py::object function = described.attr("function");
  if (!function.is_none()) launch.function = reinterpret_cast<void*>(function.cast<uintptr_t>());
  const py::tuple grid = described.attr("grid");
  const auto threads = described.attr("threads").cast<unsigned>();
  const auto clusters = launch.clusters = described.attr("clusters").cast<unsigned>();
  for (size_t i = 0; i < 3; ++i) {
    if (py::isinstance<py::tuple>(grid[i])) {
      const py::tuple blocks = grid[i];
      launch.dynamic_grid.push_back({i, blocks[0].cast<size_t>(), blocks[1].cast<int64_t>()});
    } else {
      launch.config.grid[i] = grid[i].cast<unsigned>() * (i == 0 ? clusters : 1);
    }
    launch.config.block[i] = i == 0 ? threads : 1;
  }
  launch.config.shared = described.attr("shared").cast<unsigned>();
  const auto attribute = [&](int id, std::initializer_list<unsigned> words) {
    LaunchAttribute added{};
    added.id = id;
    std::copy(words.begin(), words.end(), added.value);
    launch.attributes.push_back(added);
  };
  if (described.attr("programmatic").cast<bool>()) attribute(kProgrammaticSerialization, {1});
  if (described.attr("cooperative").cast<bool>()) attribute(kCooperative, {1});
  if (clusters != 1) {
    attribute(kCluster, {clusters, 1, 1});
    attribute(kClusterScheduling, {1});
  }
  for (const py::handle item : described.attr("parameters")) {
    launch.parameters.push_back(parameter_of(item, launch, driver));
    launch.draws |= launch.parameters.back().kind == Parameter::kDrawn;
  }
  launch.owner = py::object(described.attr("owner")).release().ptr();
  launch.fills = described.attr("fills").cast<int64_t>();
  return launch;
}

View view_of_python(const py::handle& described) {
  return {
      source_of(described.attr("source")), integers(described.attr("sizes")), integers(described.attr("strides")),
      dtype_of(described.attr("dtype"))};
}

Step step_of(const py::handle& described, const Driver* driver) {
  const auto kind = py::type::of(described).attr("__name__").cast<std::string>();
  Step step;
  if (kind == "LaunchStep") {
    step.launch = launch_of(described, driver);
  } else if (kind == "ZeroStep") {
    step.kind = Step::kZero;
    step.to.source = {true, described.attr("buffer").cast<size_t>(), 0};
  } else if (kind == "CopyStep") {
    step.kind = Step::kCopy;
    step.to = view_of_python(described.attr("destination"));
    step.from = view_of_python(described.attr("source"));
  } else {
    step.kind = Step::kRead;
    step.from.source = source_of(described.attr("source"));
    step.count = described.attr("numbers").cast<size_t>();
  }
  return step;
}

// Splits sizes or strides into `fixed` ones, 0 for those that are data-dependent, and the `dynamic` ones.
void read_extents(
    const py::handle& described, Integers& fixed, std::vector<DynamicExtent>& dynamic, size_t& sizes_needed) {
  fixed.clear();
  for (const py::handle extent : described) {
    if (!py::isinstance<py::tuple>(extent)) {
      fixed.push_back(extent.cast<int64_t>());
      continue;
    }
    const auto size = extent.cast<py::tuple>()[0].cast<size_t>();
    dynamic.push_back({fixed.size(), size, 1});
    fixed.push_back(0);
    sizes_needed = std::max(sizes_needed, size + 1);
  }
}

Buffer buffer_of(const py::handle& described) {
  const auto like = described.attr("like").cast<at::Tensor>();
  Buffer buffer;
  buffer.sizes.assign(like.sizes().begin(), like.sizes().end());
  buffer.strides.assign(like.strides().begin(), like.strides().end());
  const py::object sizes = described.attr("sizes");
  if (!sizes.is_none()) {
    read_extents(sizes, buffer.sizes, buffer.dynamic_sizes, buffer.sizes_needed);
    read_extents(described.attr("strides"), buffer.strides, buffer.dynamic_strides, buffer.sizes_needed);
  }
  if (described.attr("kept").cast<bool>()) buffer.kept = std::make_shared<Kept>();
  buffer.dtype = like.scalar_type();
  buffer.allocator = like.storage().allocator();
  TORCH_CHECK(buffer.allocator, "tritonite: a tensor without an allocator cannot be a buffer of a plan");
  buffer.keys = c10::DispatchKeySet(c10::computeDispatchKey(buffer.dtype, c10::kStrided, like.device()));
  return buffer;
}

Result result_of(const py::handle& described, const c10::TypePtr& type) {
  Result result;
  result.type = type;
  if (described.is_none()) return result;
  const auto fields = described.cast<py::tuple>();
  if (py::isinstance<py::str>(fields[0])) {
    const auto kind = fields[0].cast<std::string>();
    if (kind == "list") {
      result.kind = Result::kList;
      for (const py::handle item : fields[1]) result.items.push_back(result_of(item, c10::TensorType::get()));
    } else if (kind == "size") {
      result.kind = Result::kSize;
      result.index = fields[1].cast<size_t>();
    } else if (kind == "drawn") {
      result.kind = Result::kDrawn;
      result.index = 2 * fields[1].cast<size_t>() + fields[2].cast<size_t>();
    } else {
      result.kind = Result::kValue;
      result.value = torch::jit::toIValue(fields[1], type);
    }
    return result;
  }
  result.kind = py::object(fields[1]).is_none() ? Result::kWhole : Result::kView;
  result.view.source = source_of(fields[0]);
  if (result.kind == Result::kView) {
    const auto layout = fields[1].cast<py::tuple>();
    size_t sizes_needed = 0;
    read_extents(layout[0], result.view.sizes, result.dynamic_sizes, sizes_needed);
    result.view.strides = integers(layout[1]);
    result.view.dtype = dtype_of(layout[2]);
  }
  return result;
}

// Keeps a decline under the key of a call: later calls with the key go to ATen and are counted.
void keep_decline(State& state, const Call& call, std::atomic<uint64_t>* counter) {
  auto plan = std::make_shared<Plan>();
  plan->declined = counter;
  insert(state, call, plan);
}

std::shared_ptr<const Plan> plan_of(const py::handle& described, const c10::FunctionSchema& schema) {
  auto plan = std::make_shared<Plan>();
  plan->device = reinterpret_cast<THPDevice*>(py::object(described.attr("device")).ptr())->device;
  plan->driver = driver_of(plan->device);
  plan->lasting = described.attr("lasting").cast<std::string>();
  for (const py::handle item : described.attr("slots")) {
    const py::object limits = item.attr("limits");
    Slot slot{
        item.attr("argument").cast<size_t>(), item.attr("item").cast<int64_t>(), item.attr("floating").cast<bool>(),
        !limits.is_none()};
    if (slot.limited) {
      slot.low = limits.attr("low").cast<int64_t>();
      slot.high = limits.attr("high").cast<int64_t>();
      slot.largest = limits.attr("largest").cast<double>();
      slot.finite = limits.attr("finite").cast<bool>();
      slot.least = limits.attr("least").cast<double>();
    }
    plan->slots.push_back(slot);
  }
  for (const py::handle item : described.attr("draws")) plan->draws.push_back(item.cast<uint64_t>());
  for (const py::handle item : described.attr("buffers")) plan->buffers.push_back(buffer_of(item));
  for (const py::handle item : described.attr("steps")) {
    plan->steps.push_back(step_of(item, plan->driver));
    plan->reads |= plan->steps.back().kind == Step::kRead;
  }
  size_t i = 0;
  for (const py::handle item : described.attr("results")) {
    plan->results.push_back(result_of(item, schema.returns()[i++].real_type()));
  }
  return plan;
}

// A range in a profile, within the range of ATen's operator.
class ProfiledRange {
 public:
  explicit ProfiledRange(const State& state) {
    if (!state.is_atens()) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
      range.emplace(std::move(*callbacks));
      range->before(state.label.c_str());
    }
  }

 private:
  std::optional<at::RecordFunction> range;
};

// Counts a declined call. If the call is `keyed`, later calls with its key are declined at once.
void decline(State& state, const Call& call, bool keyed, const std::string& reason) {
  auto* counter = reason_counter(state, reason);
  counter->fetch_add(1, std::memory_order_relaxed);
  if (keyed) keep_decline(state, call, counter);
}

// Runs the operator's host function under the recorder. Returns false if ATen has to serve the call. The plan or the
// decline is kept only if the call is `keyed`.
bool record(State& state, const Call& call, bool keyed, Stack* stack, size_t arguments) {
  const auto& schema = state.handle.schema();
  const IValue* first = stack->data() + (stack->size() - arguments);
  for (size_t i = 0; i < arguments; ++i) {
    if (!is_invalid_enumeration(first[i], schema.arguments()[i])) continue;
    // The number as a string: see `driver_in`.
    TORCH_CHECK(
        state.kernel, state.label, ": ", schema.arguments()[i].name(), " is ", std::to_string(first[i].toInt()),
        ", which is not a dtype, layout or memory format");
    decline(state, call, keyed, "an integer that names no dtype, layout or memory format");
    return false;
  }
  py::gil_scoped_acquire gil;
  py::list values;
  for (size_t i = 0; i < arguments; ++i) values.append(to_python(first[i], schema.arguments()[i]));
  const auto outcome = [&] {
    const ProfiledRange range(state);
    return py::handle(state.record)(values, call.settings).cast<py::tuple>();
  }();
  const auto kind = outcome[0].cast<std::string>();
  if (kind == "declined") {
    decline(state, call, keyed && outcome[2].cast<bool>(), outcome[1].cast<std::string>());
    return false;
  }
  if (keyed && !outcome[2].is_none()) insert(state, call, plan_of(outcome[2], schema));
  const auto& returns = schema.returns();
  const auto results = outcome[1].cast<py::tuple>();
  std::vector<IValue> converted;
  for (size_t i = 0; i < returns.size(); ++i) {
    converted.push_back(torch::jit::toIValue(results[i], returns[i].real_type()));
  }
  torch::jit::drop(*stack, arguments);
  for (IValue& result : converted) stack->push_back(std::move(result));
  return true;
}

}  // namespace
