// Simulated copy engines on the CPU: one thread per direction, which executes its copies in order.
//
// A copy takes at least a given duration from the time at which it could begin (after its
// submission and the copy before it), so that a link of any bandwidth can be simulated. Its bytes
// are copied piece by piece over that time, as by a device. The threads never hold Python's lock.
// A copy is due when it would have ended had its thread always had a processor. A wait is measured
// until then: an op's time is without waits for a processor, too.
//
// At the end: wrappers of CUDA runtime functions, by which copies on a device are submitted.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;
using Micros = std::chrono::duration<double, std::micro>;

double microseconds(Clock::time_point moment) { return Micros(moment.time_since_epoch()).count(); }

Clock::duration as_duration(Micros time) { return std::chrono::duration_cast<Clock::duration>(time); }

// Of this thread.
Micros processor_time() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

struct Copy {
  char* target;
  const char* source;
  size_t bytes;
  Micros min_duration;
  Clock::time_point asked;
  Clock::time_point begin, due, end;
  std::string fault;
  int waits = 1;  // that are to come
  bool over = false;
};

class CopyEngine {
 public:
  CopyEngine() : thread_([this] { run(); }) {}

  ~CopyEngine() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    asked_.notify_all();
    thread_.join();
  }

  long submit(char* target, const char* source, size_t bytes, double min_us) {
    auto copy = std::make_shared<Copy>();
    *copy = {target, source, bytes, Micros(min_us), Clock::now()};
    std::lock_guard<std::mutex> lock(mutex_);
    copies_[++last_] = copy;
    // A short copy is carried out at once if no other copy is before it: to wake the thread, and the
    // waiting one after it, takes longer.
    if (bytes <= kAtOnce && target && source && waiting_.empty() && !busy_) {
      std::memcpy(target, source, bytes);
      copy->begin = std::max(copy->asked, free_);
      free_ = copy->due = copy->end = copy->begin + as_duration(copy->min_duration);
      copy->over = true;
      return last_;
    }
    waiting_.push_back(copy);
    asked_.notify_one();
    return last_;
  }

  std::shared_ptr<Copy> find(long copy_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = copies_.find(copy_id);
    return found == copies_.end() ? nullptr : found->second;
  }

  bool finished(const Copy& copy) {
    std::lock_guard<std::mutex> lock(mutex_);
    return copy.over && copy.end <= Clock::now();
  }

  // True if the copy finished within the time.
  bool wait(const Copy& copy, std::chrono::milliseconds time) {
    const Clock::time_point until = Clock::now() + time;
    std::unique_lock<std::mutex> lock(mutex_);
    if (!over_.wait_until(lock, until, [&] { return copy.over; })) return false;
    lock.unlock();
    std::this_thread::sleep_until(std::min(copy.end, until));
    return copy.end <= until;
  }

  // One thread more waits for the copy.
  void share(Copy& copy) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++copy.waits;
  }

  void forget(long copy_id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = copies_.find(copy_id);
    if (found != copies_.end() && --found->second->waits == 0) copies_.erase(found);
  }

  // Waits until all submitted copies have finished.
  void settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait(lock, [&] { return waiting_.empty() && !busy_; });
  }

 private:
  static constexpr size_t kPieces = 8, kAtOnce = 1 << 16, kSmallest = 1 << 12, kLargest = 1 << 20;

  static void sleep_until(const Copy& copy, double part) {
    std::this_thread::sleep_until(copy.begin + as_duration(copy.min_duration * part));
  }

  void run() {
    prctl(PR_SET_TIMERSLACK, 1);  // ns; else a thread sleeps 50 us longer than asked to
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      asked_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const std::shared_ptr<Copy> copy = waiting_.front();
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      carry_out(*copy);
      lock.lock();
      busy_ = false;
      copy->over = true;
      over_.notify_all();
    }
  }

  void carry_out(Copy& copy) {
    // Not the time at which this thread woke up: delays must not accumulate.
    copy.begin = std::max(copy.asked, free_);
    const Micros before = processor_time();
    try {
      if (copy.bytes != 0) {
        if (copy.target == nullptr || copy.source == nullptr) {
          throw std::invalid_argument("a copy from or to a null pointer");
        }
      }
      const size_t piece = std::clamp(copy.bytes / kPieces, kSmallest, kLargest);
      for (size_t done = 0; done < copy.bytes; done += piece) {
        if (done != 0) sleep_until(copy, static_cast<double>(done) / copy.bytes);
        std::memcpy(copy.target + done, copy.source + done, std::min(piece, copy.bytes - done));
      }
      sleep_until(copy, 1);
    } catch (const std::exception& error) {
      copy.fault = error.what();
    }
    copy.end = Clock::now();
    const Micros least = std::max(copy.min_duration, processor_time() - before);
    free_ = copy.due = copy.begin + as_duration(least);
  }

  std::mutex mutex_;
  std::condition_variable asked_, over_;
  std::deque<std::shared_ptr<Copy>> waiting_;
  std::map<long, std::shared_ptr<Copy>> copies_;
  Clock::time_point free_;  // used by the thread that copies
  long last_ = 0;
  bool closing_ = false;
  bool busy_ = false;
  std::thread thread_;  // last member: it uses all others
};

