// One boxed kernel for every overridden operator. It keys the call, finds the plan recorded for that key and replays it:
// allocations, launches, copies, results. Python runs when there is no plan yet; ATen's own kernel where the plan says
// so, and where the operator is not selected at this moment.

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

namespace py = pybind11;
using c10::IValue;
using torch::jit::Stack;

// ---- The driver, loaded at run time ----------------------------------------------------------------------------------

struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

enum AttributeId { kCooperative = 2, kCluster = 4, kClusterScheduling = 5, kProgrammaticSerialization = 6 };

// What a tensor descriptor is to a kernel on NVIDIA: CUDA's CUtensorMap.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

struct Driver {
  int (*launch_kernel)(const LaunchConfig*, void*, void**, void**) = nullptr;
  int (*error_string)(int, const char**) = nullptr;
  int (*fill)(uintptr_t, unsigned char, size_t, void*) = nullptr;
  int (*copy_to_host)(void*, uintptr_t, size_t, void*) = nullptr;
  int (*wait)(void*) = nullptr;
  int (*stream_is_capturing)(void*, int*) = nullptr;
  int (*get_device)(int*, int) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;
  // Not in drivers older than 12.0, whose GPUs have no such thing.
  int (*replace_address)(TensorMap*, void*) = nullptr;
  // c10::cuda::getCurrentCUDAStream and c10::cuda::CUDAStream::stream, whose headers want CUDA's.
  struct Stream {
    int64_t words[2];
  };
  Stream (*current_stream)(c10::DeviceIndex) = nullptr;
  void* (*raw_stream)(const Stream*) = nullptr;

  void* stream(c10::DeviceIndex device) const {
    Stream current = current_stream(device);
    return raw_stream(&current);
  }

  bool is_capturing(c10::DeviceIndex device) const {
    int status = 0;
    return stream_is_capturing(stream(device), &status) == 0 && status != 0;
  }

  int launch(const LaunchConfig& config, void* function, void** parameters, c10::DeviceIndex device) const {
    constexpr int kInvalidContext = 201;
    const int code = launch_kernel(&config, function, parameters, nullptr);
    if (code != kInvalidContext) return code;
    // A thread that has called nothing of CUDA's runtime, which sets the context, has none.
    int ordinal = 0;
    void* context = nullptr;
    if (get_device(&ordinal, device) || retain_context(&context, ordinal) || set_context(context)) return code;
    return launch_kernel(&config, function, parameters, nullptr);
  }

  std::string describe(int code) const {
    const char* text = nullptr;
    return error_string(code, &text) == 0 && text ? text : "error " + std::to_string(code);
  }
};

template <typename T>
void find(void* library, const char* name, T& function) {
  function = reinterpret_cast<T>(dlsym(library, name));
  TORCH_CHECK(function, "tritonite: ", name, " is not in the driver's libraries");
}

const Driver& driver() {
  static const Driver loaded = [] {
    Driver found;
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    void* torch_cuda = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    TORCH_CHECK(cuda && torch_cuda, "tritonite: the CUDA driver cannot be loaded: ", dlerror());
    find(cuda, "cuLaunchKernelEx", found.launch_kernel);
    find(cuda, "cuGetErrorString", found.error_string);
    find(cuda, "cuMemsetD8Async", found.fill);
    find(cuda, "cuMemcpyDtoHAsync_v2", found.copy_to_host);
    find(cuda, "cuStreamSynchronize", found.wait);
    find(cuda, "cuStreamIsCapturing", found.stream_is_capturing);
    find(cuda, "cuDeviceGet", found.get_device);
    find(cuda, "cuDevicePrimaryCtxRetain", found.retain_context);
    find(cuda, "cuCtxSetCurrent", found.set_context);
    found.replace_address = reinterpret_cast<decltype(found.replace_address)>(dlsym(cuda, "cuTensorMapReplaceAddress"));
    find(torch_cuda, "_ZN3c104cuda20getCurrentCUDAStreamEa", found.current_stream);
    find(torch_cuda, "_ZNK3c104cuda10CUDAStream6streamEv", found.raw_stream);
    return found;
  }();
  return loaded;
}

// ---- Plans -----------------------------------------------------------------------------------------------------------

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

using Words = c10::SmallVector<uint64_t, 64>;

struct Entry {
  uint64_t hash;
  Words words;
  std::shared_ptr<const Plan> plan;
};

// All that is known of an overridden operator. Made once and never freed: calls may be under way at any time.
struct State {
  State(c10::OperatorHandle handle, std::string space, std::string name)
      : handle(std::move(handle)), space(std::move(space)), name(std::move(name)), label("tritonite::" + this->name) {}

  // ATen's, or of operators outside ATen, behind which there is no other kernel.
  bool is_atens() const {
    return space == "aten";
  }

  c10::OperatorHandle handle;
  std::string space, name, label;
  c10::DispatchKey key = c10::DispatchKey::CUDA;
  // By argument: whether it is a tensor or a list of them, and whether it is written.
  std::vector<bool> tensor, written;
  // By argument: of numbers plans hold the value (0), the type alone (1), or whether they are 0 or 1, too (2).
  std::vector<uint8_t> slot;
  // The bit that says whether it is in the selection that is in force. Others go to ATen's kernel.
  std::atomic<uint64_t>* switches = nullptr;
  uint64_t bit = 0;
  PyObject* record = nullptr;
  std::shared_ptr<c10::SafeKernelFunction> kernel;
  // Of an operator outside ATen what autograd does, in Python, where a gradient is wanted.
  std::shared_ptr<c10::SafeKernelFunction> gradient;
  bool provisional = false;
  std::unique_ptr<torch::Library> library, gate;
  std::list<Entry> plans;
  std::unordered_map<uint64_t, std::vector<std::list<Entry>::iterator>> found;
  std::atomic<uint64_t> replayed{0};
  std::unordered_map<std::string, std::unique_ptr<std::atomic<uint64_t>>> reasons;

