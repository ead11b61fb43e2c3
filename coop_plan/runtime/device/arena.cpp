// The arena: an allocator in front of PyTorch's, and the Python functions that drive it.
//
// On the CPU the allocator is registered by PyTorch's interface. Data pointer and context of an
// allocation are the same, and one deleter serves both kinds of memory, because oneDNN allocates by
// raw_allocate and frees by raw_deallocate.
//
// On CUDA the function `allocate` of PyTorch's allocator is replaced. Allocations that the plan
// does not place keep PyTorch's cache, errors, streams, statistics and CUDA graph pools.
// (PyTorch's pluggable allocators have none of these.) The memory of an arena is a tensor that the
// caller owns. Memory that is lent serves the borrower's current stream only. `record_stream` has no
// effect on a borrowed tensor, as on any tensor of an arena.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>

#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "arena.h"
#include "allocator_hook.h"

namespace {

at::Allocator* original = nullptr;
coop::Allocate original_cuda = nullptr;
auto& recorded = *new std::unordered_map<void*, at::DeleterFnPtr>();  // on CUDA; guarded by mutex

void release(void* pointer) {
  if (pointer == nullptr) return;
  if (is_recorded(false)) log_free(pointer);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (give(pointer)) {
      remove_stray(pointer);
    } else if (freed_in_memory(pointer)) {
      return;
    }
  }
  original->raw_deleter()(pointer);
}

class ArenaAllocator final : public at::Allocator {
 public:
  at::DataPtr allocate(size_t size) override {
    const bool noted = watched > 0 && static_cast<int64_t>(size) >= kStray;
    Served served;
    char* place;
    {
      std::lock_guard<std::mutex> lock(mutex);
      std::tie(served, place) = planned(size, false);
      if (place == nullptr) relieve(static_cast<int64_t>(size));
    }
    if (place != nullptr) return {place, place, &release, at::Device(at::DeviceType::CPU)};
    const std::string line = noted && served == Served::kByNobody ? user_line() : "";
    at::DataPtr data = original->allocate(size);
    void* p = data.release_context();
    if (p != nullptr) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        const auto bytes = static_cast<int64_t>(size);
        if (noted && served == Served::kByNobody) add_stray(p, bytes, line);
        take(p, bytes);
      }
      if (is_recorded(false)) log_alloc(p, size);
    }
    return {p, p, &release, at::Device(at::DeviceType::CPU)};
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

// Deleter of tensors in an arena, and of recorded allocations.
void cuda_release(void* pointer) {
  if (is_recorded(true)) log_free(pointer);
  at::DeleterFnPtr own = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (freed_in_memory(pointer)) return;
    const auto found = recorded.find(pointer);
    if (found == recorded.end()) return;
    own = found->second;
    recorded.erase(found);
  }
  own(pointer);
}

at::DataPtr in_memory(const Memory* memory, char* p) {
  const auto index = static_cast<c10::DeviceIndex>(memory->device);
  return {p, p, &cuda_release, at::Device(at::DeviceType::CUDA, index)};
}

// Device and stream that an allocation of this thread is for.
std::pair<int, int64_t> device_and_stream() {
  const auto* guard = c10::impl::getDeviceGuardImpl(at::DeviceType::CUDA);
  const at::Device device = guard->getDevice();
  return {device.index(), guard->getStream(device).id()};
}

at::DataPtr cuda_allocate(void* self, size_t size) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (char* p = planned(size, true).second) return in_memory(active->memory, p);
    if (!lent.empty() && size > 0 && !inside_op && !recording) {
      const auto [device, stream] = device_and_stream();
      const auto [memory, p] = borrowed(size, this_thread(), device, stream);
      if (p != nullptr) return in_memory(memory, p);
    }
  }
  at::DataPtr data = original_cuda(self, size);
  void* p = data.get();
  if (inside_op && active->memory->device != kCpu) active->pytorch_bytes += static_cast<int64_t>(size);
  // A recorded allocation needs our deleter, which PyTorch's record_stream does not support: only
  // while an op is profiled.
  if (is_recorded(true) && p != nullptr && data.get_context() == p) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      recorded[p] = data.get_deleter();
    }
    log_alloc(p, size);
    data.release_context();
    return {p, p, &cuda_release, data.device()};
  }
  return data;
}

