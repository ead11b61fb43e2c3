// What the arena keeps: memories, the programs that run in them, counters, the log of one op.
//
// A step is a program of op occurrences, each with the slots its allocations take, in the order in
// which the op makes them. A run is one call of it, in a memory of its own as long as it lasts.
// While a thread is inside an occurrence, its k-th allocation is served at the address of the k-th
// slot, if the size is the planned one and nothing lives there: an op that keeps a tensor, or takes
// other memory than when it was profiled, costs bytes and never overwrites. Everything else, on
// every thread, goes to PyTorch's allocator.
//
// What a user still holds of a memory when another run begins in it keeps its pages, and the run
// gets other memory.
//
// One mutex guards all that threads share. It is held while the process forks, so that the child
// finds it free.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "accounting.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Slot {
  int64_t size;
  int64_t offset;  // from the arena's start; -1: served by PyTorch's allocator, as planned
};

constexpr int kCpu = -1;  // in place of the number of a CUDA device
constexpr int kPatience = 300;  // looks, 100 µs apart, at a place that is to come free

struct Living {
  int64_t end;      // offset
  int64_t program;  // its number
  int64_t slot;     // in that
};

struct Memory {
  int device = kCpu;
  char* base = nullptr;
  size_t bytes = 0;    // as asked for
  size_t counted = 0;  // of them in current_bytes
  size_t mapped = 0;
  std::map<int64_t, Living> there;  // what lives in it, by offset
  bool retired = false;
  int64_t ceiling = -1;  // no run is in it: its pages go before the process has more than this
  int64_t tail = 0;      // from here on they have gone
};

struct Program {
  int64_t number = 0;
  std::vector<int64_t> first;  // occurrence k owns slots [first[k], first[k + 1])
  std::vector<Slot> slots;
  std::vector<uint8_t> again;  // occurrence k is a recomputation
  std::vector<uint8_t> vain;   // slot k was waited for in vain, the last time; by mutex
};

struct Run {
  Program* program = nullptr;
  Memory* memory = nullptr;
  Run* outer = nullptr;      // that this thread was in when this one began
  int64_t arena_bytes = -1;  // of memory on CUDA
  int64_t high_water = 0;
  int64_t outside = 0;
  int64_t wanted = -1;     // the first slot where a tensor lies that the plan does not want there
  int64_t kept_slot = -1;  // of that tensor, if it is one of this program
  int64_t kept_bytes = 0;
  int64_t beside = 0;  // bytes that PyTorch's CUDA allocator gave to the ops
  Window window;
  std::vector<uint8_t> elsewhere;   // slots that PyTorch's allocator serves in this run
  double elapsed_us[2] = {0, 0};  // first computations, recomputations
};

constexpr int64_t kPage = 4096;
auto& memories = *new std::map<char*, Memory*>();  // by where they begin; by mutex
auto& idle = *new std::vector<Memory*>();          // by mutex
int64_t programs = 0;                              // made so far; by mutex

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

int64_t page_below(int64_t offset) { return offset / kPage * kPage; }
int64_t page_above(int64_t offset) { return (offset + kPage - 1) / kPage * kPage; }

// All below under the mutex.

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

