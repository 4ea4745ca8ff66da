// The boxed kernel of every overridden operator, and the functions that Python calls.
//
// `dispatch` makes the key of a call, looks up the plan for the key and replays it: allocations, launches, copies,
// results. Without a plan Python runs. ATen's kernel runs if the plan is a decline or the operator is not selected.
//
// All headers form one translation unit, so that the compiler can inline a call from its key to its launches.

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "audit.h"
#include "cache.h"
#include "execution.h"
#include "record.h"
#include "replay.h"

namespace {

// Calls ATen's kernel.
void call_kernel(const State& state, c10::DispatchKeySet keys, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(state.kernel, state.space, "::", state.name, " has no ATen kernel on this device");
  const auto kernel = std::atomic_load(&state.kernel);
  kernel->callBoxed(state.handle, keys, stack);
}

// Whether Triton has launch hooks, such as a profiler's: calls then go through Python. Reads the lists without the GIL,
// because a profiler may start at any time and only the lengths matter.
bool launches_are_watched() {
  for (PyObject* hooks : launch_hooks) {
    if (Py_SIZE(hooks) != 0) return true;
  }
  return false;
}

// Runs ATen's kernel if there are `keys`, else the operator from PyTorch's dispatcher on. Returns false: no kernel of
// Tritonite's ran.
bool fall_back(const State& state, c10::DispatchKeySet keys, Stack* stack) {
  if (keys.empty()) state.handle.callBoxed(stack);
  else call_kernel(state, keys, stack);
  return false;
}

// Serves a call: by the plan of its key, by the host function if there is no plan, or by `fall_back`.
// Returns whether a kernel of Tritonite's ran.
bool serve(State& state, c10::DispatchKeySet keys, Stack* stack) {
  const size_t arguments = state.handle.schema().arguments().size();
  Call call;
  const bool keyed = key_call(state, *stack, arguments, call) && !launches_are_watched();
  const char* reason = call.declined;
  if (const auto plan = keyed ? look_up(state, call) : nullptr) {
    if (plan->declined) {
      plan->declined->fetch_add(1, std::memory_order_relaxed);
      return fall_back(state, keys, stack);
    }
    Replay replay{&state, *plan, call, {}, {}, {}, {}};
    reason = replay.read_slots(*stack, arguments) ? replay.capture_forbids()
                                                  : "a number outside the range that kernels serve";
    if (!reason) {
      try {
        const ProfiledRange range(state);
        if (state.versions) {
          for (const auto& leaf : call.leaves) {
            if (leaf.written && leaf.tensor) leaf.tensor->unsafeGetTensorImpl()->bump_version();
          }
        }
        replay.run(stack, arguments);
        if (!repeats) state.replayed.fetch_add(1, std::memory_order_relaxed);
        return true;
      } catch (const Refused&) {
        reason = "a kernel refuses the data";
        if (!plan->lasting.empty() && state.is_atens()) {
          auto* counter = reason_counter(state, plan->lasting);
          counter->fetch_add(1, std::memory_order_relaxed);
          keep_decline(state, call, counter);
          return fall_back(state, keys, stack);
        }
      }
    }
  }
  if (reason && state.is_atens()) {
    reason_counter(state, reason)->fetch_add(1, std::memory_order_relaxed);
    return fall_back(state, keys, stack);
  }
  return record(state, call, keyed && !reason, stack, arguments) || fall_back(state, keys, stack);
}

void dispatch(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  // No lock: a state is complete before its operator is installed, and installation publishes it to other threads.
  State& state = *states().find(&handle.schema())->second;
  if (inside_kernel || !state.active()) return call_kernel(state, keys, stack);
  if (!auditing.load(std::memory_order_relaxed)) {
    serve(state, keys, stack);
    return;
  }
  serve_audited(state, stack, [&] { return serve(state, keys, stack); });
}

void serve_in_graph(State& state, Stack* stack) {
  serve(state, c10::DispatchKeySet(), stack);
}

bool wants_gradient(const IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() && value.toTensor().requires_grad();
  if (!value.isTensorList()) return false;
  const auto list = value.toListRef();
  return std::any_of(list.begin(), list.end(), wants_gradient);
}

// Skips an operator's autograd, which is in Python, for calls that need no gradient.
void pass_autograd(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  const State& state = *states().find(&handle.schema())->second;
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(handle.schema().arguments().size());
  if (c10::GradMode::is_enabled() && std::any_of(first, stack->end(), wants_gradient)) {
    return state.gradient->callBoxed(handle, keys, stack);
  }
  std::vector<IValue> written;
  for (size_t i = 0; i < state.written.size(); ++i) {
    if (state.written[i] && (first[i].isTensor() || first[i].isTensorList())) written.push_back(first[i]);
  }
  at::AutoDispatchBelowAutograd below;
  handle.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  // Lets autograd detect that a saved tensor has changed.
  const auto bump = [](const at::Tensor& tensor) {
    if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
  };
  for (const IValue& value : written) {
    if (value.isTensor()) bump(value.toTensor());
    else for (const IValue& item : value.toListRef()) bump(item.toTensor());
  }
}

std::unordered_map<std::string, State*>& by_name() {
  static auto* all = new std::unordered_map<std::string, State*>();
  return *all;
}

State& state_of(const std::string& name) {
  return *by_name().at(name);
}

// A bit for each ATen operator, in the order of declaration: whether it is active. The bits are contiguous, and not in
// the states, because a scope sets all of them.
std::deque<std::atomic<uint64_t>>& switches() {
  static auto* all = new std::deque<std::atomic<uint64_t>>();
  return *all;
}

template <typename T>
std::vector<T> flags(const py::list& values) {
  std::vector<T> result;
  for (const py::handle value : values) result.push_back(value.cast<T>());
  return result;
}

// Adds an operator. `name` starts with the namespace unless that is aten.
void declare(
    const std::string& name,
    const std::string& key,
    const py::list& tensors,
    const py::list& written,
    const py::list& slots,
    py::object callable) {
  if (by_name().count(name)) return;
  const size_t colons = name.find("::");
  const std::string space = colons == std::string::npos ? "aten" : name.substr(0, colons);
  const std::string own = colons == std::string::npos ? name : name.substr(colons + 2);
  auto handle = handle_of(name);
  auto state = std::make_unique<State>(handle, space, own);
  state->key = c10::parseDispatchKey(key);
  state->device = c10::dispatchKeyToDeviceType(state->key);
  state->tensor = flags<bool>(tensors);
  state->written = flags<bool>(written);
  state->slots = flags<uint8_t>(slots);
  state->versions = state->is_atens() && own.rfind("_foreach_", 0) == 0;
  state->record = callable.release().ptr();
  static std::atomic<uint64_t> always{1};
  static size_t declared = 0;
  const size_t bit = state->is_atens() ? declared++ % 64 : 0;
  state->bit = uint64_t{1} << bit;
  if (state->is_atens() && bit == 0) switches().emplace_back(0);
  state->switches = state->is_atens() ? &switches().back() : &always;
  by_name()[name] = state.get();
  states()[&handle.schema()] = std::move(state);
}

// Replaces the implementation of an operator. For tests only, because calls may be running.
void redeclare(const std::string& name, const py::list& slots, py::object callable) {
  State& state = state_of(name);
  state.slots = flags<uint8_t>(slots);
  py::reinterpret_steal<py::object>(std::exchange(state.record, callable.release().ptr()));
}

// Puts a selection in force: a bit for each ATen operator in the order of declaration, and `Settings.bits`.
void select(const std::string& chosen, uint64_t bits_of_settings) {
  settings.store(bits_of_settings, std::memory_order_relaxed);
  size_t next = 0;
  for (std::atomic<uint64_t>& word : switches()) {
    uint64_t bits = 0;
    if (next + sizeof bits <= chosen.size()) std::memcpy(&bits, chosen.data() + next, sizeof bits);
    next += sizeof bits;
    word.store(bits, std::memory_order_relaxed);
  }
}

// Silences torch's warning that a kernel is overridden.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers an operator with torch. ATen's kernel is fetched again only if it may have `changed`, because torch keeps a
// record of every fetch.
void install(const std::string& name, bool changed) {
  State& state = state_of(name);
  if (state.library) return;
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  const bool unknown = changed || state.provisional || !state.kernel;
  if (unknown && state.is_atens() && state.handle.hasComputedKernelForDispatchKey(state.key)) {
    std::atomic_store(
        &state.kernel,
        std::make_shared<c10::SafeKernelFunction>(state.handle.getComputedKernelForDispatchKey(state.key)));
    state.provisional = changed;
  }
  state.library = std::make_unique<torch::Library>(torch::Library::IMPL, state.space, state.key, "tritonite", 0);
  state.library->impl(state.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&dispatch>());
}

// Registers `pass_autograd` for an operator outside ATen, after its gradient has been registered.
void install_gate(const std::string& name) {
  State& state = state_of(name);
  const auto key = c10::getAutogradKeyFromBackend(c10::toBackendComponent(state.key));
  state.gradient = std::make_shared<c10::SafeKernelFunction>(state.handle.getComputedKernelForDispatchKey(key));
  state.gate = std::make_unique<torch::Library>(torch::Library::IMPL, state.space, key, "tritonite", 0);
  state.gate->impl(state.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&pass_autograd>());
}

void uninstall(const std::string& name) {
  state_of(name).library.reset();
}

void clear(const std::string& name) {
  State& state = state_of(name);
  std::list<Entry> dropped;
  std::lock_guard<std::mutex> lock(plans_mutex);
  state.by_hash.clear();
  dropped.swap(state.plans);
}

// Drops the plans of all operators.
void clear_all() {
  std::list<Entry> dropped;
  std::lock_guard<std::mutex> lock(plans_mutex);
  for (const auto& [name, state] : by_name()) {
    state->by_hash.clear();
    dropped.splice(dropped.end(), state->plans);
  }
}

// Returns what is kept for a call with these arguments: "plan", "decline" or "nothing".
std::string kept(const std::string& name, const py::list& values) {
  State& state = state_of(name);
  Stack stack;
  const auto& arguments = state.handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) stack.push_back(to_ivalue(values[i], arguments[i].real_type()));
  Call call;
  const auto plan = key_call(state, stack, stack.size(), call) ? look_up(state, call) : nullptr;
  return !plan ? "nothing" : plan->declined ? "decline" : "plan";
}

