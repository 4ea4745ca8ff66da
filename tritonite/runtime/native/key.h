// The key of a call: everything about it that its plan depends on, as 64-bit words.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "state.h"

namespace {

using torch::jit::Stack;

// A tensor argument; null for None. `strided` if it has memory that a kernel can address.
struct Leaf {
  const at::Tensor* tensor;
  bool strided;
  bool written;
};

struct Call {
  Words words;
  uint64_t hash = 0;
  uint64_t settings = 0;
  c10::SmallVector<Leaf, 8> leaves;
  // The reason to decline the call, if making the key has found one.
  const char* declined = nullptr;
};

// The low byte of the word that starts a value in a key.
enum Tag : uint64_t {
  kNone = 1,
  kUndefined,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kList,
  kDevice,
  kGenerator,
  kNumberTensor,
  kOpaqueTensor,
  kTensor,
  kSlotNumber,
};

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The reason to decline a tensor whose storage `resize_` has freed or made smaller; ATen raises its own error.
constexpr const char* kLargerThanStorage = "a tensor that needs more memory than its storage has";

// Whether a tensor argument counts as a number: a wrapped number, or a 0-d CPU tensor next to GPU tensors.
bool is_number(const State& state, const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->is_cpu() && (impl->is_wrapped_number() || (state.key != c10::DispatchKey::CPU && tensor.dim() == 0));
}

Number number_of(const c10::Scalar& scalar) {
  if (scalar.isFloatingPoint()) return {true, true, 0, scalar.toDouble()};
  if (scalar.isBoolean()) return {false, true, scalar.toBool(), 0};
  if (scalar.isIntegral(false) && scalar.type() != c10::ScalarType::UInt64) return {false, true, scalar.toLong(), 0};
  return {false, false, 0, 0};
}

Number number_of(const at::Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double: return {true, true, 0, *static_cast<const double*>(data)};
    case c10::ScalarType::Long: return {false, true, *static_cast<const int64_t*>(data), 0};
    case c10::ScalarType::Bool: return {false, true, *static_cast<const bool*>(data), 0};
    case c10::ScalarType::Float: return {true, true, 0, *static_cast<const float*>(data)};
    default: return number_of(tensor.item());
  }
}

// A key's word for a number of kind kZeroOrOne: 1 for 0, 2 for 1, 4 for -0.0, 3 for all others.
uint64_t zero_or_one(const Number& number) {
  const double value = number.as_real();
  return value == 0 ? (std::signbit(value) ? 4 : 1) : value == 1 ? 2 : 3;
}

// Whether a tensor has named dimensions, which newer versions of torch lack.
template <class Impl>
auto has_names(const Impl* impl, int) -> decltype(impl->has_named_tensor_meta()) {
  return impl->has_named_tensor_meta();
}

template <class Impl>
bool has_names(const Impl*, long) {
  return false;
}

// Appends a tensor to the key. Returns false if no key can describe the tensor.
bool key_tensor(const State& state, const at::Tensor& tensor, uint8_t slot, bool written, Call& call) {
  Words& words = call.words;
  call.leaves.push_back({&tensor, false, written});
  if (!tensor.defined()) {
    words.push_back(kUndefined);
    return true;
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (slot == kReadOnHost && impl->is_cpu()) return false;
  if (impl->is_wrapped_number() && !impl->is_cpu()) {
    // ATen makes these itself. Promotion as a number would need a read from the device.
    call.declined = "a number on the device";
    return false;
  }
  const uint64_t dtype = static_cast<uint64_t>(tensor.scalar_type()) << 8;
  if (is_number(state, tensor)) {
    if (impl->has_storage() && tensor.const_data_ptr() == nullptr) {
      call.declined = kLargerThanStorage;
      return false;
    }
    words.push_back(kNumberTensor | dtype | static_cast<uint64_t>(impl->is_wrapped_number()) << 16);
    if (slot == kTypeOnly) return true;
    const Number number = number_of(tensor);
    words.push_back(
        slot == kZeroOrOne ? zero_or_one(number) : number.floating ? bits_of(number.real) : static_cast<uint64_t>(number.integer));
    return number.known;
  }
  if (has_names(impl, 0)) {
    call.declined = "a tensor with named dimensions";
    return false;
  }
  const c10::Device device = tensor.device();
  if (device.type() != state.device) {
    // For example a copy between host and device, which should not get slower.
    call.declined = "a tensor on another device";
    return false;
  }
  const uint64_t device_bits =
      static_cast<uint64_t>(device.type()) << 16 | static_cast<uint64_t>(device.index() & 0xff) << 24;
  const c10::DispatchKeySet keys = impl->key_set();
  if (impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides() || !impl->has_storage() ||
      impl->is_python_dispatch() || keys.has(c10::DispatchKey::NestedTensorCUDA) ||
      keys.has(c10::DispatchKey::NestedTensorCPU) || keys.has(c10::DispatchKey::ZeroTensor)) {
    words.push_back(kOpaqueTensor | dtype | device_bits | static_cast<uint64_t>(impl->layout()) << 32);
    return !impl->is_python_dispatch() && !impl->has_symbolic_sizes_strides();
  }
  call.leaves.back().strided = true;
  const auto pointer = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  words.push_back(
      kTensor | dtype | device_bits | static_cast<uint64_t>((pointer & 15) != 0) << 32 |
      static_cast<uint64_t>(keys.has(c10::DispatchKey::Negative)) << 33 |
      static_cast<uint64_t>(keys.has(c10::DispatchKey::Conjugate)) << 34 | static_cast<uint64_t>(impl->dim()) << 40);
  const auto sizes = impl->sizes(), strides = impl->strides();
  int64_t end = impl->storage_offset() + 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    words.push_back(sizes[i]);
    words.push_back(strides[i]);
    end += (sizes[i] - 1) * strides[i];
  }
  const auto bytes = static_cast<uint64_t>(end) * impl->itemsize();
  if (impl->numel() != 0 && C10_UNLIKELY(bytes > impl->unsafe_storage().nbytes() || pointer == 0)) {
    call.declined = kLargerThanStorage;
    return false;
  }
  return true;
}

