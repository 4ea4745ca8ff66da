// A driver for memory of the host, with streams, tensor descriptors and failures on demand, and "kernels" for graphs.

#include "driver.h"

#include <atomic>
#include <cstring>

namespace {

using namespace tritonite;

thread_local int64_t stream = 1, lookups = 0;
// The sum of 10^i * stream over the launches of a thread, i from 0.
thread_local int64_t streams = 0, digit = 1;
std::atomic<int64_t> addressed{0}, until_failure{-1}, until_refusal{-1};

// Returns 1 once, when a count reaches 0.
int fails(std::atomic<int64_t>& count) {
  return count >= 0 && count-- == 0;
}

int launch(const LaunchConfig* config, void* function, void** parameters, void**) {
  streams += digit * reinterpret_cast<int64_t>(config->stream);
  digit *= 10;
  if (fails(until_failure)) return 1;
  reinterpret_cast<void (*)(void**)>(function)(parameters);
  return 0;
}

int address(TensorMap* map, void* to) {
  ++addressed;
  if (fails(until_refusal)) return 1;
  std::memcpy(map->bytes, &to, sizeof to);
  return 0;
}

TorchStream current(signed char) {
  ++lookups;
  return {{stream, 0}};
}

template <typename T>
T value(void** parameters, int i) {
  return *static_cast<T*>(parameters[i]);
}

}  // namespace

extern "C" {

// out[i] = x[i] + factor * y[i] for i < n
void stub_axpy(void** parameters) {
  const auto x = value<float*>(parameters, 0), y = value<float*>(parameters, 1), out = value<float*>(parameters, 2);
  const auto n = value<int64_t>(parameters, 3);
  const auto factor = value<double>(parameters, 4);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + static_cast<float>(factor) * y[i];
}

// out[i] = 2 * x[i] for i < n, where the first bytes of x's descriptor are its address.
void stub_double(void** parameters) {
  const float* x = nullptr;
  std::memcpy(&x, static_cast<TensorMap*>(parameters[0])->bytes, sizeof x);
  const auto out = value<float*>(parameters, 1);
  for (int64_t i = 0; i < value<int64_t>(parameters, 2); ++i) out[i] = 2 * x[i];
}

// out[0] = number
void stub_store(void** parameters) {
  *value<int64_t*>(parameters, 0) = value<int64_t>(parameters, 1);
}

void stub_set_stream(int64_t now) {
  stream = now;
}

// Returns the launches' streams in this thread since the last call, a digit each, the first launch's last.
int64_t stub_streams() {
  const int64_t taken = streams;
  streams = 0, digit = 1;
  return taken;
}

// Returns how often this thread has looked up its stream since the last call.
int64_t stub_lookups() {
  const int64_t taken = lookups;
  lookups = 0;
  return taken;
}

// Returns how many descriptors have got an address since the last call.
int64_t stub_addressed() {
  return addressed.exchange(0);
}

// Has one launch fail after `launches` more, and one replacement of a descriptor's address after `addresses` more.
void stub_fail(int64_t launches, int64_t addresses) {
  until_failure = launches, until_refusal = addresses;
}

const Driver* tritonite_driver(const char** error) {
  *error = nullptr;
  static Driver table;
  table.load_module = [](void** module, const void*) { return *module = nullptr, 0; };
  table.find_function = [](void**, void*, const char*) { return 1; };
  table.unload_module = [](void*) { return 0; };
  table.launch_kernel = &launch;
  table.current_stream = &current;
  table.raw_stream = [](const TorchStream* of) { return reinterpret_cast<void*>(of->words[0]); };
  table.fill = [](uintptr_t to, unsigned char value, size_t bytes, void*) {
    return std::memset(reinterpret_cast<void*>(to), value, bytes), 0;
  };
  table.copy_to_host = [](void* to, uintptr_t from, size_t bytes, void*) {
    return std::memcpy(to, reinterpret_cast<void*>(from), bytes), 0;
  };
  table.wait = [](void*) { return 0; };
  table.error_string = [](int, const char** text) { return *text = "no more", 0; };
  table.replace_address = &address;
  return &table;
}

}  // extern "C"