  bool active() const { return switches->load(std::memory_order_relaxed) & bit; }

  void set_active(bool on) {
    on ? switches->fetch_or(bit) : switches->fetch_and(~bit);
  }
};

// Guards the plans of all operators; held for a look-up or an insertion.
std::mutex plans_mutex;
size_t most_plans = 1024;
std::atomic<bool> poison{false};
// What is asked of all calls alike: `Settings.bits` of call.py.
std::atomic<uint64_t> settings{0};
thread_local bool inside_kernel = false;
// Lists of what Triton is to call at launches: a profiler's, for example.
std::vector<PyObject*> launch_hooks;

std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<State>>& states() {
  static auto* all = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<State>>();
  return *all;
}

std::atomic<uint64_t>* reason_counter(State& state, const std::string& reason) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  auto& counter = state.reasons[state.reasons.size() < 64 || state.reasons.count(reason) ? reason : "other reasons"];
  if (!counter) counter = std::make_unique<std::atomic<uint64_t>>(0);
  return counter.get();
}

// ---- Keys ------------------------------------------------------------------------------------------------------------

// A tensor argument as keying and replaying see it; null where None is given.
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
  // Why ATen has to serve the call, where keying it shows that.
  const char* declined = nullptr;
};

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

// What a key says of a slot's value; zeros of either sign are told apart.
uint64_t zero_or_one(const Number& number) {
  const double value = number.as_real();
  return value == 0 ? (std::signbit(value) ? 4 : 1) : value == 1 ? 2 : 3;
}

// The kind of device that an operator's kernels run on.
c10::DeviceType device_of(const State& state) {
  return state.key == c10::DispatchKey::CPU ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
}

// Appends what a tensor contributes to the key; false where calls like this cannot be told apart.
bool key_tensor(const State& state, const at::Tensor& tensor, uint8_t slot, bool written, Call& call) {
  Words& words = call.words;
  call.leaves.push_back({&tensor, false, written});
  if (!tensor.defined()) {
    words.push_back(kUndefined);
    return true;
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->is_wrapped_number() && !impl->is_cpu()) {
    // ATen makes these for itself. To promote as a number does, Python would have to read it from the device.
    call.declined = "a number on the device";
    return false;
  }
  const uint64_t dtype = static_cast<uint64_t>(tensor.scalar_type()) << 8;
  if (is_number(state, tensor)) {
    words.push_back(kNumberTensor | dtype | static_cast<uint64_t>(impl->is_wrapped_number()) << 16);
    if (slot == 1) return true;
    const Number number = number_of(tensor);
    words.push_back(
        slot == 2 ? zero_or_one(number) : number.floating ? bits_of(number.real) : static_cast<uint64_t>(number.integer));
    return number.known;
  }
  const c10::Device device = tensor.device();
  if (device.type() != device_of(state)) {
    // As in copies from the host and to it, which are to be no slower for having come by here.
    call.declined = "a tensor on another device";
    return false;
  }
  const uint64_t place = static_cast<uint64_t>(device.type()) << 16 | static_cast<uint64_t>(device.index() & 0xff) << 24;
  const c10::DispatchKeySet keys = impl->key_set();
  if (impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides() || !impl->has_storage() ||
      impl->is_python_dispatch() || keys.has(c10::DispatchKey::NestedTensorCUDA) ||
      keys.has(c10::DispatchKey::NestedTensorCPU) || keys.has(c10::DispatchKey::ZeroTensor)) {
    words.push_back(kOpaqueTensor | dtype | place | static_cast<uint64_t>(impl->layout()) << 32);
    return !impl->is_python_dispatch() && !impl->has_symbolic_sizes_strides();
  }
  call.leaves.back().strided = true;
  const auto pointer = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  words.push_back(
      kTensor | dtype | place | static_cast<uint64_t>((pointer & 15) != 0) << 32 |
      static_cast<uint64_t>(keys.has(c10::DispatchKey::Negative)) << 33 |
      static_cast<uint64_t>(keys.has(c10::DispatchKey::Conjugate)) << 34 | static_cast<uint64_t>(impl->dim()) << 40);
  const auto sizes = impl->sizes(), strides = impl->strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    words.push_back(sizes[i]);
    words.push_back(strides[i]);
  }
  return true;
}

// A number: its type, and of its value what `slot` says.
void key_number(Words& words, Tag tag, const Number& number, uint8_t slot) {
  if (slot == 0) {
    words.push_back(tag);
    words.push_back(number.floating ? bits_of(number.real) : static_cast<uint64_t>(number.integer));
  } else {
    words.push_back(kSlotNumber | tag << 8 | (slot == 2 ? zero_or_one(number) << 16 : 0));
  }
}

bool key_value(const State& state, const IValue& value, size_t argument, Call& call) {
  Words& words = call.words;
  const uint8_t slot = state.slot[argument];
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
  } else if (value.isDevice() && value.toDevice().type() != device_of(state)) {
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

struct Extent {
  uintptr_t begin, end;
};

Extent extent_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.sizes()[i] == 0) return {begin, begin};
    last += (tensor.sizes()[i] - 1) * tensor.strides()[i];
  }
  return {begin, begin + (last + 1) * tensor.element_size()};
}