// Serves a call with all of the schema's arguments, whatever is selected. Returns its results.
py::object call_with(const std::string& name, const py::list& values) {
  State& state = state_of(name);
  const auto& arguments = state.handle.schema().arguments();
  Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i) stack.push_back(to_ivalue(values[i], arguments[i].real_type()));
  {
    py::gil_scoped_release nobody;
    at::AutoDispatchBelowADInplaceOrView below;
    serve_in_graph(state, &stack);
  }
  if (stack.empty()) return py::none();
  if (stack.size() == 1) return torch::jit::toPyObject(std::move(stack[0]));
  py::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) results[i] = torch::jit::toPyObject(std::move(stack[i]));
  return results;
}

// Serves a call as `call_with` does, without counting it.
py::object repeat(const std::string& name, const py::list& values) {
  struct Uncounted {
    Uncounted() { repeats = true; }
    ~Uncounted() { repeats = false; }
  } uncounted;
  return call_with(name, values);
}

// Returns (replayed calls, declined calls by reason, plans), zeros for an operator that is not declared.
py::tuple counts(const std::string& name) {
  if (!by_name().count(name)) return py::make_tuple(0, py::dict(), 0);
  State& state = state_of(name);
  std::vector<std::pair<std::string, uint64_t>> reasons;
  size_t plans = 0;
  {
    // No Python objects under the lock: making one may run the garbage collector, and so any code.
    std::lock_guard<std::mutex> lock(plans_mutex);
    for (const auto& reason : state.reasons) reasons.emplace_back(reason.first, reason.second->load());
    plans = state.plans.size();
  }
  py::dict declined;
  for (const auto& reason : reasons) {
    if (reason.second) declined[py::str(reason.first)] = reason.second;
  }
  return py::make_tuple(state.replayed.load(), declined, plans);
}

