// Requested bytes of the process: PyTorch's CPU allocations, and the memory of arenas.
//
// A window is open from a run's forward to the end of its backward. It counts the allocations of its
// thread, the arena included, until any thread frees them (a process group's threads free what they
// sent), and keeps the peak. A watched window also records allocations outside the plan ("strays"),
// with the user's line.

#pragma once

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kStray = 4096;  // smallest allocation outside the plan that is recorded

using Thread = uint64_t;  // our own number: the system reuses those of ended threads

struct Stray {
  int64_t size;
  std::string line;
};

struct Taken {
  int64_t size;
  Thread thread;
  int64_t recording;  // during which a worker allocated it, 0: none
  int64_t number;     // of the allocation
};

struct Window {
  bool open = false;
  bool watched = false;
  Thread thread = 0;
  int64_t before = 0;  // bytes of the process when it was opened, without the run's memory
  int64_t first = 0;   // number of the last allocation before it was opened
  int64_t now = 0;
  int64_t peak = 0;
  std::unordered_map<void*, Stray> strays;
  int64_t stray_count = 0;  // at the peak
  int64_t stray_bytes = 0;
  Stray largest{0, ""};
};

// Allocations of threads other than the one that records an op: a kernel's workers.
struct Worker {
  Thread thread;
  int64_t now;
  int64_t peak;
};

auto& mutex = *new std::mutex();  // never destroyed: tensors outlive main
auto& taken = *new std::unordered_map<void*, Taken>();  // PyTorch's CPU allocations; guarded by mutex
auto& windows = *new std::vector<Window*>();            // open windows; guarded by mutex
auto& foreign = *new std::vector<std::string>();  // path prefixes that are not the user's code
int64_t current_bytes = 0;  // guarded by mutex
int64_t peak_bytes = 0;     // guarded by mutex
int64_t allocations = 0;    // number of allocations so far; guarded by mutex
auto& workers = *new std::vector<Worker>();  // guarded by mutex
Thread recorder = 0;                         // guarded by mutex; 0: none
int64_t recording_number = 0;                // guarded by mutex
thread_local int watched = 0;  // number of watched windows of this thread

Thread this_thread() {
  static std::atomic<Thread> last{0};
  thread_local const Thread number = ++last;
  return number;
}

// The caller of all functions below holds the mutex, except for the last one.

void note_strays(Window* window) {
  window->stray_count = window->stray_bytes = 0;
  window->largest = {0, ""};
  for (const auto& [pointer, stray] : window->strays) {
    ++window->stray_count;
    window->stray_bytes += stray.size;
    if (stray.size > window->largest.size) window->largest = stray;
  }
}

void count_worker(int64_t bytes, Thread thread) {
  auto found = std::find_if(workers.begin(), workers.end(),
                            [&](const Worker& worker) { return worker.thread == thread; });
  if (found == workers.end()) found = workers.insert(found, {thread, 0, 0});
  found->now += bytes;
  found->peak = std::max(found->peak, found->now);
}

void count(int64_t bytes, Thread thread = this_thread()) {
  current_bytes += bytes;
  peak_bytes = std::max(peak_bytes, current_bytes);
  for (Window* window : windows) {
    if (window->thread != thread) continue;
    window->now += bytes;
    if (window->now <= window->peak) continue;
    window->peak = window->now;
    if (window->watched) note_strays(window);
  }
}

void take(void* pointer, int64_t bytes) {
  const Thread thread = this_thread();
  const bool by_worker = recorder != 0 && recorder != thread;
  taken[pointer] = {bytes, thread, by_worker ? recording_number : 0, ++allocations};
  if (by_worker) count_worker(bytes, thread);
  count(bytes, thread);
}

// False if the pointer is not tracked. A worker's free counts only for memory of this recording.
bool give(void* pointer) {
  const auto found = taken.find(pointer);
  if (found == taken.end()) return false;
  const Taken& what = found->second;
  if (recorder != 0 && what.recording == recording_number) count_worker(-what.size, what.thread);
  count(-what.size, what.thread);
  taken.erase(found);
  return true;
}

void add_stray(void* pointer, int64_t size, const std::string& line) {
  for (Window* window : windows) {
    if (window->watched && window->thread == this_thread()) {
      window->strays[pointer] = {size, line};
    }
  }
}

void remove_stray(void* pointer) {
  for (Window* window : windows) {
    if (window->watched) window->strays.erase(pointer);
  }
}

void close(Window* window) {
  if (!window->open) return;
  window->open = false;
  std::erase(windows, window);
  if (window->watched && window->thread == this_thread()) --watched;
  window->watched = false;
  window->strays.clear();
}

void open(Window* window, int64_t memory_bytes, bool watch) {
  close(window);
  *window = Window();
  window->open = true;
  window->watched = watch;
  window->thread = this_thread();
  window->before = current_bytes - memory_bytes;
  window->first = allocations;
  window->now = window->peak = memory_bytes;
  windows.push_back(window);
  if (watch) ++watched;
}

// The innermost frame of the user's code in this thread, "file:line"; takes the GIL.
std::string user_line() {
  std::string found;
  const PyGILState_STATE state = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && found.empty()) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* text = PyUnicode_AsUTF8(code->co_filename);
    const std::string file = text == nullptr ? "" : text;
    const bool theirs = file.empty() || file[0] == '<' ||
                        std::any_of(foreign.begin(), foreign.end(), [&](const std::string& path) {
                          return file.compare(0, path.size(), path) == 0;
                        });
    if (!theirs) found = file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyErr_Clear();
  PyGILState_Release(state);
  return found;
}

}  // namespace
