// Replaces the virtual function `allocate` of one allocator object of any class.
//
// The object gets a copy of its virtual table with that one entry replaced. This relies on the C++ ABI
// of GCC and Clang on Linux (Itanium), not on the class, so that neither its header nor CUDA's is
// needed.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <cstring>

namespace coop {

// The member function as the ABI calls it: `self` is the allocator.
using Allocate = at::DataPtr (*)(void* self, size_t size);

// Index of `allocate` in an allocator's virtual table (Itanium C++ ABI, 2.3).
inline size_t allocate_entry() {
  at::DataPtr (at::Allocator::*member)(size_t) = &at::Allocator::allocate;
  intptr_t parts[2];
  static_assert(sizeof(member) == sizeof(parts));
  std::memcpy(parts, &member, sizeof(parts));
#if defined(__aarch64__)
  return parts[0] / sizeof(void*);
#else
  return (parts[0] - 1) / sizeof(void*);
#endif
}

// Returns the former function, or null if no virtual table is recognized.
inline Allocate exchange_allocate(at::Allocator* object, Allocate replacement) {
  constexpr size_t kLongest = 512;
  void*** place = reinterpret_cast<void***>(object);
  void** table = *place;
  // The table ends at a null word: the offset to top of the next table, or soon after it.
  size_t length = 0;
  while (length < kLongest && table[length] != nullptr) ++length;
  if (length == kLongest || length <= allocate_entry()) return nullptr;
  auto** copy = new void*[length + 2];  // plus the two words before the table: offset to top, type
  std::memcpy(copy, table - 2, (length + 2) * sizeof(void*));
  copy += 2;
  const auto former = reinterpret_cast<Allocate>(copy[allocate_entry()]);
  copy[allocate_entry()] = reinterpret_cast<void*>(replacement);
  __atomic_store_n(place, copy, __ATOMIC_RELEASE);
  return former;
}

}  // namespace coop