CopyEngine* as_engine(PyObject* handle) {
  return static_cast<CopyEngine*>(PyLong_AsVoidPtr(handle));
}

PyObject* engine_open(PyObject*, PyObject*) {
  try {
    return PyLong_FromVoidPtr(new CopyEngine());
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "cannot start a copy engine: %s", error.what());
  }
}

PyObject* engine_close(PyObject*, PyObject* handle) {
  CopyEngine* engine = as_engine(handle);
  Py_BEGIN_ALLOW_THREADS;
  delete engine;
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* engine_submit(PyObject*, PyObject* args) {
  PyObject* handle;
  unsigned long long target, source;
  Py_ssize_t bytes;
  double min_us;
  if (!PyArg_ParseTuple(args, "OKKnd", &handle, &target, &source, &bytes, &min_us)) {
    return nullptr;
  }
  try {
    return PyLong_FromLong(as_engine(handle)->submit(reinterpret_cast<char*>(target),
                                                reinterpret_cast<const char*>(source),
                                                static_cast<size_t>(bytes), min_us));
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_MemoryError, "cannot submit a copy: %s", error.what());
  }
}

// The copy of the arguments (engine, copy); null with an error if there is none.
std::shared_ptr<Copy> find_copy(PyObject* args, CopyEngine** engine, long* copy_id) {
  PyObject* handle;
  if (!PyArg_ParseTuple(args, "Ol", &handle, copy_id)) return nullptr;
  *engine = as_engine(handle);
  std::shared_ptr<Copy> copy = (*engine)->find(*copy_id);
  if (copy == nullptr) PyErr_Format(PyExc_KeyError, "no copy %ld", *copy_id);
  return copy;
}

PyObject* engine_share(PyObject*, PyObject* args) {
  CopyEngine* engine;
  long copy_id;
  const std::shared_ptr<Copy> copy = find_copy(args, &engine, &copy_id);
  if (copy == nullptr) return nullptr;
  engine->share(*copy);
  Py_RETURN_NONE;
}

PyObject* engine_wait(PyObject*, PyObject* args) {
  CopyEngine* engine;
  long copy_id;
  const std::shared_ptr<Copy> copy = find_copy(args, &engine, &copy_id);
  if (copy == nullptr) return nullptr;
  const Clock::time_point began = Clock::now();
  bool over = engine->finished(*copy);  // with Python's lock, which another thread would take
  while (!over) {
    Py_BEGIN_ALLOW_THREADS;
    over = engine->wait(*copy, std::chrono::milliseconds(50));
    Py_END_ALLOW_THREADS;
    if (!over && PyErr_CheckSignals() != 0) return nullptr;
  }
  engine->forget(copy_id);
  if (!copy->fault.empty()) {
    return PyErr_Format(PyExc_RuntimeError, "a copy failed: %s", copy->fault.c_str());
  }
  const double waited = std::max(0.0, Micros(copy->due - began).count());
  return Py_BuildValue("ddd", waited, microseconds(copy->begin), microseconds(copy->end));
}

// Like `wait`, but not interruptible, and without errors.
PyObject* engine_finish(PyObject*, PyObject* args) {
  PyObject* handle;
  long copy_id;
  if (!PyArg_ParseTuple(args, "Ol", &handle, &copy_id)) return nullptr;
  CopyEngine* engine = as_engine(handle);
  if (const std::shared_ptr<Copy> copy = engine->find(copy_id)) {
    Py_BEGIN_ALLOW_THREADS;
    while (!engine->wait(*copy, std::chrono::milliseconds(1000))) {
    }
    Py_END_ALLOW_THREADS;
    engine->forget(copy_id);
  }
  Py_RETURN_NONE;
}

