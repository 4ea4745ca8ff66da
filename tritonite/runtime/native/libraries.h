// Functions of libraries that are loaded at run time, so that building needs no headers of theirs.

#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>

#include <c10/util/Exception.h>

namespace {

// Returns the library of the first name that is in the process already, else of the first that can be loaded; null if
// none can. A second copy of a driver would not know the handles of the first.
void* open_library(std::initializer_list<const char*> names) {
  for (const int flags : {RTLD_NOLOAD, 0}) {
    for (const char* name : names) {
      if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL | flags)) return library;
    }
  }
  return nullptr;
}

// Sets `function` to the first of the symbols that the library has. Raises an error with the first name for none.
template <typename T>
void find(void* library, std::initializer_list<const char*> symbols, T& function) {
  for (const char* symbol : symbols) {
    if ((function = reinterpret_cast<T>(dlsym(library, symbol)))) return;
  }
  TORCH_CHECK(false, "tritonite: ", *symbols.begin(), " is not in the driver's libraries");
}

}  // namespace