// The bytes of the whole pages between two offsets on which nothing lives, given to the system.
int64_t give_back(Memory* memory, int64_t from, int64_t to) {
  int64_t given = 0;
  const auto give = [&](int64_t begin, int64_t end) {
    begin = page_above(begin);
    end = page_below(end);
    if (begin >= end) return;
    madvise(memory->base + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
    given += end - begin;
  };
  auto next = memory->there.lower_bound(from);
  if (next != memory->there.begin()) from = std::max(from, std::prev(next)->second.end);
  for (; next != memory->there.end() && next->first < to; ++next) {
    give(from, next->first);
    from = std::max(from, next->second.end);
  }
  give(from, to);
  return given;
}

void discount(Memory* memory, int64_t given) {
  given = std::min(given, static_cast<int64_t>(memory->counted));
  memory->counted -= static_cast<size_t>(given);
  count(-given);
}

// A run takes so many bytes of it from the start; the pages behind them go.
void resize(Memory* memory, int64_t bytes) {
  const int64_t counted = static_cast<int64_t>(memory->counted);
  if (counted > bytes) give_back(memory, bytes, static_cast<int64_t>(memory->mapped));
  memory->counted = static_cast<size_t>(bytes);
  count(bytes - counted);
}

void wake(Memory* memory) {
  if (memory->ceiling < 0) return;
  memory->ceiling = -1;
  std::erase(idle, memory);
}

void retire(Memory* memory) {
  wake(memory);
  memory->retired = true;
  if (memory->there.empty()) return unmap(memory);
  if (memory->device != kCpu) return;
  give_back(memory, 0, static_cast<int64_t>(memory->mapped));
  int64_t held = 0;
  int64_t last = 0;  // pages below are counted
  for (const auto& [begin, living] : memory->there) {
    const int64_t from = std::max(last, page_below(begin));
    last = std::max(last, page_above(living.end));
    held += last - from;
  }
  discount(memory, static_cast<int64_t>(memory->counted) - held);
}

// Idle memories give back pages, the last ones first, so that the process with so many bytes more
// stays below their ceilings.
void relieve(int64_t bytes) {
  for (Memory* memory : idle) {
    int64_t over;
    while ((over = current_bytes + bytes - memory->ceiling) > 0 && memory->tail > 0) {
      const int64_t tail = memory->tail;
      memory->tail = page_below(std::max<int64_t>(0, tail - over));
      discount(memory, give_back(memory, memory->tail, tail));
    }
  }
}

// Whether the pointer lies in a memory, where it then is free.
bool freed_in_memory(void* pointer) {
  char* p = static_cast<char*>(pointer);
  auto found = memories.upper_bound(p);
  if (found == memories.begin()) return false;
  Memory* memory = (--found)->second;
  if (p >= memory->base + memory->mapped) return false;
  const auto entry = memory->there.find(p - memory->base);
  if (entry == memory->there.end()) return true;
  const int64_t begin = entry->first;
  const int64_t end = entry->second.end;
  memory->there.erase(entry);
  if (!memory->retired) return true;
  if (memory->there.empty()) {
    unmap(memory);
  } else if (memory->device == kCpu) {
    discount(memory, give_back(memory, page_below(begin), page_above(end)));
  }
  return true;
}

bool is_recorded(bool cuda) { return recording && recording_cuda == cuda; }

void log_alloc(void* pointer, size_t size) {
  events->push_back({true, pointer, static_cast<int64_t>(size)});
}

void log_free(void* pointer) { events->push_back({false, pointer, 0}); }

enum class Served { kByNobody, kInArena, kOutsideAsPlanned };

// What lives between two offsets, or the end.
std::map<int64_t, Living>::const_iterator living(const Memory& memory, int64_t begin, int64_t end) {
  const auto next = memory.there.lower_bound(begin);
  if (next != memory.there.end() && next->first < end) return next;
  if (next == memory.there.begin() || std::prev(next)->second.end <= begin) return memory.there.end();
  return std::prev(next);
}

bool is_free(const Memory& memory, int64_t begin, int64_t end) {
  return living(memory, begin, end) == memory.there.end();
}

// Whether the place of a slot is free, or comes free while another thread lets go of what a
// collective, which is complete, was given. Waited for in vain, somebody keeps it: an op, perhaps,
// that does so in each run. No other slot is waited for in this run, nor this one in the next.
bool comes_free(size_t slot, int64_t begin, int64_t end) {
  const Memory& memory = *active->memory;
  uint8_t& vain = active->program->vain[slot];
  for (int i = 0; i < kPatience && !vain && active->wanted < 0 && !is_free(memory, begin, end); ++i) {
    mutex.unlock();
    PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (state != nullptr) PyEval_RestoreThread(state);
    mutex.lock();
  }
  const auto found = living(memory, begin, end);
  vain = found != memory.there.end();
  if (vain && active->wanted < 0) {
    active->wanted = static_cast<int64_t>(slot);
    const Living& kept = found->second;
    active->kept_slot = kept.program == active->program->number ? kept.slot : -1;
    active->kept_bytes = kept.end - found->first;
  }
  return !vain;
}

// Where the plan puts the allocation that comes next on this thread, if it does; may let go of the
// mutex for a moment.
std::pair<Served, char*> planned(size_t size, bool cuda) {
  if (size == 0 || !inside_op || (active->memory->device != kCpu) != cuda) {
    return {Served::kByNobody, nullptr};
  }
  if (cursor == limit || cursor->size != static_cast<int64_t>(size)) {
    active->outside += static_cast<int64_t>(size);
    return {Served::kByNobody, nullptr};
  }
  const Slot slot = *cursor;
  const size_t number = static_cast<size_t>(cursor++ - active->program->slots.data());
  const auto& elsewhere = active->elsewhere;
  if (slot.offset < 0 || (number < elsewhere.size() && elsewhere[number])) {
    return {Served::kOutsideAsPlanned, nullptr};
  }
  const int64_t end = slot.offset + slot.size;
  if (!comes_free(number, slot.offset, end)) {
    active->outside += static_cast<int64_t>(size);  // somebody keeps what the plan gave up
    return {Served::kByNobody, nullptr};
  }
  active->memory->there.emplace(
      slot.offset, Living{end, active->program->number, static_cast<int64_t>(number)});
  if (end > active->high_water) active->high_water = end;
  return {Served::kInArena, active->memory->base + slot.offset};
}

}  // namespace