// Returns the names of the operators with a count that is not zero.
std::vector<std::string> counted() {
  std::vector<std::string> found;
  std::lock_guard<std::mutex> lock(plans_mutex);
  for (const auto& [name, state] : by_name()) {
    bool any = state->replayed.load() != 0;
    for (const auto& reason : state->reasons) any = any || reason.second->load() != 0;
    if (any) found.push_back(name);
  }
  return found;
}

void reset_counts(const std::string& name) {
  if (!by_name().count(name)) return;
  State& state = state_of(name);
  state.replayed = 0;
  std::lock_guard<std::mutex> lock(plans_mutex);
  for (const auto& reason : state.reasons) reason.second->store(0);
}

void set_launch_hooks(const std::vector<py::list>& hooks) {
  launch_hooks.clear();
  for (py::list list : hooks) launch_hooks.push_back(list.release().ptr());
}

bool set_inside_kernel(bool inside) {
  return std::exchange(inside_kernel, inside);
}

}  // namespace

PYBIND11_MODULE(tritonite_dispatcher, module) {
  module.def("use_driver", &use_driver);
  module.def("try_driver", &try_driver);
  // Otherwise a child that is forked while another thread holds the lock would wait for ever.
  pthread_atfork([] { plans_mutex.lock(); }, [] { plans_mutex.unlock(); }, [] { plans_mutex.unlock(); });
  module.def("declare", &declare);
  module.def("redeclare", &redeclare);
  module.def("install", &install);
  module.def("install_gate", &install_gate);
  module.def("select", [](const py::bytes& chosen, uint64_t bits_of_settings) { select(chosen, bits_of_settings); });
  module.def("set_active", [](const std::string& name, bool active) { state_of(name).set_active(active); });
  module.def("uninstall", &uninstall);
  module.def("clear", &clear);
  module.def("clear_all", &clear_all);
  module.def("kept", &kept);
  module.def("call", &call_with);
  module.def("repeat", &repeat);
  module.def("set_audit", &set_audit);
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def(py::init([](const py::object& described) {
        return graph_of(described, [](const std::string& name) { return by_name().at(name); });
      }))
      .def("run", [](const std::shared_ptr<Graph>& graph, const py::list& inputs) {
        return run_graph(graph, inputs, &serve_in_graph);
      })
      .def("free_arguments", [](const std::shared_ptr<Graph>& graph) { return graph->prepared.count_free(); });
  module.def("graph_key", &graph_key);
  module.def("counts", &counts);
  module.def("counted", &counted);
  module.def("reset_counts", &reset_counts);
  module.def("set_inside_kernel", &set_inside_kernel);
  module.def("set_launch_hooks", &set_launch_hooks);
  module.def("draw", &draw_from);
  module.def("set_poison", [](bool on) { poison = on; });
  module.def("set_most_plans", [](size_t most) { most_plans = most; });
}
