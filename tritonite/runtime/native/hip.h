// The driver of AMD GPUs: ROCm's HIP, and PyTorch's current stream.

#pragma once

#include "driver.h"
#include "libraries.h"

namespace {

struct HipFunctions {
  int (*launch)(
      void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**) = nullptr;
  int (*launch_cooperative)(
      void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**) = nullptr;
  const char* (*error_string)(int) = nullptr;
} hip;

// Launches by the functions that every ROCm has. They serve cooperative grids, and no other attribute of a launch.
int launch_hip(const tritonite::LaunchConfig* config, void* function, void** parameters, void** extra) {
  constexpr int kNotSupported = 801;
  bool cooperative = false;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id != tritonite::kCooperative) return kNotSupported;
    cooperative = config->attributes[i].value[0] != 0;
  }
  const auto& [x, y, z] = config->grid;
  const auto& [threads_x, threads_y, threads_z] = config->block;
  if (cooperative) {
    return hip.launch_cooperative(
        function, x, y, z, threads_x, threads_y, threads_z, config->shared, config->stream, parameters);
  }
  return hip.launch(
      function, x, y, z, threads_x, threads_y, threads_z, config->shared, config->stream, parameters, extra);
}

int describe_hip(int code, const char** text) {
  *text = hip.error_string(code);
  return 0;
}

const tritonite::Driver* hip_driver() {
  static const tritonite::Driver loaded = [] {
    tritonite::Driver found;
    // PyTorch's wheels have the first name, ROCm's packages the others.
    void* runtime = open_library({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"});
    TORCH_CHECK(runtime, "tritonite: ROCm's libamdhip64.so cannot be loaded: ", dlerror());
    void* torch_hip = dlopen("libc10_hip.so", RTLD_LAZY | RTLD_NOLOAD);
    TORCH_CHECK(torch_hip, "tritonite: this PyTorch has no ROCm: libc10_hip.so is not loaded");
    find(runtime, {"hipModuleLoadData"}, found.load_module);
    find(runtime, {"hipModuleGetFunction"}, found.find_function);
    find(runtime, {"hipModuleUnload"}, found.unload_module);
    find(runtime, {"hipModuleLaunchKernel"}, hip.launch);
    find(runtime, {"hipModuleLaunchCooperativeKernel"}, hip.launch_cooperative);
    find(runtime, {"hipGetErrorString"}, hip.error_string);
    find(runtime, {"hipMemsetD8Async"}, found.fill);
    find(runtime, {"hipMemcpyDtoHAsync"}, found.copy_to_host);
    find(runtime, {"hipStreamSynchronize"}, found.wait);
    find(runtime, {"hipStreamIsCapturing"}, found.stream_is_capturing);
    found.launch_kernel = &launch_hip;
    found.error_string = &describe_hip;
    // The stream of torch.cuda, which is a hipStream_t: c10::hip::getCurrentHIPStream and c10::hip::HIPStream::stream
    // before torch 2.11, and from then on the names that cuda.h has.
    find(
        torch_hip, {"_ZN3c103hip19getCurrentHIPStreamEa", "_ZN3c104cuda20getCurrentCUDAStreamEa"},
        found.current_stream);
    find(torch_hip, {"_ZNK3c103hip9HIPStream6streamEv", "_ZNK3c104cuda10CUDAStream6streamEv"}, found.raw_stream);
    return found;
  }();
  return &loaded;
}

}  // namespace
