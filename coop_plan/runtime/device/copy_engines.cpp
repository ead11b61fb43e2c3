// Copies beside compute on the CPU: one thread a direction, which takes its copies in order.
//
// This stands in for the copy engines of a device. A copy is over no sooner than an artificial
// duration after it could begin (asked for, and the one before it over), so that a link of any
// bandwidth can be tried; its bytes move piece by piece over that time, as a device moves them.
// Nothing here needs Python but the calls; the threads never hold its lock.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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

struct Copy {
  char* target;
  const char* source;
  size_t bytes;
  Micros least;
  Clock::time_point asked;
  Clock::time_point begin, end;
  std::string fault;
  bool over = false;
};

class Link {
 public:
  Link() : thread_([this] { run(); }) {}

  ~Link() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    asked_.notify_all();
    thread_.join();
  }

  long ask(char* target, const char* source, size_t bytes, double least_us) {
    auto copy = std::make_shared<Copy>();
    *copy = {target, source, bytes, Micros(least_us), Clock::now()};
    std::lock_guard<std::mutex> lock(mutex_);
    copies_[++last_] = copy;
    waiting_.push_back(copy);
    asked_.notify_one();
    return last_;
  }

  std::shared_ptr<Copy> find(long ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = copies_.find(ticket);
    return found == copies_.end() ? nullptr : found->second;
  }

  // Whether it was over within the time.
  bool wait(const Copy& copy, std::chrono::milliseconds time) {
    std::unique_lock<std::mutex> lock(mutex_);
    return over_.wait_for(lock, time, [&] { return copy.over; });
  }

  void forget(long ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    copies_.erase(ticket);
  }

  // Nothing is asked for and not over when it returns.
  void settle() {
    std::unique_lock<std::mutex> lock(mutex_);
    over_.wait(lock, [&] { return waiting_.empty() && !busy_; });
  }

 private:
  static constexpr size_t kPieces = 8, kSmallest = 1 << 12, kLargest = 1 << 20;

  static void sleep_until(const Copy& copy, double part) {
    std::this_thread::sleep_until(copy.begin +
                                  std::chrono::duration_cast<Clock::duration>(copy.least * part));
  }

  void run() {
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
    // Not the moment at which this thread woke up: being late must not add up.
    copy.begin = std::max(copy.asked, free_);
    try {
      if (copy.bytes != 0) {
        if (copy.target == nullptr || copy.source == nullptr) {
          throw std::invalid_argument("a copy from or to nowhere");
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
    free_ = copy.begin + std::chrono::duration_cast<Clock::duration>(copy.least);
    if (copy.least == Micros::zero()) free_ = copy.end;
  }

  std::mutex mutex_;
  std::condition_variable asked_, over_;
  std::deque<std::shared_ptr<Copy>> waiting_;
  std::map<long, std::shared_ptr<Copy>> copies_;
  Clock::time_point free_;  // of the thread alone
  long last_ = 0;
  bool closing_ = false;
  bool busy_ = false;
  std::thread thread_;  // last: it uses all the others
};

Link* as_link(PyObject* handle) { return static_cast<Link*>(PyLong_AsVoidPtr(handle)); }

PyObject* link_open(PyObject*, PyObject*) {
  try {
    return PyLong_FromVoidPtr(new Link());
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_RuntimeError, "no thread for copies: %s", error.what());
  }
}

PyObject* link_close(PyObject*, PyObject* handle) {
  Link* link = as_link(handle);
  Py_BEGIN_ALLOW_THREADS;
  delete link;
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* link_ask(PyObject*, PyObject* args) {
  PyObject* handle;
  unsigned long long target, source;
  Py_ssize_t bytes;
  double least_us;
  if (!PyArg_ParseTuple(args, "OKKnd", &handle, &target, &source, &bytes, &least_us)) {
    return nullptr;
  }
  try {
    return PyLong_FromLong(as_link(handle)->ask(reinterpret_cast<char*>(target),
                                                reinterpret_cast<const char*>(source),
                                                static_cast<size_t>(bytes), least_us));
  } catch (const std::exception& error) {
    return PyErr_Format(PyExc_MemoryError, "a copy cannot be asked for: %s", error.what());
  }
}

PyObject* link_wait(PyObject*, PyObject* args) {
  PyObject* handle;
  long ticket;
  if (!PyArg_ParseTuple(args, "Ol", &handle, &ticket)) return nullptr;
  Link* link = as_link(handle);
  const std::shared_ptr<Copy> copy = link->find(ticket);
  if (copy == nullptr) return PyErr_Format(PyExc_KeyError, "no copy %ld", ticket);
  const Clock::time_point began = Clock::now();
  bool over = false;
  while (!over) {
    Py_BEGIN_ALLOW_THREADS;
    over = link->wait(*copy, std::chrono::milliseconds(50));
    Py_END_ALLOW_THREADS;
    if (!over && PyErr_CheckSignals() != 0) return nullptr;
  }
  link->forget(ticket);
  if (!copy->fault.empty()) {
    return PyErr_Format(PyExc_RuntimeError, "a copy failed: %s", copy->fault.c_str());
  }
  return Py_BuildValue("ddd", Micros(Clock::now() - began).count(), microseconds(copy->begin),
                       microseconds(copy->end));
}

// As wait, but nothing interrupts it, and a fault is none.
PyObject* link_finish(PyObject*, PyObject* args) {
  PyObject* handle;
  long ticket;
  if (!PyArg_ParseTuple(args, "Ol", &handle, &ticket)) return nullptr;
  Link* link = as_link(handle);
  if (const std::shared_ptr<Copy> copy = link->find(ticket)) {
    Py_BEGIN_ALLOW_THREADS;
    while (!link->wait(*copy, std::chrono::milliseconds(1000))) {
    }
    Py_END_ALLOW_THREADS;
    link->forget(ticket);
  }
  Py_RETURN_NONE;
}

PyObject* link_settle(PyObject*, PyObject* handle) {
  Link* link = as_link(handle);
  Py_BEGIN_ALLOW_THREADS;
  link->settle();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// The CUDA runtime's own calls, given by their addresses: what is compiled here needs no CUDA. Through
// PyTorch's objects a copy takes the CPU as long as a few ops.
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
  if (code != 0) return PyErr_Format(PyExc_RuntimeError, "CUDA says %d to a copy", code);
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
  // Twice the same event: a wait is for what was recorded when it was asked for.
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
    {"cuda_wait", cuda_wait, METH_VARARGS, "(stream, event): it goes on after it."},
    {"open", link_open, METH_NOARGS, "() -> handle of a thread that copies"},
    {"close", link_close, METH_O, "End the thread once its copies are over."},
    {"ask", link_ask, METH_VARARGS, "(handle, to, from, bytes, least us) -> ticket"},
    {"wait", link_wait, METH_VARARGS, "(handle, ticket) -> us waited, when it began and ended, us"},
    {"finish", link_finish, METH_VARARGS, "(handle, ticket): wait, whatever comes of it."},
    {"settle", link_settle, METH_O, "Return once all copies are over."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "coop_plan_links", nullptr, -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_coop_plan_links() { return PyModule_Create(&definition); }
