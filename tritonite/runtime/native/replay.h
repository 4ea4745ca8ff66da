// The replay of a plan: allocations, launches, copies, results.

#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>

#include "key.h"

namespace {

at::Tensor view_of(
    const at::Tensor& base,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    int64_t offset,
    c10::ScalarType dtype) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(dtype));
  result.unsafeGetTensorImpl()->set_storage_offset(offset);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

// Returns the storage offset, in elements of `dtype`, of a source `offset` bytes after the first element of `base`.
int64_t element_offset(const at::Tensor& base, int64_t offset, c10::ScalarType dtype) {
  return (base.storage_offset() * static_cast<int64_t>(base.element_size()) + offset) /
      static_cast<int64_t>(c10::elementSize(dtype));
}

// Returns seed and offset for a draw and advances the generator. A CPU generator has no offset: each draw is a seed.
std::pair<uint64_t, uint64_t> draw_from(at::Generator generator, uint64_t advance) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (generator.device().is_cpu()) {
    return {generator.get<at::CPUGeneratorImpl>()->random64() & ~(uint64_t{1} << 63), 0};
  }
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + advance);
  return {generator.current_seed(), offset};
}

// Returns the bits of a number as a launch takes them.
uint64_t bits_of_number(const Number& number, const Slot& slot) {
  return slot.floating ? bits_of(number.as_real()) : static_cast<uint64_t>(number.integer);
}

// Thrown if ATen has to serve the call because of its data: a kernel's assertion has failed in the interpreter, or a
// size is negative (`refuse_if_negative` of contract.py).
struct Refused {};

struct Replay {
  // The operator, or null in a graph.
  const State* state;
  const Plan& plan;
  const Call& call;
  c10::SmallVector<at::Tensor, 4> buffers;
  c10::SmallVector<Number, 8> numbers;
  // The data-dependent sizes read so far.
  c10::SmallVector<int64_t, 2> sizes;
  // Seed and offset of each draw, in turn.
  c10::SmallVector<uint64_t, 2> drawn;
  // The current stream, from the first step that asks for it until a step that may change it.
  mutable std::optional<void*> known_stream = std::nullopt;

  const at::Tensor& base(const Source& source) const {
    return source.buffer ? buffers[source.index] : *call.leaves[source.index].tensor;
  }

  // Reads the call's numbers. Returns false if one is outside its limits.
  bool read_slots(const Stack& stack, size_t arguments) {
    const IValue* first = stack.data() + (stack.size() - arguments);
    for (const Slot& slot : plan.slots) {
      const IValue& given = first[slot.argument];
      const IValue& value = slot.item < 0 ? given : given.toListRef()[slot.item];
      const Number number = value.isTensor() ? number_of(value.toTensor()) : number_of(value.toScalar());
      if (!number.known || !slot.holds(number)) return false;
      numbers.push_back(number);
    }
    return true;
  }

  // Returns the reason to decline if a CUDA graph is captured, whose replays would repeat what was drawn or read.
  const char* capture_forbids() const {
    if ((plan.draws.empty() && !plan.reads) || !plan.driver) return nullptr;
    if (!plan.driver->is_capturing(plan.device.index())) return nullptr;
    return plan.reads ? "a data-dependent size while a CUDA graph is captured"
                      : "random numbers while a CUDA graph is captured";
  }

