// What the arena keeps: memories, the programs that run in them, counters, the log of one op.
//
// A step is a program of op occurrences, each with the slots its allocations take, in the order in
// which the op makes them. A run is one call of it, in a memory of its own as long as it lasts.
// While a thread is inside an occurrence, its k-th allocation is served at the address of the k-th
// slot, if the size is the planned one. Everything else, on every thread, goes to PyTorch's
// allocator. Addresses come from the plan alone: freeing a pointer into the memory of an arena only
// counts.
//
// What a user still holds of a memory when another run begins in it keeps its pages (`part`), and
// the run gets other memory.
//
// One mutex guards all that threads share and is not atomic. It is held while the process forks, so
// that the child finds it free.

#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Slot {
  int64_t size;
  int64_t offset;  // from the arena's start; -1: served by PyTorch's allocator, as planned
};

constexpr int kCpu = -1;  // in place of the number of a CUDA device

struct Memory {
  int device = kCpu;
  char* base = nullptr;
  size_t bytes = 0;    // as asked for
  size_t counted = 0;  // of them in current_bytes
  size_t mapped = 0;
  std::atomic<int64_t> live{0};
  bool retired = false;  // guarded by mutex
};

struct Program {
  std::vector<int64_t> first;  // occurrence k owns slots [first[k], first[k + 1])
  std::vector<Slot> slots;
  std::vector<uint8_t> again;  // occurrence k is a recomputation
};

struct Run {
  const Program* program = nullptr;
  Memory* memory = nullptr;
  Run* outer = nullptr;      // that this thread was in when this one began
  int64_t arena_bytes = -1;  // of memory on CUDA
  int64_t high_water = 0;
  int64_t outside = 0;
  int64_t beside = 0;             // bytes that PyTorch's CUDA allocator gave to the ops
  int64_t before = 0;             // bytes of the process when the step began, its memory left out
  double elapsed_us[2] = {0, 0};  // first computations, recomputations
};

constexpr size_t kPage = 4096;
auto& mutex = *new std::mutex();  // never destroyed: tensors outlive main
auto& memories = *new std::map<char*, Memory*>();  // by where they begin; by mutex

// Bytes of the process as they were asked for: PyTorch's on the CPU, and the memory of arenas.
std::atomic<int64_t> current_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> step_peak_bytes{0};
auto& sizes = *new std::unordered_map<void*, int64_t>();  // of PyTorch's on the CPU; by mutex

struct Event {
  bool is_alloc;
  void* pointer;
  int64_t size;
};

thread_local Run* active = nullptr;
thread_local const Slot* cursor = nullptr;
thread_local const Slot* limit = nullptr;
thread_local bool inside_op = false;
thread_local int timed_class = -1;
thread_local Clock::time_point timed_since;
thread_local bool recording = false;
thread_local bool recording_cuda = false;
thread_local std::vector<Event>* events = nullptr;

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load();
  while (value > seen && !peak.compare_exchange_weak(seen, value)) {
  }
}

void count(int64_t bytes) {
  const int64_t now = current_bytes.fetch_add(bytes) + bytes;
  raise_to(peak_bytes, now);
  raise_to(step_peak_bytes, now);
}

// These four under the mutex.

void enlist(Memory* memory) {
  if (memory->mapped != 0) memories[memory->base] = memory;
}

void unmap(Memory* memory) {
  if (memory->mapped != 0) {
    memories.erase(memory->base);
    if (memory->device == kCpu) munmap(memory->base, memory->mapped);
  }
  count(-static_cast<int64_t>(memory->counted));
  delete memory;
}

void retire(Memory* memory) {
  memory->retired = true;
  if (memory->live.load() == 0) unmap(memory);
}

// Whether the pointer lies in a memory, which then counts that it is freed.
bool freed_in_memory(void* pointer) {
  char* p = static_cast<char*>(pointer);
  auto found = memories.upper_bound(p);
  if (found == memories.begin()) return false;
  Memory* memory = (--found)->second;
  if (p >= memory->base + memory->mapped) return false;
  if (memory->live.fetch_sub(1) == 1 && memory->retired) unmap(memory);
  return true;
}

bool is_recorded(bool cuda) { return recording && recording_cuda == cuda; }

void log_alloc(void* pointer, size_t size) {
  events->push_back({true, pointer, static_cast<int64_t>(size)});
}

void log_free(void* pointer) { events->push_back({false, pointer, 0}); }

// Where the plan puts the allocation that comes next on this thread; null: PyTorch serves it.
char* planned(size_t size, bool cuda) {
  if (size == 0 || !inside_op || (active->memory->device != kCpu) != cuda) return nullptr;
  if (cursor == limit || cursor->size != static_cast<int64_t>(size)) {
    active->outside += static_cast<int64_t>(size);
    return nullptr;
  }
  const Slot slot = *cursor++;
  if (slot.offset < 0) return nullptr;
  const int64_t end = slot.offset + slot.size;
  if (end > active->high_water) active->high_water = end;
  active->memory->live.fetch_add(1);
  return active->memory->base + slot.offset;
}

}  // namespace
