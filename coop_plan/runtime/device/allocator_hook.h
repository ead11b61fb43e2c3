// Exchanges the function `allocate` of one allocator object, whatever class it is of.
//
// The object gets a copy of its virtual table with that one entry exchanged; everything else it does
// stays its own. This rests on the C++ ABI of GCC and Clang on Linux (Itanium), not on the class, so
// that neither its header nor CUDA's is needed.

#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <cstring>

namespace coop {

// What a call of the member function is to the caller: `self` is the allocator.
using Allocate = at::DataPtr (*)(void* self, size_t size);

// At which entry of an allocator's virtual table `allocate` is (Itanium C++ ABI, 2.3).
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

// The former function, or null if no virtual table could be made out.
inline Allocate exchange_allocate(at::Allocator* object, Allocate replacement) {
  constexpr size_t kLongest = 512;
  void*** place = reinterpret_cast<void***>(object);
  void** table = *place;
  // What follows the table begins with a null word, the next one's offset to top, or has one soon.
  size_t length = 0;
  while (length < kLongest && table[length] != nullptr) ++length;
  if (length == kLongest || length <= allocate_entry()) return nullptr;
  auto** copy = new void*[length + 2];  // the two before: offset to top, type
  std::memcpy(copy, table - 2, (length + 2) * sizeof(void*));
  copy += 2;
  const auto former = reinterpret_cast<Allocate>(copy[allocate_entry()]);
  copy[allocate_entry()] = reinterpret_cast<void*>(replacement);
  __atomic_store_n(place, copy, __ATOMIC_RELEASE);
  return former;
}

}  // namespace coop
