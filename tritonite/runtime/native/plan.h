// A plan: the steps of a recorded call, as plan.py describes them.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include "drivers.h"

namespace {

using c10::IValue;

// Origin of a pointer or a result: a tensor argument (lists flattened) or a buffer of the plan, and an offset in bytes.
struct Source {
  bool buffer = false;
  size_t index = 0;
  int64_t offset = 0;
};

struct Parameter {
  enum Kind { kPointer, kConstant, kSlot, kDrawn, kSize, kDescriptor } kind = kConstant;
  Source source;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  // Index of a slot, a drawn number, a data-dependent size, or a descriptor of the launch.
  size_t index = 0;
  uint64_t bits = 0;
};

// A number of a call. Not `known` if its type fits neither int64 nor double, as complex and uint64.
struct Number {
  bool floating = false, known = true;
  int64_t integer = 0;
  double real = 0;

  double as_real() const {
    return floating ? real : static_cast<double>(integer);
  }
};

// A number among the arguments that the plan does not hold, with the limits that a call has to keep (Limits of
// symbols.py). `item` is the index in a list of numbers, or -1.
struct Slot {
  size_t argument = 0;
  int64_t item = -1;
  bool floating = false;
  bool limited = false;
  int64_t low = 0, high = 0;
  double largest = 0;
  bool finite = false;
  double least = 0;

  bool holds(const Number& number) const {
    if (!limited) return true;
    if (number.as_real() < least) return false;
    if (number.floating) return std::abs(number.real) <= largest || !(finite || std::isfinite(number.real));
    return number.integer >= low && number.integer <= high;
  }
};

// A data-dependent extent of a tensor or a grid: ceil(sizes[size] / block) in a dimension.
struct DynamicExtent {
  size_t dimension = 0;
  size_t size = 0;
  int64_t block = 1;
};

struct Launch {
  void* function = nullptr;
  LaunchConfig config{};
  unsigned clusters = 1;
  std::vector<DynamicExtent> dynamic_grid;
  std::vector<LaunchAttribute> attributes;
  std::vector<Parameter> parameters;
  std::vector<TensorMap> descriptors;
  // Whether a parameter is a seed or an offset of a draw.
  bool draws = false;
  // The kept buffer that the launch fills, or -1.
  int64_t fills = -1;
  // The compiled kernel, which unloads `function` when it is destroyed. Without a function: the Python function that
  // runs the kernel in the interpreter, on tensors and numbers. Released under the GIL only.
  PyObject* owner = nullptr;
};

using Integers = c10::SmallVector<int64_t, 6>;

struct View {
  Source source;
  Integers sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

// A step of a replay: launch a kernel, set buffer `to` to 0, copy `from` to `to`, or wait for `count` sizes in `from`.
struct Step {
  enum Kind { kLaunch, kZero, kCopy, kRead } kind = kLaunch;
  Launch launch;
  View to, from;
  size_t count = 0;
};

// What a replay keeps for the next one: a buffer, the stream on which launches filled it, and their parameters.
struct Kept {
  std::mutex mutex;
  void* stream = nullptr;
  std::vector<uint64_t> parameters;
  at::Tensor tensor;
};

struct Buffer {
  Integers sizes, strides;
  std::vector<DynamicExtent> dynamic_sizes, dynamic_strides;
  // Number of data-dependent sizes that must have been read before the allocation.
  size_t sizes_needed = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Allocator* allocator = nullptr;
  c10::DispatchKeySet keys;
  // Set for a buffer that the next replay may use again. Plans are constant, what they keep is not.
  std::shared_ptr<Kept> kept;
};

struct Result {
  enum Kind { kAbsent, kWhole, kView, kSize, kDrawn, kValue, kList } kind = kAbsent;
  View view;
  std::vector<DynamicExtent> dynamic_sizes;
  // Index of a data-dependent size or of a drawn number.
  size_t index = 0;
  IValue value;
  std::vector<Result> items;
  c10::TypePtr type;
};

struct Plan {
  // Set if calls with this key go to ATen: the counter of the reason. The plan is then empty.
  std::atomic<uint64_t>* declined = nullptr;
  // If not "", the first call whose data a kernel refuses sends all later calls to ATen, for this reason.
  std::string lasting;
  c10::Device device = c10::kCPU;
  // Null if the kernels run on the host.
  const Driver* driver = nullptr;
  bool reads = false;
  std::vector<Slot> slots;
  // The advance of the generator for each draw.
  std::vector<uint64_t> draws;
  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<Result> results;

  ~Plan() {
    if (steps.empty() || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    for (const Step& step : steps) Py_XDECREF(step.launch.owner);
  }
};

}  // namespace
