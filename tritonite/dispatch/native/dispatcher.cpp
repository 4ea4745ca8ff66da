// One boxed kernel for every overridden operator. It keys the call, finds the plan recorded for that key and replays it:
// allocations, launches, results. Python runs when there is no plan yet; ATen's own kernel where the plan says so.

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>
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
  enum Kind { kPointer, kConstant, kSlot, kDrawn, kDescriptor } kind = kConstant;
  Source source;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  // Of a slot, of a drawn number, or of a descriptor among the launch's.
  size_t index = 0;
  uint64_t bits = 0;
};

// A number among the arguments that plans do not hold.
struct Slot {
  size_t argument = 0;
  bool floating = false;
  bool bounded = false;
  int64_t low = 0, high = 0;
};

struct Launch {
  void* function = nullptr;
  LaunchConfig config{};
  std::vector<LaunchAttribute> attributes;
  std::vector<Parameter> parameters;
  std::vector<TensorMap> descriptors;
  // Whose `function` is: a compiled kernel, which unloads it when it goes; where there is no function, the host driver's,
  // to be called with tensors and numbers. Never released without the GIL.
  PyObject* owner = nullptr;
};

struct Buffer {
  c10::SmallVector<int64_t, 6> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Allocator* allocator = nullptr;
  c10::DispatchKeySet keys;
};

struct Result {
  Source source;
  bool whole = true;
  bool absent = false;
  c10::SmallVector<int64_t, 6> sizes, strides;
};

struct Plan {
  std::atomic<uint64_t>* declined = nullptr;
  c10::Device device = c10::kCPU;
  std::vector<Slot> slots;
  // For each time that the call draws on a generator, how far it advances it.
  std::vector<uint64_t> draws;
  std::vector<Buffer> buffers;
  std::vector<Launch> launches;
  std::vector<Result> results;

  ~Plan() {
    if (launches.empty() || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    for (const Launch& launch : launches) Py_XDECREF(launch.owner);
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
  State(c10::OperatorHandle handle, std::string name) : handle(std::move(handle)), name(std::move(name)) {}

  c10::OperatorHandle handle;
  std::string name;
  c10::DispatchKey key = c10::DispatchKey::CUDA;
  // By argument: whether it is a tensor or a list of them, is written, is a number that plans do not hold.
  std::vector<bool> tensor, written, slot;
  PyObject* record = nullptr;
  std::shared_ptr<c10::SafeKernelFunction> kernel;
  bool provisional = false;
  std::unique_ptr<torch::Library> library;
  std::list<Entry> plans;
  std::unordered_map<uint64_t, std::vector<std::list<Entry>::iterator>> found;
  std::atomic<uint64_t> replayed{0};
  std::unordered_map<std::string, std::unique_ptr<std::atomic<uint64_t>>> reasons;
};

// Guards the plans of all operators; held for a look-up or an insertion.
std::mutex plans_mutex;
size_t most_plans = 1024;
std::atomic<bool> poison{false};
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

struct Number {
  bool floating = false, known = true;
  int64_t integer = 0;
  double real = 0;

  double as_real() const {
    return floating ? real : static_cast<double>(integer);
  }
};

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

// Appends what a tensor contributes to the key; false where calls like this cannot be told apart.
bool key_tensor(const State& state, const at::Tensor& tensor, bool slot, bool written, Call& call) {
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
    if (slot) return true;
    const Number number = number_of(tensor);
    words.push_back(number.floating ? bits_of(number.real) : static_cast<uint64_t>(number.integer));
    return number.known;
  }
  const c10::Device device = tensor.device();
  const uint64_t place = static_cast<uint64_t>(device.type()) << 16 | static_cast<uint64_t>(device.index() & 0xff) << 24;
  if (impl->layout() != c10::kStrided || impl->has_symbolic_sizes_strides() || !impl->has_storage() ||
      impl->is_python_dispatch() || impl->key_set().has(c10::DispatchKey::NestedTensorCUDA) ||
      impl->key_set().has(c10::DispatchKey::NestedTensorCPU)) {
    words.push_back(kOpaqueTensor | dtype | place | static_cast<uint64_t>(impl->layout()) << 32);
    return !impl->is_python_dispatch() && !impl->has_symbolic_sizes_strides();
  }
  call.leaves.back().strided = true;
  const auto pointer = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  words.push_back(
      kTensor | dtype | place | static_cast<uint64_t>((pointer & 15) != 0) << 32 |
      static_cast<uint64_t>(impl->dim()) << 40);
  const auto sizes = impl->sizes(), strides = impl->strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    words.push_back(sizes[i]);
    words.push_back(strides[i]);
  }
  return true;
}