// Appends a number: its type, and what `slot` (a SlotKind) says about its value.
void key_number(Words& words, Tag tag, const Number& number, uint8_t slot) {
  if (slot == kPinned) {
    words.push_back(tag);
    words.push_back(number.floating ? bits_of(number.real) : static_cast<uint64_t>(number.integer));
  } else {
    words.push_back(kSlotNumber | tag << 8 | (slot == kZeroOrOne ? zero_or_one(number) << 16 : 0));
  }
}

// Appends an argument to the key. Returns false if no key can describe it.
bool key_value(const State& state, const IValue& value, size_t argument, Call& call) {
  Words& words = call.words;
  const uint8_t slot = state.slots[argument];
  if (value.isTensor()) return key_tensor(state, value.toTensor(), slot, state.written[argument], call);
  if (value.isNone()) {
    words.push_back(kNone);
    if (state.tensor[argument]) call.leaves.push_back({nullptr, false, false});
  } else if (value.isInt()) {
    key_number(words, kInt, {false, true, value.toInt(), 0}, slot);
  } else if (value.isDouble()) {
    key_number(words, kDouble, {true, true, 0, value.toDouble()}, slot);
  } else if (value.isBool()) {
    key_number(words, kBool, {false, true, value.toBool(), 0}, slot);
  } else if (value.isComplexDouble()) {
    words.push_back(kComplex);
    words.push_back(bits_of(value.toComplexDouble().real()));
    words.push_back(bits_of(value.toComplexDouble().imag()));
  } else if (value.isDevice() && value.toDevice().type() != state.device) {
    call.declined = "a result on another device";
    return false;
  } else if (value.isDevice()) {
    words.push_back(kDevice | static_cast<uint64_t>(value.toDevice().type()) << 8);
    words.push_back(value.toDevice().index());
  } else if (value.isGenerator()) {
    words.push_back(kGenerator | static_cast<uint64_t>(value.toGenerator().device().type()) << 8);
    words.push_back(value.toGenerator().device().index());
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    words.push_back(kString | text.size() << 8);
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
      words.push_back(word);
    }
  } else if (value.isList()) {
    const auto list = value.toListRef();
    words.push_back(kList | list.size() << 8);
    for (const IValue& item : list) {
      if (!key_value(state, item, argument, call)) return false;
    }
  } else {
    return false;
  }
  return true;
}

// The addresses from the first byte of a tensor to the end of its last element.
struct AddressRange {
  uintptr_t begin, end;
};

AddressRange addresses_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.sizes()[i] == 0) return {begin, begin};
    last += (tensor.sizes()[i] - 1) * tensor.strides()[i];
  }
  return {begin, begin + (last + 1) * tensor.element_size()};
}

