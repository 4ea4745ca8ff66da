// The arguments of a graph's launches, prepared when the graph is made: an execution writes only those that changed.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "replay.h"

namespace {

// One set of arguments for all launches of a graph, which serves one execution at a time. Drivers read the values
// before a launch returns.
struct LaunchArguments {
  std::vector<uint64_t> values;
  std::vector<TensorMap> descriptors;
  // By argument: a pointer to its value or its descriptor, as launches take it.
  std::vector<void*> pointers;
  // By base: the address that the arguments have, if they all have the same.
  std::vector<std::optional<uintptr_t>> addresses;
};

// An argument, or a descriptor, `offset` bytes after the address of its base. `index` counts those of all launches.
struct Placed {
  size_t index = 0;
  int64_t offset = 0;
};

// A buffer or an input whose address is in arguments and descriptors.
struct Base {
  Source source;
  std::vector<Placed> values, descriptors;
};

struct PreparedLaunch {
  // Index of the first argument.
  size_t first = 0;
  // Bases whose addresses are looked up before the launch. Later launches know these addresses.
  std::vector<size_t> bases;
  // Indices of the parameters that differ in every execution: drawn numbers and data-dependent sizes.
  std::vector<size_t> changing;
};

class Prepared {
 public:
  // Number of sets that are kept while no execution uses them.
  static constexpr size_t kMostFree = 4;

  Prepared() {
    free.reserve(kMostFree);
  }

  // Writes the arguments of launch `number` that this execution changes. Returns pointers to all of its arguments.
  void** arguments_of(size_t number, const Launch& launch, const Replay& replay, LaunchArguments& own) const {
    const PreparedLaunch& prepared = launches[number];
    for (const size_t base : prepared.bases) place(base, replay, own);
    for (const size_t i : prepared.changing) {
      own.values[prepared.first + i] = replay.bits_of_parameter(launch.parameters[i]);
    }
    return own.pointers.data() + prepared.first;
  }

  // Returns a free set, or a new one.
  std::unique_ptr<LaunchArguments> take() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (!free.empty()) {
        auto own = std::move(free.back());
        free.pop_back();
        return own;
      }
    }
    auto own = std::make_unique<LaunchArguments>();
    own->values = values;
    own->descriptors = descriptors;
    for (uint64_t& value : own->values) own->pointers.push_back(&value);
    for (size_t i = 0; i < described.size(); ++i) own->pointers[described[i]] = &own->descriptors[i];
    own->addresses.resize(bases.size());
    return own;
  }

  // Keeps a set for later executions, unless enough are free.
  void give_back(std::unique_ptr<LaunchArguments> own) {
    std::lock_guard<std::mutex> lock(mutex);
    if (free.size() < kMostFree) free.push_back(std::move(own));
  }

  size_t count_free() {
    std::lock_guard<std::mutex> lock(mutex);
    return free.size();
  }

 private:
  friend class Preparation;

  // Writes the address of a base into its arguments and descriptors, unless they have it from an earlier execution.
  void place(size_t number, const Replay& replay, LaunchArguments& own) const {
    const Base& base = bases[number];
    const uintptr_t address = replay.address(base.source);
    std::optional<uintptr_t>& known = own.addresses[number];
    if (known == address) return;
    // A driver may refuse an address, and leave some arguments without it.
    known.reset();
    for (const Placed& placed : base.values) own.values[placed.index] = address + placed.offset;
    for (const Placed& placed : base.descriptors) {
      replay.replace_address(own.descriptors[placed.index], address + placed.offset);
    }
    known = address;
  }

  std::vector<PreparedLaunch> launches;
  std::vector<Base> bases;
  // The contents of a new set, and by descriptor: the index of its argument.
  std::vector<uint64_t> values;
  std::vector<TensorMap> descriptors;
  std::vector<size_t> described;
  std::mutex mutex;
  std::vector<std::unique_ptr<LaunchArguments>> free;
};