// Ends the interval of one kind of time and begins one of `next`. It counts the thread's CPU time, as
// profiles do, so that other processes do not change it.
void time_as(int next) {
  if (next == timed_class) return;
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  const double us = static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
  if (timed_class >= 0 && active != nullptr) active->elapsed_us[timed_class] += us - timed_since;
  timed_since = us;
  timed_class = next;
}

template <typename T>
T* as(PyObject* object) {
  return static_cast<T*>(PyLong_AsVoidPtr(object));
}

// `paths` are prefixes of files that are not the user's code.
PyObject* install(PyObject*, PyObject* paths) {
  if (original == nullptr) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(paths); ++i) {
      foreign.emplace_back(PyUnicode_AsUTF8(PyTuple_GetItem(paths, i)));
    }
    original = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new ArenaAllocator(), 1);
    const auto unlock = [] { mutex.unlock(); };
    pthread_atfork([] { mutex.lock(); }, unlock, unlock);
  }
  Py_RETURN_NONE;
}

PyObject* install_cuda(PyObject*, PyObject* address) {
  if (original_cuda == nullptr) {
    original_cuda = coop::exchange_allocate(as<at::Allocator>(address), &cuda_allocate);
  }
  return PyBool_FromLong(original_cuda != nullptr);
}

PyObject* memory_create(PyObject*, PyObject* number) {
  const Py_ssize_t bytes = PyLong_AsSsize_t(number);
  if (bytes == -1 && PyErr_Occurred()) return nullptr;
  auto* memory = new Memory();
  memory->bytes = memory->counted = static_cast<size_t>(bytes);
  memory->mapped = (memory->bytes + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> lock(mutex);
  relieve(bytes);
  if (memory->mapped != 0) {
    void* found = mmap(nullptr, memory->mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
      delete memory;
      return PyErr_Format(PyExc_MemoryError, "cannot map an arena of %zd bytes", bytes);
    }
    memory->base = static_cast<char*>(found);
  }
  enlist(memory);
  count(bytes);
  return PyLong_FromVoidPtr(memory);
}

// Memory on a CUDA device; the caller owns it until it is retired and no tensor is live in it.
PyObject* memory_adopt(PyObject*, PyObject* args) {
  int device;
  unsigned long long address;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "iKn", &device, &address, &bytes)) return nullptr;
  auto* memory = new Memory();
  memory->device = device;
  memory->base = reinterpret_cast<char*>(address);
  memory->bytes = memory->mapped = static_cast<size_t>(bytes);
  std::lock_guard<std::mutex> lock(mutex);
  enlist(memory);
  return PyLong_FromVoidPtr(memory);
}

PyObject* memory_retire(PyObject*, PyObject* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  retire(as<Memory>(handle));
  Py_RETURN_NONE;
}

// Marks a memory as idle until the next `begin`: its pages are freed before the process exceeds
// `ceiling` bytes.
PyObject* memory_rest(PyObject*, PyObject* args) {
  PyObject* handle;
  long long ceiling;
  if (!PyArg_ParseTuple(args, "OL", &handle, &ceiling)) return nullptr;
  Memory* memory = as<Memory>(handle);
  std::lock_guard<std::mutex> lock(mutex);
  if (memory->device == kCpu) {
    wake(memory);
    memory->ceiling = std::max(0LL, ceiling);
    memory->tail = static_cast<int64_t>(memory->mapped);
    idle.push_back(memory);
    relieve(0);
  }
  Py_RETURN_NONE;
}