// The same of many arguments, by their addresses in order: the key grows with what overlaps, not with pairs.
void key_many_aliases(Call& call) {
  struct Place {
    Extent extent;
    size_t leaf;
    bool written;
  };
  std::vector<Place> places;
  places.reserve(call.leaves.size());
  for (size_t i = 0; i < call.leaves.size(); ++i) {
    const Leaf& leaf = call.leaves[i];
    if (leaf.strided) places.push_back({extent_of(*leaf.tensor), i, leaf.written});
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.extent.begin != b.extent.begin ? a.extent.begin < b.extent.begin : a.leaf < b.leaf;
  });
  std::vector<std::pair<uint64_t, uint64_t>> found;
  // Those before, one for each address, that reach beyond where the next begins.
  std::vector<Place> reaching;
  for (size_t i = 0; i < places.size();) {
    Place group = places[i];
    size_t next = i + 1;
    for (; next < places.size() && places[next].extent.begin == group.extent.begin; ++next) {
      found.emplace_back(places[next].leaf << 32 | group.leaf, 0);
      group.extent.end = std::max(group.extent.end, places[next].extent.end);
      group.written |= places[next].written;
    }
    const auto ended = [&](const Place& earlier) { return earlier.extent.end <= group.extent.begin; };
    reaching.erase(std::remove_if(reaching.begin(), reaching.end(), ended), reaching.end());
    for (const Place& earlier : reaching) {
      if (!earlier.written && !group.written) continue;
      found.emplace_back(group.leaf << 32 | earlier.leaf, group.extent.begin - earlier.extent.begin);
    }
    reaching.push_back(group);
    i = next;
  }
  std::sort(found.begin(), found.end());
  for (const auto& [pair, distance] : found) {
    call.words.push_back(pair);
    call.words.push_back(distance);
  }
}

// Which arguments are at one address, and by how much a written one overlaps another.
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
        const Extent x = extent_of(*earlier.tensor), y = extent_of(*later.tensor);
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

// How products of float32 may be rounded; torch 2.9 says it in words.
template <class Precision, class Backend, class Op>
uint64_t matmul_precision(const at::Context& context, Precision (at::Context::*get)(Backend, Op) const) {
  if constexpr (std::is_enum_v<Precision>) {
    return static_cast<uint64_t>((context.*get)(Backend::CUDA, Op::MATMUL));
  } else {
    return (context.*get)("cuda", "matmul") == "tf32";
  }
}

// The settings of torch that results may depend on.
uint64_t ambient() {
  const at::Context& context = at::globalContext();
  return static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()) |
      static_cast<uint64_t>(context.deterministicAlgorithms()) << 8 |
      static_cast<uint64_t>(context.deterministicFillUninitializedMemory()) << 9 |
      static_cast<uint64_t>(context.float32MatmulPrecision()) << 16 |
      matmul_precision(context, &at::Context::float32Precision) << 24;
}

bool key_call(const State& state, const Stack& stack, size_t arguments, Call& call) {
  call.settings = settings.load(std::memory_order_relaxed);
  call.words.push_back(ambient() | call.settings << 32);
  const IValue* first = stack.data() + (stack.size() - arguments);
  for (size_t i = 0; i < arguments; ++i) {
    if (!key_value(state, first[i], i, call)) return false;
  }
  const auto is_placed = [](const Leaf& leaf) { return leaf.strided; };
  if (call.leaves.size() > 1) {
    key_aliases(call);
  } else if (state.key == c10::DispatchKey::CUDA && std::none_of(call.leaves.begin(), call.leaves.end(), is_placed)) {
    // A device without an index is the current one.
    call.words.push_back(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index());
  }
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const uint64_t word : call.words) {
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  call.hash = hash;
  return true;
}

std::shared_ptr<const Plan> look_up(State& state, const Call& call) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  if (!state.plans.empty() && state.plans.front().hash == call.hash && state.plans.front().words == call.words) {
    return state.plans.front().plan;
  }
  const auto bucket = state.found.find(call.hash);
  if (bucket == state.found.end()) return nullptr;
  for (const auto& entry : bucket->second) {
    if (entry->words == call.words) {
      state.plans.splice(state.plans.begin(), state.plans, entry);
      return entry->plan;
    }
  }
  return nullptr;
}

void insert(State& state, const Call& call, std::shared_ptr<const Plan> plan) {
  // What is dropped is destroyed after the lock is released, because that takes the GIL.
  std::vector<std::shared_ptr<const Plan>> dropped;
  std::lock_guard<std::mutex> lock(plans_mutex);
  auto& bucket = state.found[call.hash];
  for (const auto& entry : bucket) {
    if (entry->words == call.words) {
      dropped.push_back(std::exchange(entry->plan, std::move(plan)));
      return;
    }
  }
  state.plans.push_front({call.hash, call.words, std::move(plan)});
  bucket.push_back(state.plans.begin());
  while (state.plans.size() > most_plans) {
    const auto last = std::prev(state.plans.end());
    auto& others = state.found[last->hash];
    others.erase(std::find(others.begin(), others.end(), last));
    if (others.empty()) state.found.erase(last->hash);
    dropped.push_back(std::move(last->plan));
    state.plans.pop_back();
  }
}

// ---- Replay ----------------------------------------------------------------------------------------------------------

at::Tensor view_of(const at::Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, c10::ScalarType dtype) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(dtype));
  result.unsafeGetTensorImpl()->set_storage_offset(offset);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return result;
}

// Bytes into `base`'s storage for a source at `offset` bytes from where `base` begins, in elements of `dtype`.
int64_t element_offset(const at::Tensor& base, int64_t offset, c10::ScalarType dtype) {
  return (base.storage_offset() * static_cast<int64_t>(base.element_size()) + offset) /
      static_cast<int64_t>(c10::elementSize(dtype));
}

