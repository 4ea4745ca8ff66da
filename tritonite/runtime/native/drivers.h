// The driver of each device type: ours, or that of a plug-in's library.

#pragma once

#include <array>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

#include "cuda.h"
#include "hip.h"

namespace {

namespace py = pybind11;
using namespace tritonite;

// By device type. Set before the first plan, and kept, because plans point to their driver.
std::array<const Driver*, static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)> drivers{};

// Returns the driver of a device; null for one whose kernels run on the host.
const Driver* driver_of(c10::Device device) {
  return drivers[static_cast<size_t>(device.type())];
}

// Returns the table of a plug-in's library.
const Driver* driver_in(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  TORCH_CHECK(library, "tritonite: a device's driver cannot be loaded: ", dlerror());
  const auto give = reinterpret_cast<const Driver* (*)(const char**)>(dlsym(library, "tritonite_driver"));
  TORCH_CHECK(give, "tritonite: ", path, " exports no tritonite_driver");
  const char* error = nullptr;
  const Driver* driver = give(&error);
  TORCH_CHECK(driver, "tritonite: ", path, " gives no driver: ", error ? error : "it does not say why");
  // Numbers as strings: with a libstdc++ linked statically, as some compilers do, a stream of numbers ends the process.
  TORCH_CHECK(
      driver->version == kDriverVersion, "tritonite: ", path, " was built for version ", std::to_string(driver->version),
      " of driver.h; this is version ", std::to_string(kDriverVersion));
  TORCH_CHECK(
      driver->load_module && driver->find_function && driver->unload_module && driver->launch_kernel &&
          driver->current_stream && driver->raw_stream && driver->fill && driver->copy_to_host && driver->wait &&
          driver->error_string,
      "tritonite: the driver of ", path, " lacks a function that driver.h does not allow to be null");
  return driver;
}

// Has devices of PyTorch's type `type` launch by a driver: "cuda", "hip" or the path of a plug-in's library.
void use_driver(const std::string& type, const std::string& driver) {
  const bool ours = driver == "cuda" || driver == "hip";
  if (!ours) {
    // Plans allocate their buffers in C++, by the allocator behind the device's storages.
    TORCH_CHECK(
        at::empty({1}, at::Device(type)).storage().allocator(),
        "tritonite: PyTorch's backend of device type ", type, " gives tensors whose storages have no allocator: ",
        "expected an allocator in C++, by which plans allocate");
  }
  drivers[static_cast<size_t>(c10::Device(type).type())] =
      driver == "cuda" ? cuda_driver() : driver == "hip" ? hip_driver() : driver_in(driver);
}

// Runs a kernel whose parameters are `parameters` null pointers, in one block, and waits for it. Raises an error with
// the name of the step that fails. `tritonite doctor` tries a driver in this way.
void try_driver(
    const std::string& device, const py::bytes& image, const std::string& name, unsigned threads, size_t parameters) {
  const c10::Device on(device);
  const Driver* driver = driver_of(on);
  TORCH_CHECK(driver, "tritonite: ", device, " has no native driver");
  const auto check = [&](const char* step, int code) {
    TORCH_CHECK(code == 0, "tritonite: ", step, " failed: ", driver->describe(code));
  };
  const std::string bytes = image;
  const auto index = static_cast<signed char>(on.has_index() ? on.index() : 0);
  void *module = nullptr, *function = nullptr;
  check("loading a kernel", driver->load_module(&module, bytes.data()));
  check("finding a kernel", driver->find_function(&function, module, name.c_str()));
  std::vector<void*> values(parameters, nullptr), pointers;
  for (void*& value : values) pointers.push_back(&value);
  LaunchConfig config{{1, 1, 1}, {threads, 1, 1}, 0, driver->stream(index), nullptr, 0};
  check("launching a kernel", driver->launch(config, function, pointers.data(), index));
  check("waiting for a kernel", driver->wait(config.stream));
  check("unloading a kernel", driver->unload_module(module));
}

}  // namespace