// Offsets of the slots of the live tensors in a memory; kBorrowed for one from a loan.
PyObject* memory_there(PyObject*, PyObject* handle) {
  std::vector<int64_t> found;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [begin, living] : as<Memory>(handle)->live) found.push_back(living.planned);
  }
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t i = 0; i < found.size(); ++i) {
    PyList_SetItem(list, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(found[i]));
  }
  return list;
}

// Lends a memory to this thread, for allocations on its current stream.
PyObject* memory_lend(PyObject*, PyObject* handle) {
  const int64_t stream = device_and_stream().second;
  std::lock_guard<std::mutex> lock(mutex);
  lend(as<Memory>(handle), this_thread(), stream);
  Py_RETURN_NONE;
}

// Ends a loan; returns the number of its tensors that are alive.
PyObject* memory_recall(PyObject*, PyObject* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  Memory* memory = as<Memory>(handle);
  recall(memory);
  const auto found = std::count_if(memory->live.begin(), memory->live.end(), [](const auto& entry) {
    return entry.second.slot == kBorrowed;
  });
  return PyLong_FromSsize_t(found);
}

// Moves the live tensor of a storage to a free place in its memory; the caller copies its bytes.
PyObject* memory_move(PyObject*, PyObject* args) {
  PyObject *handle, *object;
  long long offset;
  if (!PyArg_ParseTuple(args, "OOL", &handle, &object, &offset)) return nullptr;
  Memory* memory = as<Memory>(handle);
  auto* storage = as<c10::StorageImpl>(object);
  std::lock_guard<std::mutex> lock(mutex);
  const auto entry = memory->live.find(static_cast<char*>(storage->mutable_data()) - memory->base);
  LiveTensor moved = entry->second;
  moved.end += offset - entry->first;
  memory->live.erase(entry);
  memory->live.emplace(offset, moved);
  storage->set_data_ptr(in_memory(memory, memory->base + offset)).release_context();
  Py_RETURN_NONE;
}

// Exchanges the memory of two storages of equal size, of which one may have none.
PyObject* exchange_memory(PyObject*, PyObject* args) {
  PyObject *first, *second;
  if (!PyArg_ParseTuple(args, "OO", &first, &second)) return nullptr;
  auto* one = as<c10::StorageImpl>(first);
  auto* other = as<c10::StorageImpl>(second);
  one->set_data_ptr_noswap(other->set_data_ptr(one->set_data_ptr(at::DataPtr())));
  Py_RETURN_NONE;
}

void drop_owner(void* owner) {
  if (!Py_IsInitialized()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(static_cast<PyObject*>(owner));
  PyGILState_Release(state);
}

// Lets a storage have memory at an address, which `owner` keeps alive.
PyObject* lay_over(PyObject*, PyObject* args) {
  PyObject *storage, *address, *owner;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(args, "OOnO", &storage, &address, &size, &owner)) return nullptr;
  auto* one = as<c10::StorageImpl>(storage);
  Py_INCREF(owner);
  one->set_data_ptr_noswap({as<char>(address), owner, &drop_owner, one->device()});
  one->set_nbytes(size);
  Py_RETURN_NONE;
}

struct Map : at::MapAllocator {
  using at::MapAllocator::flags_;
};

// True if a storage is a slice of a file that this process alone has mapped, or of such a slice.
// `slice` is the deleter of slices, whose context is the storage that they are of.
bool is_of_private_map(const c10::StorageImpl* one, c10::DeleterFnPtr slice) {
  if (one->data_ptr().get_deleter() != slice) return false;
  while (one->data_ptr().get_deleter() == slice) {
    one = static_cast<const c10::StorageImpl*>(one->data_ptr().get_context());
  }
  const auto* map = at::MapAllocator::fromDataPtr(one->data_ptr());
  return map != nullptr && (map->*&Map::flags_ & at::ALLOCATOR_MAPPED_SHARED) == 0;
}

