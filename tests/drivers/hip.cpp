// A stand-in for ROCm's libamdhip64.so: notes its calls, runs "kernels" that are C functions, and fails on demand.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

std::string calls, failing;

// Notes a call. Returns hipErrorInvalidValue if the function is to fail, else 0.
int called(const char* name, const std::string& arguments) {
  calls += std::string(name) + "(" + arguments + ")\n";
  return failing == name;
}

std::string text(const char* format, unsigned a, unsigned b, unsigned c) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, a, b, c);
  return buffer;
}

void nothing(void**) {}

}  // namespace

extern "C" {

// out[i] = x[i] + y[i] for i < n
void stub_add(void** parameters) {
  const auto pointer = [&](int i) { return *static_cast<float**>(parameters[i]); };
  const auto n = *static_cast<int64_t*>(parameters[3]);
  for (int64_t i = 0; i < n; ++i) pointer(2)[i] = pointer(0)[i] + pointer(1)[i];
}

// Adds 3 to a counter.
void stub_count(void** parameters) {
  **static_cast<int64_t**>(parameters[0]) += 3;
}

const char* stub_calls() {
  static std::string taken;
  taken.swap(calls);
  calls.clear();
  return taken.c_str();
}

void stub_fail(const char* name) {
  failing = name;
}

int hipModuleLoadData(void** module, const void* image) {
  *module = reinterpret_cast<void*>(0x10);
  return called("hipModuleLoadData", static_cast<const char*>(image));
}

int hipModuleGetFunction(void** function, void* module, const char* name) {
  *function = reinterpret_cast<void*>(&nothing);
  return called("hipModuleGetFunction", std::string(name) + (module == reinterpret_cast<void*>(0x10) ? "" : "?"));
}

int hipModuleUnload(void*) {
  return called("hipModuleUnload", "");
}

int launched(
    const char* name, void* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
    unsigned shared, void* stream, void** parameters) {
  const auto handle = static_cast<unsigned>(reinterpret_cast<uintptr_t>(stream));
  const int code = called(
      name, text("%u %u %u, ", x, y, z) + text("%u %u %u, ", tx, ty, tz) + text("%u, stream %u", shared, handle, 0));
  if (!code) reinterpret_cast<void (*)(void**)>(function)(parameters);
  return code;
}

int hipModuleLaunchKernel(
    void* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
    void* stream, void** parameters, void** extra) {
  return extra ? 1 : launched("hipModuleLaunchKernel", function, x, y, z, tx, ty, tz, shared, stream, parameters);
}

int hipModuleLaunchCooperativeKernel(
    void* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
    void* stream, void** parameters) {
  return launched("hipModuleLaunchCooperativeKernel", function, x, y, z, tx, ty, tz, shared, stream, parameters);
}

const char* hipGetErrorString(int code) {
  return code == 1 ? "invalid argument" : code == 801 ? "operation not supported" : "unknown error";
}

int hipMemsetD8Async(void* to, unsigned char value, size_t bytes, void*) {
  const int code = called("hipMemsetD8Async", text("%u, %u", value, static_cast<unsigned>(bytes), 0));
  if (!code) std::memset(to, value, bytes);
  return code;
}

int hipMemcpyDtoHAsync(void* to, void* from, size_t bytes, void*) {
  const int code = called("hipMemcpyDtoHAsync", text("%u", static_cast<unsigned>(bytes), 0, 0));
  if (!code) std::memcpy(to, from, bytes);
  return code;
}

int hipStreamSynchronize(void*) {
  return called("hipStreamSynchronize", "");
}

int hipStreamIsCapturing(void*, int* status) {
  *status = failing == "captured";
  return called("hipStreamIsCapturing", "");
}

}  // extern "C"
