// What a device gives the dispatcher: a table of C functions, its driver. Includes neither PyTorch's nor a vendor's
// headers, so that a plug-in's library needs this file alone.
//
// CUDA and HIP have tables of ours. A plug-in's shared library exports one as
//
//     extern "C" const tritonite::Driver* tritonite_driver(const char** error);
//
// which returns a table that stays valid, or null with the reason in `error`. The entries have the signatures of CUDA's
// functions, so that CUDA's table points to these functions themselves and a launch passes through no other.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tritonite {

struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};

// CUDA's CUlaunchConfig. `shared` is in bytes.
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

// c10::Stream, or a vendor's class of the same two words, such as c10::cuda::CUDAStream.
struct TorchStream {
  int64_t words[2];
};

// The version of the table below, which rises with every change of it.
constexpr unsigned kDriverVersion = 1;

// Functions return 0, or a code for which `error_string` has a text.
struct Driver {
  unsigned version = kDriverVersion;
  // Makes a module of a compiled kernel's file, finds a function of the module, and frees the module.
  int (*load_module)(void** module, const void* image) = nullptr;
  int (*find_function)(void** function, void* module, const char* name) = nullptr;
  int (*unload_module)(void* module) = nullptr;
  // Launches a function with pointers to the values of its parameters, which are read before it returns. The last
  // argument is null.
  int (*launch_kernel)(const LaunchConfig*, void* function, void** parameters, void** extra) = nullptr;
  // Null, or called with the code of a failed launch. Returns 0 if the launch shall be tried once more.
  int (*recover)(int code, int device) = nullptr;
  // PyTorch's current stream of a device for this thread, and the handle of a stream for launches.
  TorchStream (*current_stream)(signed char device) = nullptr;
  void* (*raw_stream)(const TorchStream*) = nullptr;
  // Null, or writes whether launches on a stream are captured into a graph.
  int (*stream_is_capturing)(void* stream, int* status) = nullptr;
  // Sets bytes of device memory, and copies bytes to the host, in the order of the stream.
  int (*fill)(uintptr_t, unsigned char value, size_t bytes, void* stream) = nullptr;
  int (*copy_to_host)(void* to, uintptr_t from, size_t bytes, void* stream) = nullptr;
  // Waits for all work of a stream.
  int (*wait)(void* stream) = nullptr;
  int (*error_string)(int code, const char** text) = nullptr;
  // Null without tensor descriptors, as in CUDA drivers older than 12.0.
  int (*replace_address)(TensorMap*, void* address) = nullptr;

  void* stream(signed char device) const {
    const TorchStream current = current_stream(device);
    return raw_stream(&current);
  }

  bool is_capturing(signed char device) const {
    int status = 0;
    return stream_is_capturing && stream_is_capturing(stream(device), &status) == 0 && status != 0;
  }

  int launch(const LaunchConfig& config, void* function, void** parameters, signed char device) const {
    const int code = launch_kernel(&config, function, parameters, nullptr);
    if (code == 0 || !recover || recover(code, device) != 0) return code;
    return launch_kernel(&config, function, parameters, nullptr);
  }

  std::string describe(int code) const {
    const char* text = nullptr;
    return error_string(code, &text) == 0 && text ? text : "error " + std::to_string(code);
  }
};

}  // namespace tritonite