// Lets a storage tell from now on whether a numpy array was made of it, if its memory was read from
// a file (the allocator's, without its mark) or is a slice of a mapped one, freed like `like`'s, and
// one tensor alone has it. Returns true if so.
PyObject* take_over(PyObject*, PyObject* args) {
  PyObject *storage, *like;
  if (!PyArg_ParseTuple(args, "OO", &storage, &like)) return nullptr;
  auto* one = as<c10::StorageImpl>(storage);
  const auto deleter = one->data_ptr().get_deleter();
  const bool sliced = is_of_private_map(one, as<c10::StorageImpl>(like)->data_ptr().get_deleter());
  const bool read = one->allocator() == nullptr &&
                    (deleter == release || deleter == original->raw_deleter());
  const bool found = (sliced || read) && c10::raw::intrusive_ptr::use_count(one) == 2;  // and Python's
  if (found) {
    one->set_allocator(c10::GetCPUAllocator());
    one->set_resizable(true);
  }
  return PyBool_FromLong(found);
}

PyObject* program_create(PyObject*, PyObject* args) {
  const char *first, *sizes, *offsets, *kinds;
  Py_ssize_t n_first, n_sizes, n_offsets, n_kinds;
  int smaller;
  if (!PyArg_ParseTuple(args, "y#y#y#y#p", &first, &n_first, &sizes, &n_sizes, &offsets, &n_offsets,
                        &kinds, &n_kinds, &smaller)) {
    return nullptr;
  }
  auto* program = new Program();
  program->smaller = smaller != 0;
  const auto* firsts = reinterpret_cast<const int64_t*>(first);
  program->first.assign(firsts, firsts + n_first / sizeof(int64_t));
  const size_t slots = n_sizes / sizeof(int64_t);
  for (size_t i = 0; i < slots; ++i) {
    program->slots.push_back({reinterpret_cast<const int64_t*>(sizes)[i],
                              reinterpret_cast<const int64_t*>(offsets)[i]});
  }
  program->kinds.assign(kinds, kinds + n_kinds);
  program->timed_out.assign(slots, 0);
  {
    std::lock_guard<std::mutex> lock(mutex);
    program->number = ++programs;
  }
  return PyLong_FromVoidPtr(program);
}

PyObject* program_destroy(PyObject*, PyObject* handle) {
  delete as<Program>(handle);
  Py_RETURN_NONE;
}

PyObject* run_create(PyObject*, PyObject* program) {
  auto* run = new Run();
  run->program = as<Program>(program);
  return PyLong_FromVoidPtr(run);
}

PyObject* run_destroy(PyObject*, PyObject* handle) {
  Run* run = as<Run>(handle);
  {
    std::lock_guard<std::mutex> lock(mutex);
    close(&run->window);
  }
  delete run;
  Py_RETURN_NONE;
}

// Slots of the program that PyTorch's allocator serves in this run, regardless of their offsets.
PyObject* run_elsewhere(PyObject*, PyObject* args) {
  PyObject* handle;
  const char* text;
  Py_ssize_t length;
  if (!PyArg_ParseTuple(args, "Oy#", &handle, &text, &length)) return nullptr;
  Run* run = as<Run>(handle);
  run->elsewhere.assign(run->program->slots.size(), 0);
  const auto* numbers = reinterpret_cast<const int64_t*>(text);
  for (size_t i = 0; i < length / sizeof(int64_t); ++i) {
    run->elsewhere[static_cast<size_t>(numbers[i])] = 1;
  }
  Py_RETURN_NONE;
}