bool key_value(const State& state, const IValue& value, size_t argument, Call& call) {
  Words& words = call.words;
  const bool slot = state.slot[argument];
  if (value.isTensor()) return key_tensor(state, value.toTensor(), slot, state.written[argument], call);
  if (value.isNone()) {
    words.push_back(kNone);
    if (state.tensor[argument]) call.leaves.push_back({nullptr, false, false});
  } else if (value.isInt()) {
    words.push_back(slot ? kSlotNumber | kInt << 8 : kInt);
    if (!slot) words.push_back(value.toInt());
  } else if (value.isDouble()) {
    words.push_back(slot ? kSlotNumber | kDouble << 8 : kDouble);
    if (!slot) words.push_back(bits_of(value.toDouble()));
  } else if (value.isBool()) {
    words.push_back(slot ? kSlotNumber | kBool << 8 : kBool);
    if (!slot) words.push_back(value.toBool());
  } else if (value.isComplexDouble()) {
    words.push_back(kComplex);
    words.push_back(bits_of(value.toComplexDouble().real()));
    words.push_back(bits_of(value.toComplexDouble().imag()));
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

// Which arguments are at one address, and by how much a written one overlaps another.
void key_aliases(Call& call) {
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
  call.words.push_back(ambient());
  const IValue* first = stack.data() + (stack.size() - arguments);
  for (size_t i = 0; i < arguments; ++i) {
    if (!key_value(state, first[i], i, call)) return false;
  }
  if (call.leaves.size() > 1) key_aliases(call);
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

struct Replay {
  const State& state;
  const Plan& plan;
  const Call& call;
  c10::SmallVector<at::Tensor, 4> buffers;
  c10::SmallVector<Number, 8> numbers;
  // Seed and offset of each draw.
  c10::SmallVector<uint64_t, 2> drawn;

  const at::Tensor& base(const Source& source) const {
    return source.buffer ? buffers[source.index] : *call.leaves[source.index].tensor;
  }

  // False where a number does not fit what the kernel was made for.
  bool read_slots(const Stack& stack, size_t arguments) {
    const IValue* first = stack.data() + (stack.size() - arguments);
    for (const Slot& slot : plan.slots) {
      const IValue& value = first[slot.argument];
      const Number number = value.isTensor() ? number_of(value.toTensor()) : number_of(value.toScalar());
      if (!number.known || (slot.bounded && (number.integer < slot.low || number.integer > slot.high))) return false;
      numbers.push_back(number);
    }
    return true;
  }

  // False while a graph is captured, whose replays would repeat the numbers.
  bool draw(const Stack& stack, size_t arguments) {
    if (plan.draws.empty()) return true;
    if (!plan.device.is_cpu() && driver().is_capturing(plan.device.index())) return false;
    at::Generator generator = at::globalContext().defaultGenerator(plan.device);
    for (size_t i = stack.size() - arguments; i < stack.size(); ++i) {
      if (stack[i].isGenerator()) generator = stack[i].toGenerator();
    }
    for (const uint64_t advance : plan.draws) {
      const auto state = draw_from(generator, advance);
      drawn.push_back(state.first);
      drawn.push_back(state.second);
    }
    return true;
  }

  void allocate() {
    for (const Buffer& buffer : plan.buffers) {
      buffers.emplace_back(
          at::detail::empty_strided_generic(buffer.sizes, buffer.strides, buffer.allocator, buffer.keys, buffer.dtype));
      if (poison.load(std::memory_order_relaxed)) fill(buffers.back());
    }
  }

  void fill(const at::Tensor& tensor) const {
    void* data = tensor.mutable_data_ptr();
    const size_t bytes = tensor.storage().nbytes();
    if (plan.device.is_cpu()) {
      std::memset(data, 0xff, bytes);
    } else if (bytes) {
      driver().fill(reinterpret_cast<uintptr_t>(data), 0xff, bytes, driver().stream(plan.device.index()));
    }
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
    return "tritonite: launching the kernel of aten::" + state.name + " failed: ";
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
        case Parameter::kDescriptor: {
          TensorMap* map = &descriptors[parameter.index];
          pointers[i] = map;
          const int code = driver().replace_address(map, reinterpret_cast<void*>(address(parameter.source)));
          TORCH_CHECK(code == 0, failed(), driver().describe(code));
          break;
        }
      }
    }
    LaunchConfig config = launch.config;
    config.attributes = const_cast<LaunchAttribute*>(launch.attributes.data());
    config.attribute_count = launch.attributes.size();
    config.stream = driver().stream(plan.device.index());
    const int code = driver().launch(config, launch.function, pointers.data(), plan.device.index());
    TORCH_CHECK(code == 0, failed(), driver().describe(code));
  }

  void launch_on_host(const Launch& launch) const {
    py::gil_scoped_acquire gil;
    py::list values;
    for (const Parameter& parameter : launch.parameters) {
      if (parameter.kind == Parameter::kPointer) {
        const at::Tensor& from = base(parameter.source);
        const int64_t offset = element_offset(from, parameter.source.offset, parameter.dtype);
        values.append(py::cast(view_of(from, {1}, {1}, offset, parameter.dtype)));
      } else if (parameter.kind == Parameter::kSlot) {
        const Number& number = numbers[parameter.index];
        if (plan.slots[parameter.index].floating) values.append(py::float_(number.as_real()));
        else values.append(py::int_(number.integer));
      } else if (parameter.kind == Parameter::kDrawn) {
        values.append(py::int_(drawn[parameter.index]));
      }
    }
    try {
      py::handle(launch.owner)(values);
    } catch (py::error_already_set& error) {
      TORCH_CHECK(!error.matches(PyExc_Exception), failed(), error.what());
      throw;
    }
  }

  void run(Stack* stack, size_t arguments) {
    c10::OptionalDeviceGuard guard;
    if (!plan.device.is_cpu()) guard.reset_device(plan.device);
    allocate();
    for (const Launch& each : plan.launches) {
      if (each.function) launch(each);
      else launch_on_host(each);
    }
    c10::SmallVector<IValue, 4> results;
    for (const Result& result : plan.results) {
      if (result.absent) {
        results.emplace_back(at::Tensor());
        continue;
      }
      const at::Tensor& from = base(result.source);
      if (result.whole) {
        results.emplace_back(from);
        continue;
      }
      const int64_t offset = element_offset(from, result.source.offset, from.scalar_type());
      results.emplace_back(view_of(from, result.sizes, result.strides, offset, from.scalar_type()));
    }
    torch::jit::drop(*stack, arguments);
    for (IValue& result : results) stack->push_back(std::move(result));
  }
};

// ---- Recording -------------------------------------------------------------------------------------------------------

bool is_dtype(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::ScalarTypeType;
}

py::object to_python(const IValue& value, const c10::Argument& argument) {
  if (value.isInt() && is_dtype(argument)) return py::cast(static_cast<at::ScalarType>(value.toInt()));
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    return torch::jit::toPyObject(value.toTensor().item());
  }
  if (value.isTensor() && !value.toTensor().defined()) return py::none();
  return torch::jit::toPyObject(value);
}

