// The driver of NVIDIA GPUs: CUDA's, and PyTorch's current stream.

#pragma once

#include "driver.h"
#include "libraries.h"

namespace {

// A thread without calls of CUDA's runtime has no context yet. Its first launch sets the device's.
struct CudaContexts {
  int (*get_device)(int*, int) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*set)(void*) = nullptr;
} cuda_contexts;

int set_cuda_context(int code, int device) {
  constexpr int kInvalidContext = 201;
  int ordinal = 0;
  void* context = nullptr;
  if (code != kInvalidContext) return code;
  return cuda_contexts.get_device(&ordinal, device) || cuda_contexts.retain(&context, ordinal) ||
      cuda_contexts.set(context);
}

const tritonite::Driver* cuda_driver() {
  static const tritonite::Driver loaded = [] {
    tritonite::Driver found;
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    TORCH_CHECK(cuda, "tritonite: the CUDA driver cannot be loaded: ", dlerror());
    void* torch_cuda = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    TORCH_CHECK(torch_cuda, "tritonite: this PyTorch has no CUDA: libc10_cuda.so is not loaded");
    find(cuda, {"cuModuleLoadData"}, found.load_module);
    find(cuda, {"cuModuleGetFunction"}, found.find_function);
    find(cuda, {"cuModuleUnload"}, found.unload_module);
    find(cuda, {"cuLaunchKernelEx"}, found.launch_kernel);
    find(cuda, {"cuGetErrorString"}, found.error_string);
    find(cuda, {"cuMemsetD8Async"}, found.fill);
    find(cuda, {"cuMemcpyDtoHAsync_v2"}, found.copy_to_host);
    find(cuda, {"cuStreamSynchronize"}, found.wait);
    find(cuda, {"cuStreamIsCapturing"}, found.stream_is_capturing);
    find(cuda, {"cuDeviceGet"}, cuda_contexts.get_device);
    find(cuda, {"cuDevicePrimaryCtxRetain"}, cuda_contexts.retain);
    find(cuda, {"cuCtxSetCurrent"}, cuda_contexts.set);
    found.recover = &set_cuda_context;
    found.replace_address = reinterpret_cast<decltype(found.replace_address)>(dlsym(cuda, "cuTensorMapReplaceAddress"));
    // c10::cuda::getCurrentCUDAStream and c10::cuda::CUDAStream::stream, whose headers include CUDA's.
    find(torch_cuda, {"_ZN3c104cuda20getCurrentCUDAStreamEa"}, found.current_stream);
    find(torch_cuda, {"_ZNK3c104cuda10CUDAStream6streamEv"}, found.raw_stream);
    return found;
  }();
  return &loaded;
}

}  // namespace