PyObject* begin(PyObject*, PyObject* args) {
  PyObject *run, *handle;
  int fresh, watch;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "OOnpp", &run, &handle, &bytes, &fresh, &watch)) return nullptr;
  as<Run>(run)->outer = active;
  active = as<Run>(run);
  Memory* memory = active->memory = as<Memory>(handle);
  active->arena_bytes = -1;
  if (memory->device != kCpu) active->arena_bytes = static_cast<int64_t>(memory->bytes);
  {
    std::lock_guard<std::mutex> lock(mutex);
    wake(memory);
    recall_from(this_thread());
    recall(memory);
    if (memory->device == kCpu) {
      resize(memory, bytes);
    }
    if (fresh) open(&active->window, static_cast<int64_t>(memory->counted), watch);
    active->window.thread = this_thread();
  }
  if (fresh) {
    active->high_water = 0;
    active->outside = active->pytorch_bytes = 0;
    active->conflict_slot = active->conflicting_slot = -1;
    active->conflicting_bytes = 0;
    for (double& each : active->elapsed_us) each = 0;
  }
  inside_op = false;
  timed_class = -1;
  Py_RETURN_NONE;
}

// Called before each op, with the number of its occurrence in the program.
PyObject* enter(PyObject*, PyObject* number) {
  const long k = PyLong_AsLong(number);
  const Program& program = *active->program;
  cursor = program.slots.data() + program.first[k];
  limit = program.slots.data() + program.first[k + 1];
  inside_op = true;
  time_as(program.kinds[k]);
  Py_RETURN_NONE;
}

PyObject* pause(PyObject*, PyObject*) {
  time_as(-1);
  inside_op = false;
  Py_RETURN_NONE;
}

PyObject* pause_for_copy(PyObject*, PyObject*) {
  time_as(kCopies);
  inside_op = false;
  Py_RETURN_NONE;
}

PyObject* leave(PyObject*, PyObject*) {
  time_as(-1);
  inside_op = false;
  if (active != nullptr) active = active->outer;
  Py_RETURN_NONE;
}

// Counts the bytes of a memory, which existed when the window of a run was opened, as the run's.
PyObject* run_include(PyObject*, PyObject* args) {
  PyObject *handle, *memory;
  if (!PyArg_ParseTuple(args, "OO", &handle, &memory)) return nullptr;
  Window& window = as<Run>(handle)->window;
  std::lock_guard<std::mutex> lock(mutex);
  const auto counted = static_cast<int64_t>(as<Memory>(memory)->counted);
  window.before -= counted;
  window.now += counted;
  window.peak = std::max(window.peak, window.now);
  Py_RETURN_NONE;
}

// Counts bytes allocated in the window of a run as if they had existed before all that followed a
// moment, at which the window's peak was `peak`.
PyObject* run_exclude(PyObject*, PyObject* args) {
  PyObject* handle;
  long long peak, bytes;
  if (!PyArg_ParseTuple(args, "OLL", &handle, &peak, &bytes)) return nullptr;
  Window& window = as<Run>(handle)->window;
  std::lock_guard<std::mutex> lock(mutex);
  window.before += bytes;
  window.now -= bytes;
  window.peak = std::max<int64_t>(peak, window.peak - bytes);
  Py_RETURN_NONE;
}

// Ends the run and closes its window.
PyObject* run_end(PyObject*, PyObject* handle) {
  Run* run = as<Run>(handle);
  std::lock_guard<std::mutex> lock(mutex);
  close(&run->window);
  Py_RETURN_NONE;
}

// Positions of the addresses that were allocated after the window of a run was opened.
PyObject* run_made(PyObject*, PyObject* args) {
  PyObject* handle;
  const char* text;
  Py_ssize_t length;
  if (!PyArg_ParseTuple(args, "Oy#", &handle, &text, &length)) return nullptr;
  const int64_t first = as<Run>(handle)->window.first;
  const auto* addresses = reinterpret_cast<const uintptr_t*>(text);
  PyObject* list = PyList_New(0);
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < length / sizeof(uintptr_t); ++i) {
    const auto found = taken.find(reinterpret_cast<void*>(addresses[i]));
    if (found == taken.end() || found->second.number <= first) continue;
    PyObject* position = PyLong_FromSize_t(i);
    PyList_Append(list, position);
    Py_DECREF(position);
  }
  return list;
}