// Prepares the launches of a graph, whose numbers are constant, in the order of its steps.
class Preparation {
 public:
  // By input: whether a step `writes` it.
  Preparation(Prepared& prepared, const Plan& plan, at::ArrayRef<Number> numbers, const std::vector<bool>& writes)
      : prepared(prepared), plan(plan), numbers(numbers), writes(writes) {}

  // Adds a launch. Returns its number.
  size_t add(const Launch& launch) {
    PreparedLaunch added;
    added.first = prepared.values.size();
    std::vector<size_t> used;
    for (size_t i = 0; i < launch.parameters.size(); ++i) {
      const Parameter& parameter = launch.parameters[i];
      const size_t index = prepared.values.size();
      prepared.values.push_back(parameter.bits);
      switch (parameter.kind) {
        case Parameter::kConstant: break;
        case Parameter::kSlot:
          prepared.values[index] = bits_of_number(numbers[parameter.index], plan.slots[parameter.index]);
          break;
        case Parameter::kDrawn:
        case Parameter::kSize: added.changing.push_back(i); break;
        case Parameter::kPointer:
          used.push_back(base_of(parameter.source));
          prepared.bases[used.back()].values.push_back({index, parameter.source.offset});
          break;
        case Parameter::kDescriptor:
          used.push_back(base_of(parameter.source));
          prepared.bases[used.back()].descriptors.push_back({prepared.descriptors.size(), parameter.source.offset});
          prepared.descriptors.push_back(launch.descriptors[parameter.index]);
          prepared.described.push_back(index);
          break;
      }
    }
    look_up(used, added);
    prepared.launches.push_back(std::move(added));
    return prepared.launches.size() - 1;
  }

  // Has later launches look up the address of a buffer or an input again.
  void forget(bool buffer, size_t index) {
    const auto found = numbers_of_bases.find({buffer, index});
    if (found != numbers_of_bases.end()) known[found->second] = false;
  }

  // Has later launches look up all addresses again.
  void forget() {
    known.assign(known.size(), false);
  }

 private:
  size_t base_of(const Source& source) {
    const auto [found, added] = numbers_of_bases.emplace(std::pair(source.buffer, source.index), known.size());
    if (added) {
      prepared.bases.push_back({{source.buffer, source.index, 0}, {}, {}});
      known.push_back(false);
    }
    return found->second;
  }

  // Notes which addresses a launch looks up: those of `used` bases that are not known. A lazily cloned input that is
  // written gets memory of its own at its look-up. All tensors of its storage move, and are looked up afterwards.
  void look_up(const std::vector<size_t>& used, PreparedLaunch& launch) {
    const auto is_written = [&](size_t base) {
      const Source& source = prepared.bases[base].source;
      return !source.buffer && writes[source.index];
    };
    for (const size_t base : used) {
      if (!is_written(base) || known[base]) continue;
      forget();
      break;
    }
    for (const bool first : {true, false}) {
      for (const size_t base : used) {
        if (is_written(base) != first || known[base]) continue;
        known[base] = true;
        launch.bases.push_back(base);
      }
    }
  }

  Prepared& prepared;
  const Plan& plan;
  at::ArrayRef<Number> numbers;
  const std::vector<bool>& writes;
  // The number of a base by whether it is a buffer, and its index.
  std::map<std::pair<bool, size_t>, size_t> numbers_of_bases;
  // By base: whether launches before have looked up its address, and no step since may have moved it.
  std::vector<bool> known;
};

// A set of arguments for one execution. Made and destroyed under the GIL, so that no thread forks while it is locked.
class Lease {
 public:
  explicit Lease(Prepared& prepared) : prepared(prepared), own(prepared.take()) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  ~Lease() {
    prepared.give_back(std::move(own));
  }

  LaunchArguments& arguments() const {
    return *own;
  }

 private:
  Prepared& prepared;
  std::unique_ptr<LaunchArguments> own;
};

}  // namespace
