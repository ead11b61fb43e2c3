// The CPU arena: a c10::Allocator in front of PyTorch's own, and the calls that drive it.
//
// A step is a program of op occurrences, each with the slots its allocations take, in the order in
// which the op makes them. While a thread is inside an occurrence, its k-th allocation is served at
// the address of the k-th slot, if the size is the planned one. Everything else, on every thread,
// goes to PyTorch's allocator. Addresses come from the plan alone: freeing a pointer into an arena
// only counts.
//
// The data pointer and the context of what `allocate` returns are the same, and one deleter serves
// both kinds of memory, because oneDNN allocates by raw_allocate and frees by raw_deallocate.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

struct Slot {
  int64_t size;
  int64_t offset;  // from the arena's start; -1: served by PyTorch's allocator, as planned
};

struct Arena {
  char* base = nullptr;
  size_t mapped = 0;
  std::vector<int64_t> first;  // occurrence k owns slots [first[k], first[k + 1])
  std::vector<Slot> slots;
  std::vector<uint8_t> again;  // occurrence k is a recomputation
  int64_t high_water = 0;
  int64_t outside = 0;
  double elapsed_us[2] = {0, 0};  // first computations, recomputations
  std::atomic<int64_t> live{0};
  std::atomic<bool> retired{false};
};

constexpr int kMaxArenas = 1024;
std::atomic<Arena*> arenas[kMaxArenas];
std::atomic<int> arena_count{0};
std::mutex arenas_mutex;

std::atomic<int64_t> current_bytes{0};
std::atomic<int64_t> peak_bytes{0};

struct Event {
  bool is_alloc;
  uintptr_t pointer;
  int64_t size;
};

thread_local Arena* active = nullptr;
thread_local const Slot* cursor = nullptr;
thread_local const Slot* limit = nullptr;
thread_local bool inside_op = false;
thread_local int timed_class = -1;
thread_local Clock::time_point timed_since;
thread_local bool recording = false;
thread_local std::vector<Event>* events = nullptr;

at::Allocator* original = nullptr;

void unmap(Arena* arena) {
  // The entry stays (null), so that readers never see a moved one.
  for (int i = 0; i < arena_count.load(); ++i) {
    if (arenas[i].load() == arena) arenas[i].store(nullptr);
  }
  if (arena->base != nullptr) munmap(arena->base, arena->mapped);
  delete arena;
}

Arena* arena_of(void* pointer) {
  char* p = static_cast<char*>(pointer);
  const int count = arena_count.load(std::memory_order_acquire);
  for (int i = 0; i < count; ++i) {
    Arena* arena = arenas[i].load(std::memory_order_acquire);
    if (arena != nullptr && p >= arena->base && p < arena->base + arena->mapped) return arena;
  }
  return nullptr;
}

void release(void* pointer) {
  if (pointer == nullptr) return;
  if (recording) events->push_back({false, reinterpret_cast<uintptr_t>(pointer), 0});
  if (Arena* arena = arena_of(pointer)) {
    if (arena->live.fetch_sub(1) == 1 && arena->retired.load()) {
      std::lock_guard<std::mutex> lock(arenas_mutex);
      unmap(arena);
    }
    return;
  }
  current_bytes.fetch_sub(static_cast<int64_t>(malloc_usable_size(pointer)));
  original->raw_deleter()(pointer);
}

