// The state of overridden operators: ATen's kernels, switches, plans and counters.

#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "plan.h"

namespace {

using Words = c10::SmallVector<uint64_t, 64>;

// How much of a number in an argument a key holds, as in symbols.py: its value, its type, or its type and whether it is
// 0, 1 or neither. A call with a CPU tensor that the host function reads has no key.
enum SlotKind : uint8_t { kPinned = 0, kTypeOnly = 1, kZeroOrOne = 2, kReadOnHost = 3 };

struct Entry {
  uint64_t hash;
  Words words;
  std::shared_ptr<const Plan> plan;
};

// An overridden operator. Made once and never freed, because calls may be running at any time.
struct State {
  State(c10::OperatorHandle handle, std::string space, std::string name)
      : handle(std::move(handle)), space(std::move(space)), name(std::move(name)), label("tritonite::" + this->name) {}

  // False for operators outside ATen, which have no other kernel to fall back to.
  bool is_atens() const {
    return space == "aten";
  }

  c10::OperatorHandle handle;
  std::string space, name, label;
  c10::DispatchKey key = c10::DispatchKey::CUDA;
  // The type of device of the key, on which the kernels run.
  c10::DeviceType device = c10::DeviceType::CUDA;
  // By argument: whether it is a tensor or a list of tensors, and whether the operator writes it.
  std::vector<bool> tensor, written;
  // Whether the kernel increments version counters of written lists, which PyTorch leaves to _foreach_ kernels.
  bool versions = false;
  // By argument: the SlotKind.
  std::vector<uint8_t> slots;
  // The word and the bit of the switch: set if the operator is in the selection in force, else ATen's kernel runs.
  std::atomic<uint64_t>* switches = nullptr;
  uint64_t bit = 0;
  // `install.python.recording`: runs the host function and returns a plan.
  PyObject* record = nullptr;
  std::shared_ptr<c10::SafeKernelFunction> kernel;
  // For an operator outside ATen: autograd in Python, which runs only if a gradient is needed.
  std::shared_ptr<c10::SafeKernelFunction> gradient;
  // Whether `kernel` may have been registered by a user's Python code, and so has to be fetched again.
  bool provisional = false;
  std::unique_ptr<torch::Library> library, gate;
  // The plans, most recently used first, and where they are by hash.
  std::list<Entry> plans;
  std::unordered_map<uint64_t, std::vector<std::list<Entry>::iterator>> by_hash;
  std::atomic<uint64_t> replayed{0};
  std::unordered_map<std::string, std::unique_ptr<std::atomic<uint64_t>>> reasons;

  bool active() const { return switches->load(std::memory_order_relaxed) & bit; }

  void set_active(bool on) {
    on ? switches->fetch_or(bit) : switches->fetch_and(~bit);
  }
};

// Guards the plans of all operators, for the length of a look-up or an insertion.
std::mutex plans_mutex;
size_t most_plans = 1024;
std::atomic<bool> poison{false};
// The settings in force: `Settings.bits` of contract.py.
std::atomic<uint64_t> settings{0};
thread_local bool inside_kernel = false;
// Triton's lists of launch hooks, which a profiler fills, for example.
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

}  // namespace