c10::SmallVector<int64_t, 6> integers(const py::handle& values) {
  c10::SmallVector<int64_t, 6> result;
  for (const py::handle value : values) result.push_back(value.cast<int64_t>());
  return result;
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
  if (parts.size() == 1) {
    parameter.kind = Parameter::kSlot;
    parameter.index = parts[0].cast<size_t>();
    return parameter;
  }
  if (parts.size() == 2) {
    parameter.kind = Parameter::kDrawn;
    parameter.index = 2 * parts[0].cast<size_t>() + parts[1].cast<size_t>();
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
  parameter.dtype = reinterpret_cast<THPDtype*>(about.ptr())->scalar_type;
  return parameter;
}

// From a LaunchStep of plan.py.
Launch launch_of(const py::handle& described) {
  const auto parts = py::reinterpret_borrow<py::tuple>(described);
  Launch launch;
  if (!py::object(parts[2]).is_none()) launch.function = reinterpret_cast<void*>(parts[2].cast<uintptr_t>());
  const py::tuple grid = parts[1];
  const auto clusters = parts[5].cast<unsigned>();
  for (size_t i = 0; i < 3; ++i) {
    launch.config.grid[i] = grid[i].cast<unsigned>() * (i == 0 ? clusters : 1);
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
  for (const py::handle item : py::list(parts[0])) launch.parameters.push_back(parameter_of(item, launch));
  launch.owner = py::object(parts[8]).release().ptr();
  return launch;
}

std::shared_ptr<const Plan> plan_of(const py::handle& described) {
  auto plan = std::make_shared<Plan>();
  plan->device = reinterpret_cast<THPDevice*>(py::object(described.attr("device")).ptr())->device;
  for (const py::handle item : described.attr("slots")) {
    const auto parts = item.cast<py::tuple>();
    Slot slot{parts[0].cast<size_t>(), parts[1].cast<bool>(), !parts[2].is_none(), 0, 0};
    if (slot.bounded) {
      const auto limits = parts[2].cast<py::tuple>();
      slot.low = limits[0].cast<int64_t>();
      slot.high = limits[1].cast<int64_t>();
    }
    plan->slots.push_back(slot);
  }
  for (const py::handle item : described.attr("draws")) plan->draws.push_back(item.cast<uint64_t>());
  for (const py::handle item : described.attr("buffers")) {
    const auto like = item.cast<at::Tensor>();
    Buffer buffer;
    buffer.sizes.assign(like.sizes().begin(), like.sizes().end());
    buffer.strides.assign(like.strides().begin(), like.strides().end());
    buffer.dtype = like.scalar_type();
    buffer.allocator = like.storage().allocator();
    TORCH_CHECK(buffer.allocator, "tritonite: a buffer without an allocator");
    buffer.keys = c10::DispatchKeySet(c10::computeDispatchKey(buffer.dtype, c10::kStrided, like.device()));
    plan->buffers.push_back(std::move(buffer));
  }
  for (const py::handle item : described.attr("launches")) plan->launches.push_back(launch_of(item));
  for (const py::handle item : described.attr("results")) {
    if (item.is_none()) {
      plan->results.emplace_back();
      plan->results.back().absent = true;
      continue;
    }
    const auto parts = item.cast<py::tuple>();
    Result result;
    result.source = source_of(parts[0].cast<py::tuple>());
    result.whole = parts[1].is_none();
    if (!result.whole) {
      const auto layout = parts[1].cast<py::tuple>();
      result.sizes = integers(layout[0]);
      result.strides = integers(layout[1]);
    }
    plan->results.push_back(std::move(result));
  }
  return plan;
}

void call_kernel(const State& state, c10::DispatchKeySet keys, Stack* stack) {
  const auto kernel = std::atomic_load(&state.kernel);
  kernel->callBoxed(state.handle, keys, stack);
}

// Runs the operator's Python implementation under the recorder. Returns false where ATen has to serve the call.
bool record(State& state, const Call* call, Stack* stack, size_t arguments) {
  py::gil_scoped_acquire gil;
  py::list values;
  const auto& schema = state.handle.schema();
  for (size_t i = 0; i < arguments; ++i) {
    values.append(to_python((*stack)[stack->size() - arguments + i], schema.arguments()[i]));
  }
  const auto outcome = py::handle(state.record)(values).cast<py::tuple>();
  const auto kind = outcome[0].cast<std::string>();
  if (kind == "declined") {
    auto* counter = reason_counter(state, outcome[1].cast<std::string>());
    counter->fetch_add(1, std::memory_order_relaxed);
    if (call && outcome[2].cast<bool>()) {
      auto plan = std::make_shared<Plan>();
      plan->declined = counter;
      insert(state, *call, plan);
    }
    return false;
  }
  if (call && !outcome[2].is_none()) insert(state, *call, plan_of(outcome[2]));
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
  if (inside_kernel) return call_kernel(state, keys, stack);
  const size_t arguments = handle.schema().arguments().size();
  Call call;
  const bool keyed = key_call(state, *stack, arguments, call) && !launches_are_watched();
  if (call.declined) {
    reason_counter(state, call.declined)->fetch_add(1, std::memory_order_relaxed);
    return call_kernel(state, keys, stack);
  }
  if (const auto plan = keyed ? look_up(state, call) : nullptr) {
    if (plan->declined) {
      plan->declined->fetch_add(1, std::memory_order_relaxed);
      return call_kernel(state, keys, stack);
    }
    Replay replay{state, *plan, call, {}, {}, {}};
    const char* reason = !replay.read_slots(*stack, arguments) ? "number does not fit the dtype"
        : !replay.draw(*stack, arguments)                      ? "random numbers while a CUDA graph is captured"
                                                               : nullptr;
    if (reason) {
      reason_counter(state, reason)->fetch_add(1, std::memory_order_relaxed);
      return call_kernel(state, keys, stack);
    }
    replay.run(stack, arguments);
    state.replayed.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (!record(state, keyed ? &call : nullptr, stack, arguments)) call_kernel(state, keys, stack);
}

// ---- What Python calls -----------------------------------------------------------------------------------------------

std::unordered_map<std::string, State*>& by_name() {
  static auto* all = new std::unordered_map<std::string, State*>();
  return *all;
}

State& state_of(const std::string& name) {
  return *by_name().at(name);
}

std::vector<bool> flags(const py::list& values) {
  std::vector<bool> result;
  for (const py::handle value : values) result.push_back(value.cast<bool>());
  return result;
}

void declare(
    const std::string& name,
    const std::string& key,
    const py::list& tensors,
    const py::list& written,
    const py::list& slots,
    py::object callable) {
  if (by_name().count(name)) return;
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(), overload.c_str());
  auto state = std::make_unique<State>(handle, name);
  state->key = c10::parseDispatchKey(key);
  state->tensor = flags(tensors);
  state->written = flags(written);
  state->slot = flags(slots);
  state->record = callable.release().ptr();
  by_name()[name] = state.get();
  states()[&handle.schema()] = std::move(state);
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
  if (changed || state.provisional || !state.kernel) {
    std::atomic_store(
        &state.kernel,
        std::make_shared<c10::SafeKernelFunction>(state.handle.getComputedKernelForDispatchKey(state.key)));
    state.provisional = changed;
  }
  state.library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", state.key, "tritonite", 0);
  state.library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
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

py::tuple counts(const std::string& name) {
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
  module.def("install", &install);
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