class ArenaAllocator final : public at::Allocator {
 public:
  at::DataPtr allocate(size_t size) override {
    if (size != 0 && inside_op) {
      if (cursor != limit && cursor->size == static_cast<int64_t>(size)) {
        const Slot slot = *cursor++;
        if (slot.offset >= 0) {
          char* p = active->base + slot.offset;
          const int64_t end = slot.offset + slot.size;
          if (end > active->high_water) active->high_water = end;
          active->live.fetch_add(1);
          return {p, p, &release, at::Device(at::DeviceType::CPU)};
        }
      } else {
        active->outside += static_cast<int64_t>(size);
      }
    }
    at::DataPtr data = original->allocate(size);
    void* p = data.release_context();
    if (p != nullptr) {
      const int64_t now =
          current_bytes.fetch_add(static_cast<int64_t>(malloc_usable_size(p))) +
          static_cast<int64_t>(malloc_usable_size(p));
      int64_t seen = peak_bytes.load();
      while (now > seen && !peak_bytes.compare_exchange_weak(seen, now)) {
      }
      if (recording) {
        events->push_back(
            {true, reinterpret_cast<uintptr_t>(p), static_cast<int64_t>(size)});
      }
    }
    return {p, p, &release, at::Device(at::DeviceType::CPU)};
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

void close_interval() {
  const Clock::time_point now = Clock::now();
  if (timed_class >= 0 && active != nullptr) {
    active->elapsed_us[timed_class] +=
        std::chrono::duration<double, std::micro>(now - timed_since).count();
  }
  timed_since = now;
}

Arena* as_arena(PyObject* object) { return static_cast<Arena*>(PyLong_AsVoidPtr(object)); }

PyObject* install(PyObject*, PyObject*) {
  if (original == nullptr) {
    original = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new ArenaAllocator(), 1);
  }
  Py_RETURN_NONE;
}

PyObject* create(PyObject*, PyObject* args) {
  Py_ssize_t size;
  const char *first, *sizes, *offsets, *again;
  Py_ssize_t n_first, n_sizes, n_offsets, n_again;
  if (!PyArg_ParseTuple(args, "ny#y#y#y#", &size, &first, &n_first, &sizes, &n_sizes, &offsets,
                        &n_offsets, &again, &n_again)) {
    return nullptr;
  }
  auto* arena = new Arena();
  const auto* firsts = reinterpret_cast<const int64_t*>(first);
  arena->first.assign(firsts, firsts + n_first / sizeof(int64_t));
  const size_t count = n_sizes / sizeof(int64_t);
  for (size_t i = 0; i < count; ++i) {
    arena->slots.push_back({reinterpret_cast<const int64_t*>(sizes)[i],
                            reinterpret_cast<const int64_t*>(offsets)[i]});
  }
  arena->again.assign(again, again + n_again);
  const size_t page = 4096;
  arena->mapped = (static_cast<size_t>(size) + page - 1) / page * page;
  if (arena->mapped != 0) {
    void* memory = mmap(nullptr, arena->mapped, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      delete arena;
      return PyErr_Format(PyExc_MemoryError, "cannot map an arena of %zd bytes", size);
    }
    arena->base = static_cast<char*>(memory);
  }
  std::lock_guard<std::mutex> lock(arenas_mutex);
  int at = 0;
  while (at < arena_count.load() && arenas[at].load() != nullptr) ++at;
  if (at == kMaxArenas) {
    if (arena->base != nullptr) munmap(arena->base, arena->mapped);
    delete arena;
    PyErr_SetString(PyExc_MemoryError, "too many arenas at once");
    return nullptr;
  }
  arenas[at].store(arena, std::memory_order_release);
  if (at == arena_count.load()) arena_count.store(at + 1, std::memory_order_release);
  return PyLong_FromVoidPtr(arena);
}

PyObject* destroy(PyObject*, PyObject* handle) {
  Arena* arena = as_arena(handle);
  std::lock_guard<std::mutex> lock(arenas_mutex);
  arena->retired.store(true);
  if (arena->live.load() == 0) unmap(arena);
  Py_RETURN_NONE;
}

PyObject* begin(PyObject*, PyObject* args) {
  PyObject* handle;
  int fresh;
  if (!PyArg_ParseTuple(args, "Op", &handle, &fresh)) return nullptr;
  active = as_arena(handle);
  if (fresh) {
    active->high_water = 0;
    active->outside = 0;
    active->elapsed_us[0] = active->elapsed_us[1] = 0;
  }
  inside_op = false;
  timed_class = -1;
  Py_RETURN_NONE;
}

// One call per op: its number is the occurrence's in the program.
PyObject* enter(PyObject*, PyObject* number) {
  const long k = PyLong_AsLong(number);
  close_interval();
  const Slot* slots = active->slots.data();
  cursor = slots + active->first[k];
  limit = slots + active->first[k + 1];
  inside_op = true;
  timed_class = active->again[k];
  Py_RETURN_NONE;
}

PyObject* pause(PyObject*, PyObject*) {
  close_interval();
  inside_op = false;
  timed_class = -1;
  Py_RETURN_NONE;
}

PyObject* leave(PyObject*, PyObject*) {
  close_interval();
  inside_op = false;
  timed_class = -1;
  active = nullptr;
  Py_RETURN_NONE;
}

PyObject* live(PyObject*, PyObject* handle) {
  return PyLong_FromLongLong(as_arena(handle)->live.load());
}

PyObject* counters(PyObject*, PyObject* handle) {
  Arena* arena = as_arena(handle);
  return Py_BuildValue("LLdd", static_cast<long long>(arena->high_water),
                       static_cast<long long>(arena->outside), arena->elapsed_us[0],
                       arena->elapsed_us[1]);
}

PyObject* record_begin(PyObject*, PyObject*) {
  if (events == nullptr) events = new std::vector<Event>();
  events->clear();
  recording = true;
  Py_RETURN_NONE;
}

PyObject* record_end(PyObject*, PyObject*) {
  recording = false;
  PyObject* list = PyList_New(0);
  for (const Event& event : *events) {
    PyObject* item =
        Py_BuildValue("iKL", event.is_alloc ? 1 : 0,
                      static_cast<unsigned long long>(event.pointer),
                      static_cast<long long>(event.size));
    PyList_Append(list, item);
    Py_DECREF(item);
  }
  events->clear();
  return list;
}

PyObject* process_bytes(PyObject*, PyObject*) {
  return Py_BuildValue("LL", static_cast<long long>(current_bytes.load()),
                       static_cast<long long>(peak_bytes.load()));
}

PyObject* reset_peak(PyObject*, PyObject*) {
  peak_bytes.store(current_bytes.load());
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"install", install, METH_NOARGS, "Put the arena allocator in front of PyTorch's."},
    {"create", create, METH_VARARGS, "(bytes, first, sizes, offsets, again) -> handle"},
    {"destroy", destroy, METH_O, "Unmap an arena once nothing lives in it."},
    {"begin", begin, METH_VARARGS, "(handle, fresh): this thread runs in the arena."},
    {"enter", enter, METH_O, "(k): op occurrence k comes next."},
    {"pause", pause, METH_NOARGS, "No op until the next enter."},
    {"leave", leave, METH_NOARGS, "This thread is out of the arena."},
    {"live", live, METH_O, "(handle) -> allocations in the arena not freed yet"},
    {"counters", counters, METH_O, "(handle) -> high water, outside bytes, first us, again us"},
    {"record_begin", record_begin, METH_NOARGS, "Log this thread's allocations and frees."},
    {"record_end", record_end, METH_NOARGS, "-> [(is_alloc, pointer, bytes)]"},
    {"process_bytes", process_bytes, METH_NOARGS, "-> current, peak bytes outside arenas"},
    {"reset_peak", reset_peak, METH_NOARGS, "Start a new peak from the current bytes."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "coop_plan_arena", nullptr, -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_coop_plan_arena() { return PyModule_Create(&definition); }
