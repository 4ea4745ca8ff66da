// All that is known of the operators that are overridden.

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

struct Entry {
  uint64_t hash;
  Words words;
  std::shared_ptr<const Plan> plan;
};

// All that is known of an overridden operator. Made once and never freed: calls may be under way at any time.
struct State {
  State(c10::OperatorHandle handle, std::string space, std::string name)
      : handle(std::move(handle)), space(std::move(space)), name(std::move(name)), label("tritonite::" + this->name) {}

  // ATen's, or of operators outside ATen, behind which there is no other kernel.
  bool is_atens() const {
    return space == "aten";
  }

  c10::OperatorHandle handle;
  std::string space, name, label;
  c10::DispatchKey key = c10::DispatchKey::CUDA;
  // By argument: whether it is a tensor or a list of them, and whether it is written.
  std::vector<bool> tensor, written;
  // By argument: of numbers plans hold the value (0), the type alone (1), or whether they are 0 or 1, too (2).
  std::vector<uint8_t> slot;
  // The bit that says whether it is in the selection that is in force. Others go to ATen's kernel.
  std::atomic<uint64_t>* switches = nullptr;
  uint64_t bit = 0;
  PyObject* record = nullptr;
  std::shared_ptr<c10::SafeKernelFunction> kernel;
  // Of an operator outside ATen what autograd does, in Python, where a gradient is wanted.
  std::shared_ptr<c10::SafeKernelFunction> gradient;
  bool provisional = false;
  std::unique_ptr<torch::Library> library, gate;
  std::list<Entry> plans;
  std::unordered_map<uint64_t, std::vector<std::list<Entry>::iterator>> found;
  std::atomic<uint64_t> replayed{0};
  std::unordered_map<std::string, std::unique_ptr<std::atomic<uint64_t>>> reasons;

  bool active() const { return switches->load(std::memory_order_relaxed) & bit; }

  void set_active(bool on) {
    on ? switches->fetch_or(bit) : switches->fetch_and(~bit);
  }
};

// Guards the plans of all operators; held for a look-up or an insertion.
std::mutex plans_mutex;
size_t most_plans = 1024;
std::atomic<bool> poison{false};
// What is asked of all calls alike: `Settings.bits` of call.py.
std::atomic<uint64_t> settings{0};
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

}  // namespace