PyObject* engine_settle(PyObject*, PyObject* handle) {
  CopyEngine* engine = as_engine(handle);
  Py_BEGIN_ALLOW_THREADS;
  engine->settle();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// Functions of the CUDA runtime, called by address, so that this file compiles without CUDA. Through
// PyTorch's objects a copy would cost as much CPU time as a few ops.
struct Device {
  int (*create)(void** event, unsigned flags);
  int (*record)(void* event, void* stream);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*copy)(void* to, const void* from, size_t bytes, int kind, void* stream);
} device;

constexpr unsigned kNoTimes = 2;  // cudaEventDisableTiming
constexpr int kByAddress = 4;     // cudaMemcpyDefault

void* as_pointer(unsigned long long address) { return reinterpret_cast<void*>(address); }

PyObject* none_or(int code) {
  if (code != 0) return PyErr_Format(PyExc_RuntimeError, "a CUDA copy failed with error %d", code);
  Py_RETURN_NONE;
}

PyObject* cuda_bind(PyObject*, PyObject* args) {
  unsigned long long create, record, wait, copy;
  if (!PyArg_ParseTuple(args, "KKKK", &create, &record, &wait, &copy)) return nullptr;
  device.create = reinterpret_cast<decltype(device.create)>(create);
  device.record = reinterpret_cast<decltype(device.record)>(record);
  device.wait = reinterpret_cast<decltype(device.wait)>(wait);
  device.copy = reinterpret_cast<decltype(device.copy)>(copy);
  Py_RETURN_NONE;
}

PyObject* cuda_event(PyObject*, PyObject*) {
  void* event = nullptr;
  const int code = device.create(&event, kNoTimes);
  return code == 0 ? PyLong_FromVoidPtr(event) : none_or(code);
}

PyObject* cuda_copy(PyObject*, PyObject* args) {
  unsigned long long target, source, current, stream, event;
  Py_ssize_t bytes;
  if (!PyArg_ParseTuple(args, "KKnKKK", &target, &source, &bytes, &current, &stream, &event)) {
    return nullptr;
  }
  // One event twice: a wait refers to the last record before the wait.
  int code = 0;
  Py_BEGIN_ALLOW_THREADS;
  code = device.record(as_pointer(event), as_pointer(current));
  if (code == 0) code = device.wait(as_pointer(stream), as_pointer(event), 0);
  if (code == 0) {
    code = device.copy(as_pointer(target), as_pointer(source), static_cast<size_t>(bytes),
                       kByAddress, as_pointer(stream));
  }
  if (code == 0) code = device.record(as_pointer(event), as_pointer(stream));
  Py_END_ALLOW_THREADS;
  return none_or(code);
}

PyObject* cuda_wait(PyObject*, PyObject* args) {
  unsigned long long stream, event;
  if (!PyArg_ParseTuple(args, "KK", &stream, &event)) return nullptr;
  return none_or(device.wait(as_pointer(stream), as_pointer(event), 0));
}

PyMethodDef methods[] = {
    {"cuda_bind", cuda_bind, METH_VARARGS, "(addresses: create, record, wait, copy)"},
    {"cuda_event", cuda_event, METH_NOARGS, "() -> handle of an event on the current device"},
    {"cuda_copy", cuda_copy, METH_VARARGS,
     "(to, from, bytes, current stream, stream, event): on stream, after what is on the current one."},
    {"cuda_wait", cuda_wait, METH_VARARGS, "(stream, event): let the stream wait for the event."},
    {"open", engine_open, METH_NOARGS, "() -> handle of a thread that copies"},
    {"close", engine_close, METH_O, "End the thread after its copies."},
    {"ask", engine_submit, METH_VARARGS, "(handle, to, from, bytes, min us) -> copy id"},
    {"share", engine_share, METH_VARARGS, "(handle, copy id): one thread more will wait for it."},
    {"wait", engine_wait, METH_VARARGS, "(handle, copy id) -> us waited until it was due, begin and end, us"},
    {"finish", engine_finish, METH_VARARGS, "(handle, copy id): wait, and ignore errors."},
    {"settle", engine_settle, METH_O, "Wait for all copies."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "coop_plan_copy_engines", nullptr, -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_coop_plan_copy_engines() { return PyModule_Create(&definition); }
