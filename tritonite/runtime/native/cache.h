// The plans of an operator by the keys of its calls, those of the latest calls.

#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "key.h"

namespace {

std::shared_ptr<const Plan> look_up(State& state, const Call& call) {
  std::lock_guard<std::mutex> lock(plans_mutex);
  if (!state.plans.empty() && state.plans.front().hash == call.hash && state.plans.front().words == call.words) {
    return state.plans.front().plan;
  }
  const auto bucket = state.found.find(call.hash);
  if (bucket == state.found.end()) return nullptr;
  for (const auto& entry : bucket->second) {
    if (entry->words == call.words) {
      state.plans.splice(state.plans.begin(), state.plans, entry);
      return entry->plan;
    }
  }
  return nullptr;
}

void insert(State& state, const Call& call, std::shared_ptr<const Plan> plan) {
  // What is dropped is destroyed after the lock is released, because that takes the GIL.
  std::vector<std::shared_ptr<const Plan>> dropped;
  std::lock_guard<std::mutex> lock(plans_mutex);
  auto& bucket = state.found[call.hash];
  for (const auto& entry : bucket) {
    if (entry->words == call.words) {
      dropped.push_back(std::exchange(entry->plan, std::move(plan)));
      return;
    }
  }
  state.plans.push_front({call.hash, call.words, std::move(plan)});
  bucket.push_back(state.plans.begin());
  while (state.plans.size() > most_plans) {
    const auto last = std::prev(state.plans.end());
    auto& others = state.found[last->hash];
    others.erase(std::find(others.begin(), others.end(), last));
    if (others.empty()) state.found.erase(last->hash);
    dropped.push_back(std::move(last->plan));
    state.plans.pop_back();
  }
}

}  // namespace
