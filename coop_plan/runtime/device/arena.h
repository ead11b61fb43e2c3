// State of the arena: memories, the programs that run in them, counters, the log of one op.
//
// A step is a program of op occurrences, each with the slots its allocations take, in the order in
// which the op makes them. A run is one call of it, in a memory of its own.
// While a thread is inside an occurrence, its k-th allocation is served at the address of the k-th
// slot, if the size is the planned one (or a smaller one, if the program is for smaller sizes, too)
// and no tensor lives there. So an op that keeps a tensor, or
// allocates other memory than when it was profiled, costs bytes but never overwrites. All other
// allocations, on every thread, go to PyTorch's allocator.
//
// If tensors of a memory are still alive when another run begins, they keep their pages, and the
// run gets other memory.
//
// A memory on a CUDA device may be lent to one thread between two runs: bytes without a live tensor
// then serve all allocations of that thread on one stream, by first fit. A loan ends with the next
// run of the thread. Tensors that outlive it occupy their bytes as any live tensor does.
//
// One mutex guards all shared state. It is held during a fork, so that it is free in the child.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <iterator>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "accounting.h"

namespace {

struct Slot {
  int64_t size;
  int64_t offset;  // from the arena's start; -1: served by PyTorch's allocator, as planned
};

constexpr int kCpu = -1;  // device index of CPU memory
constexpr int kCopies = 2;  // kind of time; 0: first computations, 1: recomputations, -1: other
constexpr int64_t kBorrowed = -1;
constexpr int64_t kDeviceAlignment = 512;  // of allocations from a loan
constexpr int kMaxPolls = 300;  // polls, 100 µs apart, for a slot to become free

struct LiveTensor {
  int64_t end;      // offset
  int64_t program;  // number of its program
  int64_t slot;     // its slot in the program; kBorrowed: from a loan
  int64_t planned;  // offset of that slot
};

struct Memory {
  int device = kCpu;
  char* base = nullptr;
  size_t bytes = 0;    // requested
  size_t counted = 0;  // bytes of it that current_bytes includes
  size_t mapped = 0;
  std::map<int64_t, LiveTensor> live;  // live tensors by offset
  bool retired = false;
  int64_t ceiling = -1;  // if idle: its pages are freed before the process exceeds this; -1: in use
  int64_t tail = 0;      // pages from this offset on are freed
  Thread borrower = 0;   // thread that it is lent to; 0: none
  int64_t stream = 0;    // stream whose allocations it then serves
  std::map<int64_t, int64_t> gaps;  // free bytes of a loan: begin to end
};

struct Program {
  int64_t number = 0;
  std::vector<int64_t> first;  // occurrence k owns slots [first[k], first[k + 1])
  std::vector<Slot> slots;
  std::vector<uint8_t> kinds;       // kind of time of occurrence k
  std::vector<uint8_t> timed_out;   // the last wait for slot k timed out; guarded by mutex
  bool smaller = false;  // slots also serve smaller allocations
};

bool serves(const Program& program, const Slot& slot, size_t size) {
  const auto bytes = static_cast<int64_t>(size);
  return program.smaller ? bytes <= slot.size : bytes == slot.size;
}

struct Run {
  Program* program = nullptr;
  Memory* memory = nullptr;
  Run* outer = nullptr;      // enclosing run of this thread
  int64_t arena_bytes = -1;  // size of a memory on CUDA; -1: CPU
  int64_t high_water = 0;
  int64_t outside = 0;
  int64_t conflict_slot = -1;     // first slot occupied by a tensor past its planned life
  int64_t conflicting_slot = -1;  // slot of that tensor, if it is from this program
  int64_t conflicting_bytes = 0;
  int64_t pytorch_bytes = 0;  // bytes that PyTorch's CUDA allocator served to the ops
  Window window;
  std::vector<uint8_t> elsewhere;   // slots that PyTorch's allocator serves in this run
  double elapsed_us[kCopies + 1] = {};  // by kind of time
};

constexpr int64_t kPage = 4096;
auto& memories = *new std::map<char*, Memory*>();  // by base address; guarded by mutex
auto& idle = *new std::vector<Memory*>();          // guarded by mutex
auto& lent = *new std::vector<Memory*>();          // guarded by mutex
int64_t programs = 0;                              // number of programs so far; guarded by mutex

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
thread_local double timed_since = 0;  // µs of the thread's CPU time
thread_local bool recording = false;
thread_local bool recording_cuda = false;
thread_local std::vector<Event>* events = nullptr;

int64_t page_below(int64_t offset) { return offset / kPage * kPage; }
int64_t page_above(int64_t offset) { return (offset + kPage - 1) / kPage * kPage; }

int64_t aligned(int64_t offset) {
  return (offset + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
}

// The caller of all functions below holds the mutex.

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

// Frees the whole pages between two offsets that hold no live tensor; returns their bytes.
int64_t give_back(Memory* memory, int64_t from, int64_t to) {
  int64_t given = 0;
  const auto give = [&](int64_t begin, int64_t end) {
    begin = page_above(begin);
    end = page_below(end);
    if (begin >= end) return;
    madvise(memory->base + begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
    given += end - begin;
  };
  auto next = memory->live.lower_bound(from);
  if (next != memory->live.begin()) from = std::max(from, std::prev(next)->second.end);
  for (; next != memory->live.end() && next->first < to; ++next) {
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

// Frees pages of idle memories, the last ones first, so that the process stays below their ceilings
// after an allocation of `bytes`.
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

// Sets the bytes that a run uses, from the start; frees the pages behind them.
void resize(Memory* memory, int64_t bytes) {
  const int64_t counted = static_cast<int64_t>(memory->counted);
  if (counted > bytes) give_back(memory, bytes, static_cast<int64_t>(memory->mapped));
  if (counted < bytes) relieve(bytes - counted);
  memory->counted = static_cast<size_t>(bytes);
  count(bytes - counted);
}

void wake(Memory* memory) {
  if (memory->ceiling < 0) return;
  memory->ceiling = -1;
  std::erase(idle, memory);
}

void recall(Memory* memory) {
  if (memory->borrower == 0) return;
  memory->borrower = 0;
  memory->gaps.clear();
  std::erase(lent, memory);
}

// Ends the loans to a thread.
void recall_from(Thread thread) {
  for (Memory* memory : std::vector<Memory*>(lent)) {
    if (memory->borrower == thread) recall(memory);
  }
}

void lend(Memory* memory, Thread thread, int64_t stream) {
  recall(memory);
  memory->borrower = thread;
  memory->stream = stream;
  int64_t begin = 0;
  const auto add = [&](int64_t end) {
    if (begin < end) memory->gaps.emplace(begin, end);
  };
  for (const auto& [offset, living] : memory->live) {
    add(offset / kDeviceAlignment * kDeviceAlignment);
    begin = std::max(begin, aligned(living.end));
  }
  add(static_cast<int64_t>(memory->bytes) / kDeviceAlignment * kDeviceAlignment);
  lent.push_back(memory);
}

// The first gap of the thread's loans that holds so many bytes; null and null if none does.
std::pair<Memory*, char*> borrowed(size_t size, Thread thread, int device, int64_t stream) {
  const int64_t bytes = aligned(static_cast<int64_t>(size));
  for (Memory* memory : lent) {
    if (memory->borrower != thread || memory->device != device || memory->stream != stream) continue;
    for (auto gap = memory->gaps.begin(); gap != memory->gaps.end(); ++gap) {
      const auto [begin, end] = *gap;
      if (end - begin < bytes) continue;
      memory->gaps.erase(gap);
      if (begin + bytes < end) memory->gaps.emplace(begin + bytes, end);
      memory->live.emplace(begin, LiveTensor{begin + bytes, 0, kBorrowed, kBorrowed});
      return {memory, memory->base + begin};
    }
  }
  return {nullptr, nullptr};
}

// Adds the bytes of a borrowed tensor that died to the gaps of the loan.
void return_gap(Memory* memory, int64_t begin, int64_t end) {
  auto& gaps = memory->gaps;
  auto next = gaps.lower_bound(begin);
  if (next != gaps.end() && next->first == end) {
    end = next->second;
    next = gaps.erase(next);
  }
  if (next != gaps.begin() && std::prev(next)->second == begin) {
    std::prev(next)->second = end;
  } else {
    gaps.emplace(begin, end);
  }
}

void retire(Memory* memory) {
  wake(memory);
  recall(memory);
  memory->retired = true;
  if (memory->live.empty()) return unmap(memory);
  if (memory->device != kCpu) return;
  give_back(memory, 0, static_cast<int64_t>(memory->mapped));
  int64_t held = 0;
  int64_t last = 0;  // end of the pages counted so far
  for (const auto& [begin, living] : memory->live) {
    const int64_t from = std::max(last, page_below(begin));
    last = std::max(last, page_above(living.end));
    held += last - from;
  }
  discount(memory, static_cast<int64_t>(memory->counted) - held);
}

// Frees a pointer in an arena's memory; false if it lies in none.
bool freed_in_memory(void* pointer) {
  char* p = static_cast<char*>(pointer);
  auto found = memories.upper_bound(p);
  if (found == memories.begin()) return false;
  Memory* memory = (--found)->second;
  if (p >= memory->base + memory->mapped) return false;
  const auto entry = memory->live.find(p - memory->base);
  if (entry == memory->live.end()) return true;
  const int64_t begin = entry->first;
  const int64_t end = entry->second.end;
  const bool from_loan = entry->second.slot == kBorrowed;
  memory->live.erase(entry);
  if (from_loan && memory->borrower != 0) return_gap(memory, begin, end);
  if (!memory->retired) return true;
  if (memory->live.empty()) {
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

// A live tensor between two offsets, or the end.
std::map<int64_t, LiveTensor>::const_iterator living(const Memory& memory, int64_t begin,
                                                     int64_t end) {
  const auto next = memory.live.lower_bound(begin);
  if (next != memory.live.end() && next->first < end) return next;
  if (next == memory.live.begin() || std::prev(next)->second.end <= begin) return memory.live.end();
  return std::prev(next);
}

bool is_free(const Memory& memory, int64_t begin, int64_t end) {
  return living(memory, begin, end) == memory.live.end();
}

// True if a slot is free, or becomes free within a short wait: another thread may still hold the
// inputs of a completed collective. After a time-out the slot is taken to be occupied for good, for
// example by an op that keeps a tensor in each run. Then no other slot is waited for in this run,
// nor this one in the next.
bool comes_free(size_t slot, int64_t begin, int64_t end) {
  const Memory& memory = *active->memory;
  uint8_t& timed_out = active->program->timed_out[slot];
  const auto may_wait = [&] { return !timed_out && active->conflict_slot < 0; };
  for (int i = 0; i < kMaxPolls && may_wait() && !is_free(memory, begin, end); ++i) {
    mutex.unlock();
    PyThreadState* state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (state != nullptr) PyEval_RestoreThread(state);
    mutex.lock();
  }
  const auto found = living(memory, begin, end);
  timed_out = found != memory.live.end();
  if (timed_out && active->conflict_slot < 0) {
    active->conflict_slot = static_cast<int64_t>(slot);
    const LiveTensor& kept = found->second;
    active->conflicting_slot = kept.program == active->program->number ? kept.slot : -1;
    active->conflicting_bytes = kept.end - found->first;
  }
  return !timed_out;
}

// The planned address of this thread's next allocation, if it has one; may release the mutex
// temporarily.
std::pair<Served, char*> planned(size_t size, bool cuda) {
  if (size == 0 || !inside_op || (active->memory->device != kCpu) != cuda) {
    return {Served::kByNobody, nullptr};
  }
  if (cursor == limit || !serves(*active->program, *cursor, size)) {
    active->outside += static_cast<int64_t>(size);
    return {Served::kByNobody, nullptr};
  }
  const Slot slot = *cursor;
  const size_t number = static_cast<size_t>(cursor++ - active->program->slots.data());
  const auto& elsewhere = active->elsewhere;
  if (slot.offset < 0 || (number < elsewhere.size() && elsewhere[number])) {
    return {Served::kOutsideAsPlanned, nullptr};
  }
  const int64_t end = slot.offset + static_cast<int64_t>(size);
  if (!comes_free(number, slot.offset, end)) {
    active->outside += static_cast<int64_t>(size);  // the slot holds a tensor past its planned life
    return {Served::kByNobody, nullptr};
  }
  active->memory->live.emplace(
      slot.offset,
      LiveTensor{end, active->program->number, static_cast<int64_t>(number), slot.offset});
  if (end > active->high_water) active->high_water = end;
  return {Served::kInArena, active->memory->base + slot.offset};
}

}  // namespace
