// A plug-in's driver for memory of the host: a launch calls a C function.

#include "driver.h"

#include <cstring>

namespace {

using namespace tritonite;

int launch(const LaunchConfig*, void* function, void** parameters, void**) {
  reinterpret_cast<void (*)(void**)>(function)(parameters);
  return 0;
}

int fill(uintptr_t to, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(to), value, bytes);
  return 0;
}

int copy(void* to, uintptr_t from, size_t bytes, void*) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}

}  // namespace

extern "C" const Driver* tritonite_driver(const char** error) {
#ifdef NOT_HERE
  *error = "no such device";
  return nullptr;
#else
  *error = nullptr;
#endif
  static Driver table;
  table.load_module = [](void** module, const void*) { return *module = nullptr, 0; };
  table.find_function = [](void**, void*, const char*) { return 7; };
  table.unload_module = [](void*) { return 0; };
  table.launch_kernel = &launch;
  table.current_stream = [](signed char) { return TorchStream{}; };
  table.raw_stream = [](const TorchStream*) { return static_cast<void*>(nullptr); };
  table.fill = &fill;
  table.copy_to_host = &copy;
  table.wait = [](void*) { return 0; };
  table.error_string = [](int code, const char** text) { return *text = code == 7 ? "no kernels here" : nullptr, 0; };
#ifdef OF_ANOTHER_VERSION
  table.version += 1;
#endif
#ifdef WITHOUT_FILL
  table.fill = nullptr;
#endif
  return &table;
}
