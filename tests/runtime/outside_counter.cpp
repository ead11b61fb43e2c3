// A counter of memory in front of libc, for LD_PRELOAD: nothing of the project or of PyTorch counts.
//
// Counted are the allocations that PyTorch's CPU allocator makes by `posix_memalign`, and the
// mappings that the arena extension makes by `mmap64`. A page of a mapping counts from `mmap64`
// to `munmap`, except while it is free: from `madvise(MADV_DONTNEED)` until it is touched again. Pages
// are touched unseen, so residency is read before each decrease: a peak lies before one.

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kPage = 4096;

struct Mapping {
  size_t size;
  std::vector<bool> free;  // by page
};

auto& mutex = *new std::recursive_mutex();
auto& blocks = *new std::unordered_map<void*, size_t>();
auto& mappings = *new std::map<char*, Mapping>();
long allocated = 0;
long peak = 0;
long mappings_at_peak = 0;
thread_local bool inside = false;  // a change of the table frees memory of its own

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

bool called_from(void* caller, const char* library) {
  Dl_info info;
  return dladdr(caller, &info) != 0 && std::strstr(info.dli_fname, library) != nullptr;
}

long mapped() {
  long pages = 0;
  std::vector<unsigned char> resident;
  for (auto& [base, mapping] : mappings) {
    resident.assign(mapping.free.size(), 0);
    mincore(base, mapping.size, resident.data());
    for (size_t i = 0; i < resident.size(); ++i) {
      if (resident[i] & 1) mapping.free[i] = false;
      pages += !mapping.free[i];
    }
  }
  return pages * static_cast<long>(kPage);
}

long note() {
  const long now = allocated + mapped();
  if (now > peak) {
    peak = now;
    mappings_at_peak = static_cast<long>(mappings.size());
  }
  return now;
}

}  // namespace

extern "C" {

int posix_memalign(void** found, size_t alignment, size_t size) {
  static const auto real = next<int (*)(void**, size_t, size_t)>("posix_memalign");
  const int failed = real(found, alignment, size);
  if (!failed && called_from(__builtin_return_address(0), "libc10.so")) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    inside = true;
    blocks[*found] = size;
    inside = false;
    allocated += static_cast<long>(size);
  }
  return failed;
}

void free(void* pointer) {
  static const auto real = next<void (*)(void*)>("free");
  if (pointer != nullptr && !inside) {
    inside = true;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    const auto block = blocks.find(pointer);
    if (block != blocks.end()) {
      note();
      allocated -= static_cast<long>(block->second);
      blocks.erase(block);
    }
    inside = false;
  }
  real(pointer);
}

void* mmap64(void* address, size_t size, int protection, int flags, int file,
             off64_t offset) noexcept {
  static const auto real = next<void* (*)(void*, size_t, int, int, int, off64_t)>("mmap64");
  void* found = real(address, size, protection, flags, file, offset);
  if (found != MAP_FAILED && called_from(__builtin_return_address(0), "coop_plan_arena")) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    mappings[static_cast<char*>(found)] = {size, std::vector<bool>((size + kPage - 1) / kPage)};
  }
  return found;
}

int munmap(void* address, size_t size) noexcept {
  static const auto real = next<int (*)(void*, size_t)>("munmap");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  if (mappings.count(static_cast<char*>(address))) {
    note();
    mappings.erase(static_cast<char*>(address));
  }
  return real(address, size);
}

int madvise(void* address, size_t size, int advice) noexcept {
  static const auto real = next<int (*)(void*, size_t, int)>("madvise");
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = mappings.upper_bound(static_cast<char*>(address));
  char* const begin = static_cast<char*>(address);
  if (advice == MADV_DONTNEED && found != mappings.begin()) {
    auto& [base, mapping] = *--found;
    if (begin < base + mapping.size) {
      note();
      for (size_t i = 0; i < size / kPage; ++i) mapping.free[(begin - base) / kPage + i] = true;
    }
  }
  return real(address, size, advice);
}

long outside_bytes() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return note();
}

long outside_peak(long* count) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  note();
  *count = mappings_at_peak;
  return peak;
}

void outside_reset() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  peak = 0;
  note();
}
}
