// What a recorded call does, as plan.py has described it.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/pybind.h>

#include "driver.h"

namespace {

namespace py = pybind11;
using c10::IValue;

// Where a pointer or a result comes from: a tensor argument, counted over lists, or a buffer that the plan allocates.
struct Source {
  bool buffer = false;
  size_t index = 0;
  int64_t offset = 0;
};

struct Parameter {
  enum Kind { kPointer, kConstant, kSlot, kDrawn, kSize, kDescriptor } kind = kConstant;
  Source source;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  // Of a slot, of a drawn number, of a size read from data, or of a descriptor among the launch's.
  size_t index = 0;
  uint64_t bits = 0;
};

struct Number {
  bool floating = false, known = true;
  int64_t integer = 0;
  double real = 0;

  double as_real() const {
    return floating ? real : static_cast<double>(integer);
  }
};

// A number among the arguments that plans do not hold; `item` is its place in a list of numbers, or -1.
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

// An extent that data decides: of a grid as many as a size has blocks, of a tensor the size itself.
struct FromData {
  size_t place = 0;
  size_t size = 0;
  int64_t block = 1;
};

struct Launch {
  void* function = nullptr;
  LaunchConfig config{};
  unsigned clusters = 1;
  std::vector<FromData> extents;
  std::vector<LaunchAttribute> attributes;
  std::vector<Parameter> parameters;
  std::vector<TensorMap> descriptors;
  // Whether a parameter is a seed or an offset.
  bool draws = false;
  // Whose `function` is: a compiled kernel, which unloads it when it goes; where there is no function, the host driver's,
  // to be called with tensors and numbers. Never released without the GIL.
  PyObject* owner = nullptr;
};

using Integers = c10::SmallVector<int64_t, 6>;

struct View {
  Source source;
  Integers sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

// What a replay does in turn: launch a kernel, set a buffer to 0, copy, or wait for sizes that kernels have written.
struct Step {
  enum Kind { kLaunch, kZero, kCopy, kRead } kind = kLaunch;
  Launch launch;
  View to, from;
  size_t count = 0;
};

struct Buffer {
  Integers sizes, strides;
  std::vector<FromData> sizes_from_data, strides_from_data;
  // How many sizes must have been read before it can be allocated.
  size_t after = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Allocator* allocator = nullptr;
  c10::DispatchKeySet keys;
};

struct Result {
  enum Kind { kAbsent, kWhole, kView, kSize, kDrawn, kValue, kList } kind = kAbsent;
  View view;
  std::vector<FromData> sizes_from_data;
  // Of a size read from data, or of a drawn number.
  size_t index = 0;
  IValue value;
  std::vector<Result> items;
  c10::TypePtr type;
};

struct Plan {
  std::atomic<uint64_t>* declined = nullptr;
  // Why calls of this key are ATen's from the first on whose data a kernel refuses; "" where each is looked at.
  std::string lasting;
  c10::Device device = c10::kCPU;
  bool reads = false;
  std::vector<Slot> slots;
  // For each time that the call draws on a generator, how far it advances it.
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