PyObject* counters(PyObject*, PyObject* handle) {
  const Run* run = as<Run>(handle);
  const Window& window = run->window;
  const int64_t bytes = run->arena_bytes < 0 ? window.peak : run->arena_bytes + run->pytorch_bytes;
  return Py_BuildValue("LLLLdddLLLsLLL", static_cast<long long>(run->high_water),
                       static_cast<long long>(run->outside), static_cast<long long>(bytes),
                       static_cast<long long>(window.before), run->elapsed_us[0],
                       run->elapsed_us[1], run->elapsed_us[kCopies],
                       static_cast<long long>(window.stray_count),
                       static_cast<long long>(window.stray_bytes),
                       static_cast<long long>(window.largest.size), window.largest.line.c_str(),
                       static_cast<long long>(run->conflict_slot),
                       static_cast<long long>(run->conflicting_slot),
                       static_cast<long long>(run->conflicting_bytes));
}

// Reference count of a C++ autograd node, 0 if it is unknown for this PyTorch. The node is in
// `struct THPCppFunction` of torch/csrc/autograd/python_cpp_function.h, whose pointer type changed
// after PyTorch 2.12.
PyObject* node_owners(PyObject*, PyObject* wrapper) {
  long owners = 0;
#if defined(COOP_NODE_SHARED)
  struct Wrapper {
    PyObject_HEAD std::shared_ptr<void> node;
  };
  owners = reinterpret_cast<Wrapper*>(wrapper)->node.use_count();
#elif defined(COOP_NODE_INTRUSIVE)
  struct Wrapper {
    PyObject_HEAD c10::intrusive_ptr_target* node;
  };
  owners = c10::raw::intrusive_ptr::use_count(reinterpret_cast<Wrapper*>(wrapper)->node);
#endif
  return PyLong_FromLong(owners);
}

// Opens a window of this thread, without an arena.
PyObject* window_open(PyObject*, PyObject*) {
  auto* window = new Window();
  std::lock_guard<std::mutex> lock(mutex);
  open(window, 0, false);
  return PyLong_FromVoidPtr(window);
}

PyObject* window_close(PyObject*, PyObject* handle) {
  auto* window = as<Window>(handle);
  {
    std::lock_guard<std::mutex> lock(mutex);
    close(window);
  }
  PyObject* found = Py_BuildValue("LL", static_cast<long long>(window->peak),
                                  static_cast<long long>(window->now));
  delete window;
  return found;
}

PyObject* record_begin(PyObject*, PyObject* cuda) {
  if (events == nullptr) events = new std::vector<Event>();
  events->clear();
  recording_cuda = cuda == Py_True;
  recording = true;
  std::lock_guard<std::mutex> lock(mutex);
  workers.clear();
  recorder = this_thread();
  ++recording_number;
  Py_RETURN_NONE;
}

PyObject* record_end(PyObject*, PyObject*) {
  recording = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    recorder = 0;
  }
  PyObject* list = PyList_New(0);
  for (const Event& event : *events) {
    PyObject* item =
        Py_BuildValue("iKL", event.is_alloc ? 1 : 0,
                      static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(event.pointer)),
                      static_cast<long long>(event.size));
    PyList_Append(list, item);
    Py_DECREF(item);
  }
  events->clear();
  return list;
}

PyObject* workers_peak(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  int64_t bytes = 0;
  for (const Worker& worker : workers) bytes += worker.peak;
  return PyLong_FromLongLong(bytes);
}

PyObject* process_bytes(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  return Py_BuildValue("LL", static_cast<long long>(current_bytes),
                       static_cast<long long>(peak_bytes));
}

