// The CUDA driver, loaded at run time, so that building needs no CUDA headers.

#pragma once

#include <dlfcn.h>

#include <string>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

namespace {

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

// CUDA's CUtensorMap, a tensor descriptor as a kernel parameter.
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
  // Null in drivers older than 12.0, which know no GPU with tensor descriptors.
  int (*replace_address)(TensorMap*, void*) = nullptr;
  // c10::cuda::getCurrentCUDAStream and c10::cuda::CUDAStream::stream, whose headers include CUDA's.
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
    // A thread without calls of CUDA's runtime has no context yet.
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

}  // namespace
