// The plans of an operator by key; the least recently used are dropped.

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
  const auto bucket = state.by_hash.find(call.hash);
  if (bucket == state.by_hash.end()) return nullptr;
  for (const auto& entry : bucket->second) {
    if (entry->words == call.words) {
      state.plans.splice(state.plans.begin(), state.plans, entry);
      return entry->plan;
    }
  }
  return nullptr;
}

void insert(State& state, const Call& call, std::shared_ptr<const Plan> plan) {
  // Destroying a plan takes the GIL, so dropped plans outlive the lock.
  std::vector<std::shared_ptr<const Plan>> dropped;
  std::lock_guard<std::mutex> lock(plans_mutex);
  auto& bucket = state.by_hash[call.hash];
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
    auto& others = state.by_hash[last->hash];
    others.erase(std::find(others.begin(), others.end(), last));
    if (others.empty()) state.by_hash.erase(last->hash);
    dropped.push_back(std::move(last->plan));
    state.plans.pop_back();
  }
}

}  // namespace