// The seed and offset for one kernel; the generator moves on. A CPU's has no offset: each draw is a seed.
std::pair<uint64_t, uint64_t> draw_from(at::Generator generator, uint64_t advance) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  if (generator.device().is_cpu()) {
    return {generator.get<at::CPUGeneratorImpl>()->random64() & ~(uint64_t{1} << 63), 0};
  }
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + advance);
  return {generator.current_seed(), offset};
}

// Thrown where ATen raises an error of its own: by the interpreter where a kernel's assertion fails, and where data that
// has been read says so.
struct Refused {};

struct Replay {
  const State& state;
  const Plan& plan;
  const Call& call;
  c10::SmallVector<at::Tensor, 4> buffers;
  c10::SmallVector<Number, 8> numbers;
  // Those that data has decided so far.
  c10::SmallVector<int64_t, 2> sizes;
  // Seed and offset of each draw.
  c10::SmallVector<uint64_t, 2> drawn;

  const at::Tensor& base(const Source& source) const {
    return source.buffer ? buffers[source.index] : *call.leaves[source.index].tensor;
  }

  // False where a number does not fit what the kernel was made for.
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

  // Why a plan cannot run while a CUDA graph is captured, if one is: its replays would repeat what was drawn or read.
  const char* capture_forbids() const {
    if ((plan.draws.empty() && !plan.reads) || plan.device.is_cpu()) return nullptr;
    if (!driver().is_capturing(plan.device.index())) return nullptr;
    return plan.reads ? "a size that data decides while a CUDA graph is captured"
                      : "random numbers while a CUDA graph is captured";
  }

  // All draws of the call, once: a generator stays as it is where data that was read before has ATen refuse the call.
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