// `key_aliases` for many arguments, by a sweep over sorted addresses: the key grows with overlaps, not with pairs.
void key_many_aliases(Call& call) {
  struct Argument {
    AddressRange addresses;
    size_t leaf;
    bool written;
  };
  std::vector<Argument> sorted;
  sorted.reserve(call.leaves.size());
  for (size_t i = 0; i < call.leaves.size(); ++i) {
    const Leaf& leaf = call.leaves[i];
    if (leaf.strided) sorted.push_back({addresses_of(*leaf.tensor), i, leaf.written});
  }
  std::sort(sorted.begin(), sorted.end(), [](const Argument& a, const Argument& b) {
    return a.addresses.begin != b.addresses.begin ? a.addresses.begin < b.addresses.begin : a.leaf < b.leaf;
  });
  std::vector<std::pair<uint64_t, uint64_t>> found;
  // Earlier arguments, one for each address, that end after the current one begins.
  std::vector<Argument> open;
  for (size_t i = 0; i < sorted.size();) {
    // All arguments at one address.
    Argument group = sorted[i];
    size_t next = i + 1;
    for (; next < sorted.size() && sorted[next].addresses.begin == group.addresses.begin; ++next) {
      found.emplace_back(sorted[next].leaf << 32 | group.leaf, 0);
      group.addresses.end = std::max(group.addresses.end, sorted[next].addresses.end);
      group.written |= sorted[next].written;
    }
    const auto ended = [&](const Argument& earlier) { return earlier.addresses.end <= group.addresses.begin; };
    open.erase(std::remove_if(open.begin(), open.end(), ended), open.end());
    for (const Argument& earlier : open) {
      if (!earlier.written && !group.written) continue;
      found.emplace_back(group.leaf << 32 | earlier.leaf, group.addresses.begin - earlier.addresses.begin);
    }
    open.push_back(group);
    i = next;
  }
  std::sort(found.begin(), found.end());
  for (const auto& [pair, distance] : found) {
    call.words.push_back(pair);
    call.words.push_back(distance);
  }
}

// Appends which arguments share an address, and the distance in bytes where a written argument overlaps another.
void key_aliases(Call& call) {
  constexpr size_t kMany = 12;
  if (call.leaves.size() > kMany) return key_many_aliases(call);
  uint64_t same = 0, bit = 1;
  for (size_t i = 1; i < call.leaves.size(); ++i) {
    const Leaf& later = call.leaves[i];
    if (!later.strided) continue;
    for (size_t j = 0; j < i; ++j) {
      const Leaf& earlier = call.leaves[j];
      if (!earlier.strided) continue;
      const void *a = earlier.tensor->const_data_ptr(), *b = later.tensor->const_data_ptr();
      if (a == b) {
        same |= bit;
      } else if (later.written || earlier.written) {
        const AddressRange x = addresses_of(*earlier.tensor), y = addresses_of(*later.tensor);
        if (x.begin < y.end && y.begin < x.end) {
          call.words.push_back(kUndefined | i << 8 | j << 32);
          call.words.push_back(y.begin - x.begin);
        }
      }
      bit <<= 1;
      if (bit == 0) {
        call.words.push_back(same);
        same = 0;
        bit = 1;
      }
    }
  }
  call.words.push_back(same);
}

// torch's settings that results may depend on.
uint64_t ambient() {
  const at::Context& context = at::globalContext();
  return static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) |
      static_cast<uint64_t>(context.deterministicAlgorithms()) << 8 |
      static_cast<uint64_t>(context.deterministicFillUninitializedMemory()) << 9 |
      // Libraries of convolutions, whose results have memory formats of their own.
      static_cast<uint64_t>(context.userEnabledCuDNN()) << 10 |
      static_cast<uint64_t>(context.userEnabledMkldnn()) << 11 |
      static_cast<uint64_t>(context.float32MatmulPrecision()) << 16 |
      // The precision of float32 matrix products and convolutions.
      static_cast<uint64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL)) << 24 |
      static_cast<uint64_t>(context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV)) << 28;
}

// Makes the key of a call. Returns false if no key can describe it, with `declined` set if ATen must serve it.
bool key_call(const State& state, const Stack& stack, size_t arguments, Call& call) {
  call.settings = settings.load(std::memory_order_relaxed);
  call.words.push_back(ambient() | call.settings << 32);
  const IValue* first = stack.data() + (stack.size() - arguments);
  for (size_t i = 0; i < arguments; ++i) {
    if (!key_value(state, first[i], i, call)) return false;
  }
  const auto is_strided = [](const Leaf& leaf) { return leaf.strided; };
  if (call.leaves.size() > 1) {
    key_aliases(call);
  } else if (state.device != c10::kCPU && std::none_of(call.leaves.begin(), call.leaves.end(), is_strided)) {
    // A device without an index is the current one.
    call.words.push_back(c10::impl::VirtualGuardImpl(state.device).getDevice().index());
  }
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const uint64_t word : call.words) {
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  call.hash = hash;
  return true;
}

}  // namespace