PyObject* reset_peak(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  peak_bytes = current_bytes;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"install", install, METH_O,
     "(path prefixes of library code): put the arena allocator in front of PyTorch's."},
    {"install_cuda", install_cuda, METH_O,
     "(address of PyTorch's CUDA allocator) -> True if `allocate` was replaced"},
    {"memory_create", memory_create, METH_O, "(bytes) -> handle"},
    {"memory_adopt", memory_adopt, METH_VARARGS, "(CUDA device, address, bytes) -> handle"},
    {"memory_retire", memory_retire, METH_O, "Unmap a memory after its last tensor dies."},
    {"memory_rest", memory_rest, METH_VARARGS,
     "(handle, ceiling): mark as idle; free pages before the process exceeds the ceiling."},
    {"memory_there", memory_there, METH_O,
     "(handle) -> offsets of the slots of its live tensors, ascending by address; -1: from a loan"},
    {"memory_lend", memory_lend, METH_O,
     "(handle): serve allocations of this thread on its current stream from free bytes."},
    {"memory_recall", memory_recall, METH_O,
     "(handle): end a loan. -> number of its tensors that are alive"},
    {"memory_move", memory_move, METH_VARARGS,
     "(handle, storage, offset): move a live tensor within its memory, without its bytes."},
    {"exchange_memory", exchange_memory, METH_VARARGS,
     "(storage, storage): exchange the memory of two c10::StorageImpl."},
    {"lay_over", lay_over, METH_VARARGS,
     "(storage, address, bytes, owner): let a storage have memory that the owner keeps."},
    {"take_over", take_over, METH_VARARGS,
     "(storage, slice of a storage) -> True if a file gave its memory, to one tensor."},
    {"program_create", program_create, METH_VARARGS, "(first, sizes, offsets, kinds, smaller) -> handle"},
    {"program_destroy", program_destroy, METH_O, "Free a program."},
    {"run_create", run_create, METH_O, "(program) -> handle of one call of it"},
    {"run_destroy", run_destroy, METH_O, "Free a run."},
    {"run_elsewhere", run_elsewhere, METH_VARARGS,
     "(run, slot numbers): let PyTorch's allocator serve these in this run."},
    {"run_include", run_include, METH_VARARGS,
     "(run, memory): count the bytes of an older memory as the run's."},
    {"run_exclude", run_exclude, METH_VARARGS,
     "(run, peak, bytes): do not count bytes that were allocated since the window had this peak."},
    {"run_end", run_end, METH_O, "Close the window of a run."},
    {"run_made", run_made, METH_VARARGS,
     "(run, addresses) -> positions of those allocated after its window was opened"},
    {"begin", begin, METH_VARARGS,
     "(run, memory, its bytes, fresh, watch): enter the arena in this thread."},
    {"enter", enter, METH_O, "(k): the next op is occurrence k."},
    {"pause", pause, METH_NOARGS, "End the current op."},
    {"pause_for_copy", pause_for_copy, METH_NOARGS, "End the current op; a copy follows."},
    {"leave", leave, METH_NOARGS, "Leave the arena, or return to that of the enclosing run."},
    {"counters", counters, METH_O,
     "(run) -> high water, outside bytes, peak of the step, bytes before it, compute us,"
     " recompute us, copies us, count and bytes of strays at the peak, bytes and line of the largest, the first"
     " occupied slot, the slot of the tensor in it (-1: of another step), its bytes"},
    {"node_owners", node_owners, METH_O, "(C++ autograd node) -> its reference count"},
    {"window_open", window_open, METH_NOARGS, "-> handle of a window of this thread"},
    {"window_close", window_close, METH_O,
     "(handle) -> peak and change of the thread's bytes since it was opened"},
    {"record_begin", record_begin, METH_O, "(cuda): log this thread's allocations and frees."},
    {"record_end", record_end, METH_NOARGS, "-> [(is_alloc, pointer, bytes)]"},
    {"workers_peak", workers_peak, METH_NOARGS,
     "-> sum of the peaks of other threads during the last recording"},
    {"process_bytes", process_bytes, METH_NOARGS, "-> current, peak bytes of the process"},
    {"reset_peak", reset_peak, METH_NOARGS, "Reset the peak to the current bytes."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "coop_plan_arena", nullptr, -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_coop_plan_arena() { return PyModule_Create(&definition); }