  // Those that nothing more has to be known of.
  void allocate() {
    buffers.resize(plan.buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
      if (buffers[i].defined() || buffer.after > sizes.size()) continue;
      if (buffer.after == 0) {
        buffers[i] = at::detail::empty_strided_generic(
            buffer.sizes, buffer.strides, buffer.allocator, buffer.keys, buffer.dtype);
      } else {
        Integers own_sizes = buffer.sizes, own_strides = buffer.strides;
        for (const FromData& extent : buffer.sizes_from_data) own_sizes[extent.place] = sizes[extent.size];
        for (const FromData& extent : buffer.strides_from_data) own_strides[extent.place] = sizes[extent.size];
        // So a host function has told that ATen refuses the data.
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
    if (tensor.is_cpu()) {
      std::memset(data, byte, bytes);
    } else if (bytes) {
      check(driver().fill(reinterpret_cast<uintptr_t>(data), byte, bytes, driver().stream(plan.device.index())));
    }
  }

  void check(int code) const {
    TORCH_CHECK(code == 0, failed(), driver().describe(code));
  }

  at::Tensor viewed(const View& view) const {
    const at::Tensor& from = base(view.source);
    return view_of(from, view.sizes, view.strides, element_offset(from, view.source.offset, view.dtype), view.dtype);
  }

  void copy(const Step& step) const {
    at::AutoDispatchBelowADInplaceOrView below;
    viewed(step.to).copy_(viewed(step.from));
  }

  // Waits for numbers that kernels have written.
  void read(const Step& step) {
    const size_t known = sizes.size(), bytes = step.count * sizeof(int64_t);
    sizes.resize(known + step.count);
    if (plan.device.is_cpu()) {
      std::memcpy(sizes.data() + known, reinterpret_cast<const void*>(address(step.from.source)), bytes);
      return;
    }
    void* stream = driver().stream(plan.device.index());
    check(driver().copy_to_host(sizes.data() + known, address(step.from.source), bytes, stream));
    check(driver().wait(stream));
  }

  uint64_t bits_of_slot(const Parameter& parameter) const {
    const Number& number = numbers[parameter.index];
    if (!plan.slots[parameter.index].floating) return static_cast<uint64_t>(number.integer);
    return bits_of(number.as_real());
  }

  uintptr_t address(const Source& source) const {
    // A tensor that is lazily cloned gets memory of its own where it is asked for to be written.
    const bool written = !source.buffer && call.leaves[source.index].written;
    const void* data = written ? base(source).mutable_data_ptr() : base(source).const_data_ptr();
    return reinterpret_cast<uintptr_t>(data) + source.offset;
  }

  std::string failed() const {
    return "tritonite: launching the kernel of " + state.space + "::" + state.name + " failed: ";
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
      switch (parameter.kind) {
        case Parameter::kPointer: values[i] = address(parameter.source); break;
        case Parameter::kConstant: values[i] = parameter.bits; break;
        case Parameter::kSlot: values[i] = bits_of_slot(parameter); break;
        case Parameter::kDrawn: values[i] = drawn[parameter.index]; break;
        case Parameter::kSize: values[i] = sizes[parameter.index]; break;
        case Parameter::kDescriptor: {
          TensorMap* map = &descriptors[parameter.index];
          pointers[i] = map;
          check(driver().replace_address(map, reinterpret_cast<void*>(address(parameter.source))));
          break;
        }
      }
    }
    LaunchConfig config = config_of(launch);
    if (config.grid[0] == 0 || config.grid[1] == 0 || config.grid[2] == 0) return;
    config.attributes = const_cast<LaunchAttribute*>(launch.attributes.data());
    config.attribute_count = launch.attributes.size();
    config.stream = driver().stream(plan.device.index());
    check(driver().launch(config, launch.function, pointers.data(), plan.device.index()));
  }

  LaunchConfig config_of(const Launch& launch) const {
    LaunchConfig config = launch.config;
    for (const FromData& extent : launch.extents) {
      const int64_t blocks = (sizes[extent.size] + extent.block - 1) / extent.block;
      config.grid[extent.place] = static_cast<unsigned>(blocks) * (extent.place == 0 ? launch.clusters : 1);
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
      TORCH_CHECK(!error.matches(PyExc_Exception), failed(), error.what());
      throw;
    }
  }

  void run(Stack* stack, size_t arguments) {
    c10::OptionalDeviceGuard guard;
    if (!plan.device.is_cpu()) guard.reset_device(plan.device);
    allocate();
    for (const Step& step : plan.steps) {
      switch (step.kind) {
        case Step::kLaunch:
          if (step.launch.draws) draw(*stack, arguments);
          if (step.launch.function) launch(step.launch);
          else launch_on_host(step.launch);
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
        if (result.sizes_from_data.empty()) return viewed(result.view);
        View view = result.view;
        for (const FromData& extent : result.sizes_from_data) view.sizes[extent.place] = sizes[extent.size];
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

// ---- Recording -------------------------------------------------------------------------------------------------------

c10::TypeKind kind_of(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind();
}

// A layout as Python has it. PyTorch's own conversion gives nothing before 2.13.
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

// As PyTorch hands it to a Python kernel: dtypes, layouts and memory formats are ints on the stack.
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

Integers integers(const py::handle& values) {
  Integers result;
  for (const py::handle value : values) result.push_back(value.cast<int64_t>());
  return result;
}

c10::ScalarType dtype_of(const py::handle& dtype) {
  return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
}

Source source_of(const py::tuple& parts) {
  return {parts[0].cast<bool>(), parts[1].cast<size_t>(), parts[2].cast<int64_t>()};
}

Parameter parameter_of(const py::handle& described, Launch& launch) {
  Parameter parameter;
  if (PyLong_Check(described.ptr())) {
    parameter.bits = described.cast<uint64_t>();
    return parameter;
  }
  const auto parts = py::reinterpret_borrow<py::tuple>(described);
  if (py::isinstance<py::str>(parts[0])) {
    const auto kind = parts[0].cast<std::string>();
    parameter.index = parts[1].cast<size_t>();
    parameter.kind = kind == "slot" ? Parameter::kSlot : kind == "size" ? Parameter::kSize : Parameter::kDrawn;
    if (parameter.kind == Parameter::kDrawn) parameter.index = 2 * parameter.index + parts[2].cast<size_t>();
    return parameter;
  }
  parameter.source = source_of(parts);
  const py::object about = parts[3];
  if (PyBytes_Check(about.ptr())) {
    const auto bytes = about.cast<std::string>();
    TORCH_CHECK(bytes.size() == sizeof(TensorMap) && driver().replace_address, "tritonite: no such tensor descriptor");
    parameter.kind = Parameter::kDescriptor;
    parameter.index = launch.descriptors.size();
    std::memcpy(launch.descriptors.emplace_back().bytes, bytes.data(), bytes.size());
    return parameter;
  }
  parameter.kind = Parameter::kPointer;
  parameter.dtype = dtype_of(about);
  return parameter;
}

// From a LaunchStep of plan.py.
Launch launch_of(const py::handle& described) {
  const auto parts = py::reinterpret_borrow<py::tuple>(described);
  Launch launch;
  if (!py::object(parts[2]).is_none()) launch.function = reinterpret_cast<void*>(parts[2].cast<uintptr_t>());
  const py::tuple grid = parts[1];
  const auto clusters = launch.clusters = parts[5].cast<unsigned>();
  for (size_t i = 0; i < 3; ++i) {
    if (py::isinstance<py::tuple>(grid[i])) {
      const py::tuple blocks = grid[i];
      launch.extents.push_back({i, blocks[0].cast<size_t>(), blocks[1].cast<int64_t>()});
    } else {
      launch.config.grid[i] = grid[i].cast<unsigned>() * (i == 0 ? clusters : 1);
    }
    launch.config.block[i] = i == 0 ? parts[3].cast<unsigned>() : 1;
  }
  launch.config.shared = parts[4].cast<unsigned>();
  const auto attribute = [&](int id, std::initializer_list<unsigned> words) {
    LaunchAttribute added{};
    added.id = id;
    std::copy(words.begin(), words.end(), added.value);
    launch.attributes.push_back(added);
  };
  if (parts[7].cast<bool>()) attribute(kProgrammaticSerialization, {1});
  if (parts[6].cast<bool>()) attribute(kCooperative, {1});
  if (clusters != 1) {
    attribute(kCluster, {clusters, 1, 1});
    attribute(kClusterScheduling, {1});
  }
  for (const py::handle item : py::list(parts[0])) {
    launch.parameters.push_back(parameter_of(item, launch));
    launch.draws |= launch.parameters.back().kind == Parameter::kDrawn;
  }
  launch.owner = py::object(parts[8]).release().ptr();
  return launch;
}

View view_of_python(const py::tuple& parts) {
  return {source_of(parts[0]), integers(parts[1]), integers(parts[2]), dtype_of(parts[3])};
}

// From a step of plan.py, which its class's name tells.
Step step_of(const py::handle& described) {
  const auto kind = py::type::of(described).attr("__name__").cast<std::string>();
  const auto parts = py::reinterpret_borrow<py::tuple>(described);
  Step step;
  if (kind == "LaunchStep") {
    step.launch = launch_of(described);
  } else if (kind == "ZeroStep") {
    step.kind = Step::kZero;
    step.to.source = {true, parts[0].cast<size_t>(), 0};
  } else if (kind == "CopyStep") {
    step.kind = Step::kCopy;
    step.to = view_of_python(parts[0]);
    step.from = view_of_python(parts[1]);
  } else {
    step.kind = Step::kRead;
    step.from.source = source_of(parts[0]);
    step.count = parts[1].cast<size_t>();
  }
  return step;
}

// The sizes or strides of a buffer, those that data decides apart.
void read_extents(const py::handle& described, Integers& known, std::vector<FromData>& from_data, size_t& after) {
  known.clear();
  for (const py::handle extent : described) {
    if (!py::isinstance<py::tuple>(extent)) {
      known.push_back(extent.cast<int64_t>());
      continue;
    }
    const auto size = extent.cast<py::tuple>()[0].cast<size_t>();
    from_data.push_back({known.size(), size, 1});
    known.push_back(0);
    after = std::max(after, size + 1);
  }
}

Buffer buffer_of(const py::handle& described) {
  const auto parts = py::reinterpret_borrow<py::tuple>(described);
  const auto like = parts[0].cast<at::Tensor>();
  Buffer buffer;
  buffer.sizes.assign(like.sizes().begin(), like.sizes().end());
  buffer.strides.assign(like.strides().begin(), like.strides().end());
  if (!py::object(parts[1]).is_none()) {
    read_extents(parts[1], buffer.sizes, buffer.sizes_from_data, buffer.after);
    read_extents(parts[2], buffer.strides, buffer.strides_from_data, buffer.after);
  }
  buffer.dtype = like.scalar_type();
  buffer.allocator = like.storage().allocator();
  TORCH_CHECK(buffer.allocator, "tritonite: a buffer without an allocator");
  buffer.keys = c10::DispatchKeySet(c10::computeDispatchKey(buffer.dtype, c10::kStrided, like.device()));
  return buffer;
}

Result result_of(const py::handle& described, const c10::TypePtr& type) {
  Result result;
  result.type = type;
  if (described.is_none()) return result;
  const auto parts = described.cast<py::tuple>();
  if (py::isinstance<py::str>(parts[0])) {
    const auto kind = parts[0].cast<std::string>();
    if (kind == "list") {
      result.kind = Result::kList;
      for (const py::handle item : parts[1]) result.items.push_back(result_of(item, c10::TensorType::get()));
    } else if (kind == "size") {
      result.kind = Result::kSize;
      result.index = parts[1].cast<size_t>();
    } else if (kind == "drawn") {
      result.kind = Result::kDrawn;
      result.index = 2 * parts[1].cast<size_t>() + parts[2].cast<size_t>();
    } else {
      result.kind = Result::kValue;
      result.value = torch::jit::toIValue(parts[1], type);
    }
    return result;
  }
  result.kind = py::object(parts[1]).is_none() ? Result::kWhole : Result::kView;
  result.view.source = source_of(parts[0]);
  if (result.kind == Result::kView) {
    const auto layout = parts[1].cast<py::tuple>();
    size_t after = 0;
    read_extents(layout[0], result.view.sizes, result.sizes_from_data, after);
    result.view.strides = integers(layout[1]);
    result.view.dtype = dtype_of(layout[2]);
  }
  return result;
}

// A key whose calls are ATen's, counted.
void leave_to_aten(State& state, const Call& call, std::atomic<uint64_t>* counter) {
  auto plan = std::make_shared<Plan>();
  plan->declined = counter;
  insert(state, call, plan);
}

std::shared_ptr<const Plan> plan_of(const py::handle& described, const c10::FunctionSchema& schema) {
  auto plan = std::make_shared<Plan>();
  plan->device = reinterpret_cast<THPDevice*>(py::object(described.attr("device")).ptr())->device;
  plan->lasting = described.attr("lasting").cast<std::string>();
  for (const py::handle item : described.attr("slots")) {
    const auto parts = item.cast<py::tuple>();
    Slot slot{parts[0].cast<size_t>(), parts[1].cast<int64_t>(), parts[2].cast<bool>(), !parts[3].is_none()};
    if (slot.limited) {
      const auto limits = parts[3].cast<py::tuple>();
      slot.low = limits[0].cast<int64_t>();
      slot.high = limits[1].cast<int64_t>();
      slot.largest = limits[2].cast<double>();
      slot.finite = limits[3].cast<bool>();
      slot.least = limits[4].cast<double>();
    }
    plan->slots.push_back(slot);
  }
  for (const py::handle item : described.attr("draws")) plan->draws.push_back(item.cast<uint64_t>());
  for (const py::handle item : described.attr("buffers")) plan->buffers.push_back(buffer_of(item));
  for (const py::handle item : described.attr("steps")) {
    plan->steps.push_back(step_of(item));
    plan->reads |= plan->steps.back().kind == Step::kRead;
  }
  size_t i = 0;
  for (const py::handle item : described.attr("results")) {
    plan->results.push_back(result_of(item, schema.returns()[i++].real_type()));
  }
  return plan;
}

// ATen's kernel.
void call_kernel(const State& state, c10::DispatchKeySet keys, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(state.kernel, state.space, "::", state.name, " has no kernel of ATen's on this device");
  const auto kernel = std::atomic_load(&state.kernel);
  kernel->callBoxed(state.handle, keys, stack);
}

// In a profile a range of our own within that of ATen's operator.
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

// Runs the operator's Python implementation under the recorder. Returns false where ATen has to serve the call.
// It is kept for calls of this key only where the call is `keyed`.
bool record(State& state, const Call& call, bool keyed, Stack* stack, size_t arguments) {
  py::gil_scoped_acquire gil;
  py::list values;
  const auto& schema = state.handle.schema();
  for (size_t i = 0; i < arguments; ++i) {
    values.append(to_python((*stack)[stack->size() - arguments + i], schema.arguments()[i]));
  }
  const auto outcome = [&] {
    const ProfiledRange range(state);
    return py::handle(state.record)(values, call.settings).cast<py::tuple>();
  }();
  const auto kind = outcome[0].cast<std::string>();
  if (kind == "declined") {
    auto* counter = reason_counter(state, outcome[1].cast<std::string>());
    counter->fetch_add(1, std::memory_order_relaxed);
    if (keyed && outcome[2].cast<bool>()) leave_to_aten(state, call, counter);
    return false;
  }
  if (keyed && !outcome[2].is_none()) insert(state, call, plan_of(outcome[2], schema));
  const auto& returns = schema.returns();
  const auto results = outcome[1].cast<py::tuple>();
  std::vector<IValue> converted;
  for (size_t i = 0; i < returns.size(); ++i) converted.push_back(torch::jit::toIValue(results[i], returns[i].real_type()));
  torch::jit::drop(*stack, arguments);
  for (IValue& result : converted) stack->push_back(std::move(result));
  return true;
}

// Read without the GIL, as a profiler may start at any time and only that there are hooks matters.
bool launches_are_watched() {
  for (PyObject* hooks : launch_hooks) {
    if (Py_SIZE(hooks) != 0) return true;
  }
  return false;
}

void dispatch(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  // No lock: an operator's state is there before it is installed, and installing is what makes this visible to others.
  State& state = *states().find(&handle.schema())->second;
  if (inside_kernel || !state.active()) return call_kernel(state, keys, stack);
  const size_t arguments = handle.schema().arguments().size();
  Call call;
  const bool keyed = key_call(state, *stack, arguments, call) && !launches_are_watched();
  const char* reason = call.declined;
  if (const auto plan = keyed ? look_up(state, call) : nullptr) {
    if (plan->declined) {
      plan->declined->fetch_add(1, std::memory_order_relaxed);
      return call_kernel(state, keys, stack);
    }
    Replay replay{state, *plan, call, {}, {}, {}, {}};
    reason = !replay.read_slots(*stack, arguments) ? "number does not fit the dtype" : replay.capture_forbids();
    if (!reason) {
      try {
        const ProfiledRange range(state);
        replay.run(stack, arguments);
        state.replayed.fetch_add(1, std::memory_order_relaxed);
        return;
      } catch (const Refused&) {
        reason = "data that ATen refuses";
        if (!plan->lasting.empty() && state.kernel) {
          auto* counter = reason_counter(state, plan->lasting);
          counter->fetch_add(1, std::memory_order_relaxed);
          leave_to_aten(state, call, counter);
          return call_kernel(state, keys, stack);
        }
      }
    }
  }
  if (reason && state.kernel) {
    reason_counter(state, reason)->fetch_add(1, std::memory_order_relaxed);
    return call_kernel(state, keys, stack);
  }
  if (!record(state, call, keyed && !reason, stack, arguments)) call_kernel(state, keys, stack);
}

bool wants_gradient(const IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().requires_grad();
  if (!value.isTensorList()) return false;
  const auto list = value.toListRef();
  return std::any_of(list.begin(), list.end(), wants_gradient);
}

// Stands before an operator's autograd, which takes microseconds of Python also where no gradient is wanted.
void pass_autograd(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const State& state = *states().find(&handle.schema())->second;
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(handle.schema().arguments().size());
  if (c10::GradMode::is_enabled() && std::any_of(first, stack->end(), wants_gradient)) {
    return state.gradient->callBoxed(handle, keys, stack);
  }
  std::vector<IValue> written;
  for (size_t i = 0; i < state.written.size(); ++i) {
    if (state.written[i] && first[i].isTensor()) written.push_back(first[i]);
  }
  at::AutoDispatchBelowAutograd below;
  handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  // So that autograd sees that a tensor it has saved is another one now.
  for (const IValue& value : written) {
    if (value.toTensor().defined()) value.toTensor().unsafeGetTensorImpl()->bump_version();
  }
}

// ---- What Python calls -----------------------------------------------------------------------------------------------

std::unordered_map<std::string, State*>& by_name() {
  static auto* all = new std::unordered_map<std::string, State*>();
  return *all;
}

State& state_of(const std::string& name) {
  return *by_name().at(name);
}

// Whether each of ATen's operators is active, 64 to a word in the order they were declared in. Side by side, and not in
// their states, because a scope sets all of them.
std::deque<std::atomic<uint64_t>>& switches() {
  static auto* all = new std::deque<std::atomic<uint64_t>>();
  return *all;
}

template <typename T>
std::vector<T> flags(const py::list& values) {
  std::vector<T> result;
  for (const py::handle value : values) result.push_back(value.cast<T>());
  return result;
}

// `name` has its namespace before it, unless that is ATen's.
void declare(
    const std::string& name,
    const std::string& key,
    const py::list& tensors,
    const py::list& written,
    const py::list& slots,
    py::object callable) {
  if (by_name().count(name)) return;
  const size_t colons = name.find("::");
  const std::string space = colons == std::string::npos ? "aten" : name.substr(0, colons);
  const std::string own = colons == std::string::npos ? name : name.substr(colons + 2);
  const size_t dot = own.find('.');
  const std::string overload = dot == std::string::npos ? "" : own.substr(dot + 1);
  auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow((space + "::" + own.substr(0, dot)).c_str(), overload.c_str());
  auto state = std::make_unique<State>(handle, space, own);
  state->key = c10::parseDispatchKey(key);
  state->tensor = flags<bool>(tensors);
  state->written = flags<bool>(written);
  state->slot = flags<uint8_t>(slots);
  state->record = callable.release().ptr();
  static std::atomic<uint64_t> always{1};
  static size_t declared = 0;
  const size_t place = state->is_atens() ? declared++ % 64 : 0;
  state->bit = uint64_t{1} << place;
  if (state->is_atens() && place == 0) switches().emplace_back(0);
  state->switches = state->is_atens() ? &switches().back() : &always;
  by_name()[name] = state.get();
  states()[&handle.schema()] = std::move(state);
}

// Puts another implementation in an operator's place. Only for tests, since calls may be under way.
void redeclare(const std::string& name, const py::list& slots, py::object callable) {
  State& state = state_of(name);
  state.slot = flags<uint8_t>(slots);
  py::reinterpret_steal<py::object>(std::exchange(state.record, callable.release().ptr()));
}

// Puts a selection in force, a bit for each of ATen's operators in the order they were declared in, with its settings.
void select(const std::string& chosen, uint64_t word) {
  settings.store(word, std::memory_order_relaxed);
  size_t next = 0;
  for (std::atomic<uint64_t>& sixty_four : switches()) {
    uint64_t bits = 0;
    if (next + sizeof bits <= chosen.size()) std::memcpy(&bits, chosen.data() + next, sizeof bits);
    next += sizeof bits;
    sixty_four.store(bits, std::memory_order_relaxed);
  }
}

// torch warns of every kernel that is overridden, which is what was asked for.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The kernel that was there is fetched anew only where it may have changed: torch keeps a note of every fetch.
void install(const std::string& name, bool changed) {
  State& state = state_of(name);
  if (state.library) return;
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  const bool unknown = changed || state.provisional || !state.kernel;
  if (unknown && state.is_atens() && state.handle.hasComputedKernelForDispatchKey(state.key)) {
    std::atomic_store(
        &state.kernel,
        std::make_shared<c10::SafeKernelFunction>(state.handle.getComputedKernelForDispatchKey(state.key)));
    state.provisional = changed;
  }
  state.library = std::make_unique<torch::Library>(torch::Library::IMPL, state.space, state.key, "tritonite", 0);
  state.library->impl(state.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

// To be called when an operator outside ATen has its gradient.
void install_gate(const std::string& name) {
  State& state = state_of(name);
  const auto key = state.key == c10::DispatchKey::CUDA ? c10::DispatchKey::AutogradCUDA : c10::DispatchKey::AutogradCPU;
  state.gradient = std::make_shared<c10::SafeKernelFunction>(state.handle.getComputedKernelForDispatchKey(key));
  state.gate = std::make_unique<torch::Library>(torch::Library::IMPL, state.space, key, "tritonite", 0);
  state.gate->impl(state.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&pass_autograd>());
}

void uninstall(const std::string& name) {
  state_of(name).library.reset();
}

void clear(const std::string& name) {
  State& state = state_of(name);
  std::list<Entry> dropped;
  std::lock_guard<std::mutex> lock(plans_mutex);
  state.found.clear();
  dropped.swap(state.plans);
}

// What is kept for a call with these arguments: "plan", "decline", or "nothing".
std::string kept(const std::string& name, const py::list& values) {
  State& state = state_of(name);
  Stack stack;
  const auto& arguments = state.handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const py::handle value = values[i];
    const bool number = PyLong_Check(value.ptr()) || PyFloat_Check(value.ptr());
    if (number && arguments[i].real_type()->kind() == c10::TypeKind::TensorType) {
      at::Tensor wrapped = at::scalar_to_tensor(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
      wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
      stack.emplace_back(std::move(wrapped));
    } else {
      stack.push_back(torch::jit::toIValue(value, arguments[i].real_type()));
    }
  }
  Call call;
  const auto plan = key_call(state, stack, stack.size(), call) ? look_up(state, call) : nullptr;
  return !plan ? "nothing" : plan->declined ? "decline" : "plan";
}

// Zeros for an operator that it has not been told of.
py::tuple counts(const std::string& name) {
  if (!by_name().count(name)) return py::make_tuple(0, py::dict(), 0);
  State& state = state_of(name);
  std::vector<std::pair<std::string, uint64_t>> reasons;
  size_t plans = 0;
  {
    // Making Python objects may run a collection, and that any code.
    std::lock_guard<std::mutex> lock(plans_mutex);
    for (const auto& reason : state.reasons) reasons.emplace_back(reason.first, reason.second->load());
    plans = state.plans.size();
  }
  py::dict declined;
  for (const auto& reason : reasons) {
    if (reason.second) declined[py::str(reason.first)] = reason.second;
  }
  return py::make_tuple(state.replayed.load(), declined, plans);
}

void reset_counts(const std::string& name) {
  if (!by_name().count(name)) return;
  State& state = state_of(name);
  state.replayed = 0;
  std::lock_guard<std::mutex> lock(plans_mutex);
  for (const auto& reason : state.reasons) reason.second->store(0);
}

void set_launch_hooks(const std::vector<py::list>& hooks) {
  launch_hooks.clear();
  for (py::list list : hooks) launch_hooks.push_back(list.release().ptr());
}

bool set_inside_kernel(bool inside) {
  return std::exchange(inside_kernel, inside);
}

}  // namespace

PYBIND11_MODULE(tritonite_dispatcher, module) {
  // A child that is forked while another thread holds the lock would wait for ever.
  pthread_atfork([] { plans_mutex.lock(); }, [] { plans_mutex.unlock(); }, [] { plans_mutex.unlock(); });
  module.def("declare", &declare);
  module.def("redeclare", &redeclare);
  module.def("install", &install);
  module.def("install_gate", &install_gate);
  module.def("select", [](const py::bytes& chosen, uint64_t word) { select(chosen, word); });
  module.def("set_active", [](const std::string& name, bool active) { state_of(name).set_active(active); });
  module.def("uninstall", &uninstall);
  module.def("clear", &clear);
  module.def("kept", &kept);
  module.def("counts", &counts);
  module.def("reset_counts", &reset_counts);
  module.def("set_inside_kernel", &set_inside_kernel);
  module.def("set_launch_hooks", &set_launch_hooks);
  module.def("draw", &draw_from);
  module.def("set_poison", [](bool on) { poison = on; });
  module.def("set_most_plans", [](size_t most) { most_plans = most; });
}