  // Makes all draws of the call, once. It is delayed until a launch needs one, so that a call that is refused before
  // leaves the generator as it was.
  void draw(const Stack& stack, size_t arguments) {
    if (drawn.size() == 2 * plan.draws.size()) return;
    at::Generator generator = at::globalContext().defaultGenerator(plan.device);
    for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
      if (stack[i].isGenerator()) generator = stack[i].toGenerator();
    }
    for (const uint64_t advance : plan.draws) {
      const auto state = draw_from(generator, advance);
      drawn.push_back(state.first);
      drawn.push_back(state.second);
    }
  }

  // Allocates the buffers whose sizes are known by now, except those that `fill_or_reuse` provides.
  void allocate() {
    buffers.resize(plan.buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
      if (buffers[i].defined() || buffer.kept || buffer.sizes_needed > sizes.size()) continue;
      if (buffer.sizes_needed == 0) {
        buffers[i] = at::detail::empty_strided_generic(
            buffer.sizes, buffer.strides, buffer.allocator, buffer.keys, buffer.dtype);
      } else {
        Integers own_sizes = buffer.sizes, own_strides = buffer.strides;
        for (const DynamicExtent& extent : buffer.dynamic_sizes) own_sizes[extent.dimension] = sizes[extent.size];
        for (const DynamicExtent& extent : buffer.dynamic_strides) own_strides[extent.dimension] = sizes[extent.size];
        // A negative size marks a call that ATen has to serve: `refuse_if_negative` of contract.py.
        if (std::any_of(own_sizes.begin(), own_sizes.end(), [](int64_t size) { return size < 0; })) throw Refused();
        buffers[i] =
            at::detail::empty_strided_generic(own_sizes, own_strides, buffer.allocator, buffer.keys, buffer.dtype);
      }
      if (poison.load(std::memory_order_relaxed)) fill(buffers[i], 0xff);
    }
  }

  void fill(const at::Tensor& tensor, unsigned char byte) const {
    void* data = tensor.mutable_data_ptr();
    const size_t bytes = tensor.storage().nbytes();
    // Some calls on a GPU allocate on the CPU too.
    if (!plan.driver || tensor.device().type() != plan.device.type()) std::memset(data, byte, bytes);
    else if (bytes) fill_on_device(data, byte, bytes);
  }

  // Sets bytes of the plan's device to 0.
  void clear(const Source& source, size_t bytes) const {
    void* data = reinterpret_cast<void*>(address(source));
    if (!plan.driver) std::memset(data, 0, bytes);
    else if (bytes) fill_on_device(data, 0, bytes);
  }

  void fill_on_device(void* data, unsigned char byte, size_t bytes) const {
    check("filling memory", plan.driver->fill(reinterpret_cast<uintptr_t>(data), byte, bytes, stream()));
  }

  void* stream() const {
    if (!known_stream) known_stream = plan.driver->stream(plan.device.index());
    return *known_stream;
  }

  void check(const char* step, int code) const {
    TORCH_CHECK(code == 0, failed(step), plan.driver->describe(code));
  }

  at::Tensor viewed(const View& view) const {
    const at::Tensor& from = base(view.source);
    return view_of(from, view.sizes, view.strides, element_offset(from, view.source.offset, view.dtype), view.dtype);
  }

  void copy(const Step& step) const {
    at::AutoDispatchBelowADInplaceOrView below;
    viewed(step.to).copy_(viewed(step.from));
  }

  // Waits for data-dependent sizes that kernels have written.
  void read(const Step& step) {
    const size_t known = sizes.size(), bytes = step.count * sizeof(int64_t);
    sizes.resize(known + step.count);
    if (!plan.driver) {
      std::memcpy(sizes.data() + known, reinterpret_cast<const void*>(address(step.from.source)), bytes);
      return;
    }
    void* own = stream();
    check("reading sizes", plan.driver->copy_to_host(sizes.data() + known, address(step.from.source), bytes, own));
    check("waiting for sizes", plan.driver->wait(own));
  }

  uintptr_t address(const Source& source) const {
    // Asking for a mutable pointer gives a lazily cloned tensor memory of its own.
    const bool written = !source.buffer && call.leaves[source.index].written;
    const void* data = written ? base(source).mutable_data_ptr() : base(source).const_data_ptr();
    return reinterpret_cast<uintptr_t>(data) + source.offset;
  }

  std::string failed(const char* step) const {
    const std::string what = state ? "the kernel of " + state->space + "::" + state->name : "a kernel of a graph";
    return std::string("tritonite: ") + step + (std::strcmp(step, "launching") ? " for " : " ") + what + " failed: ";
  }

  // Returns the bits of a parameter that is no tensor descriptor.
  uint64_t bits_of_parameter(const Parameter& parameter) const {
    switch (parameter.kind) {
      case Parameter::kPointer: return address(parameter.source);
      case Parameter::kSlot: return bits_of_number(numbers[parameter.index], plan.slots[parameter.index]);
      case Parameter::kDrawn: return drawn[parameter.index];
      case Parameter::kSize: return sizes[parameter.index];
      default: return parameter.bits;
    }
  }

  // Provides the kept buffer that steps from `first` on fill: the last replay's if the steps would write the same on
  // the same stream, else a new one. While a CUDA graph is captured nothing is kept, because the graph's replays need
  // the buffer to stay as it is.
  void fill_or_reuse(size_t first) {
    const auto number = static_cast<size_t>(plan.steps[first].launch.fills);
    const Buffer& buffer = plan.buffers[number];
    std::vector<uint64_t> parameters;
    size_t last = first;
    for (; last < plan.steps.size() && plan.steps[last].launch.fills == plan.steps[first].launch.fills; ++last) {
      for (const Parameter& parameter : plan.steps[last].launch.parameters) {
        const bool own = parameter.kind == Parameter::kPointer && parameter.source.buffer && parameter.source.index == number;
        parameters.push_back(own ? 0 : bits_of_parameter(parameter));
      }
    }
    void* stream = plan.driver ? this->stream() : nullptr;
    const bool keeps = !plan.driver || !plan.driver->is_capturing(plan.device.index());
    if (keeps) {
      std::lock_guard<std::mutex> lock(buffer.kept->mutex);
      if (buffer.kept->tensor.defined() && buffer.kept->stream == stream && buffer.kept->parameters == parameters) {
        buffers[number] = buffer.kept->tensor;
        return;
      }
    }
    buffers[number] =
        at::detail::empty_strided_generic(buffer.sizes, buffer.strides, buffer.allocator, buffer.keys, buffer.dtype);
    if (poison.load(std::memory_order_relaxed)) fill(buffers[number], 0xff);
    for (size_t i = first; i < last; ++i) run_launch(plan.steps[i].launch);
    if (!keeps) return;
    at::Tensor replaced = buffers[number];
    {
      std::lock_guard<std::mutex> lock(buffer.kept->mutex);
      buffer.kept->stream = stream;
      buffer.kept->parameters.swap(parameters);
      std::swap(buffer.kept->tensor, replaced);
    }
  }

  void run_launch(const Launch& own) const {
    if (own.function) launch(own);
    else launch_on_host(own);
  }

  void launch(const Launch& launch) const {
    c10::SmallVector<uint64_t, 48> values;
    c10::SmallVector<void*, 48> pointers;
    std::vector<TensorMap> descriptors = launch.descriptors;
    values.resize(launch.parameters.size());
    pointers.resize(launch.parameters.size());
    for (size_t i = 0; i < launch.parameters.size(); ++i) {
      const Parameter& parameter = launch.parameters[i];
      pointers[i] = &values[i];
      if (parameter.kind != Parameter::kDescriptor) {
        values[i] = bits_of_parameter(parameter);
        continue;
      }
      TensorMap& map = descriptors[parameter.index];
      pointers[i] = &map;
      replace_address(map, address(parameter.source));
    }
    submit(launch, pointers.data());
  }

  void replace_address(TensorMap& map, uintptr_t address) const {
    check("addressing", plan.driver->replace_address(&map, reinterpret_cast<void*>(address)));
  }

  // Launches a compiled kernel with pointers to the values of its parameters, unless the grid is empty.
  void submit(const Launch& launch, void** arguments) const {
    LaunchConfig config = config_of(launch);
    if (config.grid[0] == 0 || config.grid[1] == 0 || config.grid[2] == 0) return;
    config.attributes = const_cast<LaunchAttribute*>(launch.attributes.data());
    config.attribute_count = launch.attributes.size();
    config.stream = stream();
    check("launching", plan.driver->launch(config, launch.function, arguments, plan.device.index()));
  }

  LaunchConfig config_of(const Launch& launch) const {
    LaunchConfig config = launch.config;
    for (const DynamicExtent& extent : launch.dynamic_grid) {
      const int64_t blocks = (sizes[extent.size] + extent.block - 1) / extent.block;
      config.grid[extent.dimension] = static_cast<unsigned>(blocks) * (extent.dimension == 0 ? launch.clusters : 1);
    }
    return config;
  }

  void launch_on_host(const Launch& launch) const {
    py::gil_scoped_acquire gil;
    py::list values;
    for (const Parameter& parameter : launch.parameters) {
      if (parameter.kind == Parameter::kPointer) {
        const at::Tensor& from = base(parameter.source);
        const int64_t offset = element_offset(from, parameter.source.offset, parameter.dtype);
        const int64_t size = from.storage().nbytes() != 0;
        values.append(py::cast(view_of(from, {size}, {1}, offset, parameter.dtype)));
      } else if (parameter.kind == Parameter::kSlot) {
        const Number& number = numbers[parameter.index];
        if (plan.slots[parameter.index].floating) values.append(py::float_(number.as_real()));
        else values.append(py::int_(number.integer));
      } else if (parameter.kind == Parameter::kDrawn) {
        values.append(py::int_(drawn[parameter.index]));
      } else if (parameter.kind == Parameter::kSize) {
        values.append(py::int_(sizes[parameter.index]));
      }
    }
    const LaunchConfig config = config_of(launch);
    if (config.grid[0] == 0 || config.grid[1] == 0 || config.grid[2] == 0) return;
    static PyObject* const decline =
        py::object(py::module_::import("tritonite.errors").attr("Decline")).release().ptr();
    try {
      py::handle(launch.owner)(values, py::make_tuple(config.grid[0], config.grid[1], config.grid[2]));
    } catch (py::error_already_set& error) {
      if (error.matches(decline)) throw Refused();
      TORCH_CHECK(!error.matches(PyExc_Exception), failed("launching"), error.what());
      throw;
    }
  }

  void run(Stack* stack, size_t arguments) {
    c10::OptionalDeviceGuard guard;
    if (!plan.device.is_cpu()) guard.reset_device(plan.device);
    allocate();
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const Step& step = plan.steps[i];
      switch (step.kind) {
        case Step::kLaunch:
          if (step.launch.draws) draw(*stack, arguments);
          if (step.launch.fills < 0) run_launch(step.launch);
          else if (!buffers[step.launch.fills].defined()) fill_or_reuse(i);
          break;
        case Step::kZero: fill(base(step.to.source), 0); break;
        case Step::kCopy: copy(step); break;
        case Step::kRead:
          read(step);
          allocate();
          break;
      }
    }
    draw(*stack, arguments);
    c10::SmallVector<IValue, 4> results;
    for (const Result& result : plan.results) results.push_back(returned(result));
    torch::jit::drop(*stack, arguments);
    for (IValue& result : results) stack->push_back(std::move(result));
  }

  IValue returned(const Result& result) const {
    switch (result.kind) {
      case Result::kAbsent: return result.type->kind() == c10::TypeKind::TensorType ? IValue(at::Tensor()) : IValue();
      case Result::kWhole: return base(result.view.source);
      case Result::kView: {
        if (result.dynamic_sizes.empty()) return viewed(result.view);
        View view = result.view;
        for (const DynamicExtent& extent : result.dynamic_sizes) view.sizes[extent.dimension] = sizes[extent.size];
        return viewed(view);
      }
      case Result::kValue: return result.value;
      case Result::kSize:
        if (result.type->kind() == c10::TypeKind::BoolType) return sizes[result.index] != 0;
        return sizes[result.index];
      case Result::kDrawn: {
        at::Tensor holder = at::detail::empty_cpu({}, c10::kLong);
        *holder.mutable_data_ptr<int64_t>() = static_cast<int64_t>(drawn[result.index]);
        return holder;
      }
      case Result::kList: break;
    }
    c10::List<at::Tensor> tensors;
    tensors.reserve(result.items.size());
    for (const Result& item : result.items) tensors.push_back(returned(item).toTensor());
    return tensors;
  }
};

}  // namespace
