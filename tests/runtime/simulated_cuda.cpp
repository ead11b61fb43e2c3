// A pretended CUDA device for PyTorch's CPU build: tensors on "cuda:0" lie in memory from malloc and
// are computed by the CPU's kernels, the backward runs on a thread of autograd's, and memory comes
// from an object where PyTorch keeps its CUDA allocator.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "fake_cuda_device.h"

namespace {

std::atomic<int64_t> current{0};
std::atomic<int64_t> peak{0};

// A graph's private pool: what is allocated during its capture stays reserved until the graph dies.
struct Pool {
  std::map<char*, size_t> blocks;
  std::set<char*> freed;
};
std::mutex pools_held;
std::map<int64_t, Pool> pools;
int64_t capturing = 0;  // the graph under capture
bool invalid = false;    // as a device has it after an error in a capture
bool waits_are_told = false;
bool replaying = false;
thread_local int in_fallback = 0;

void give_back(void* pointer) {
  auto* start = static_cast<int64_t*>(pointer) - 64;
  current -= *start;
  const std::lock_guard<std::mutex> lock(pools_held);
  for (auto& [graph, pool] : pools) {
    if (pool.blocks.count(static_cast<char*>(pointer)) != 0) {
      pool.freed.insert(static_cast<char*>(pointer));
      return;
    }
  }
  std::free(start);
}

// As the device does: the host may not wait for a stream that is captured.
void host_waits() {
  if (in_fallback > 0) return;
  invalid = invalid || capturing != 0;
  TORCH_CHECK(capturing == 0, "CUDA error: operation not permitted when stream is capturing");
  if (waits_are_told) TORCH_WARN("called a synchronizing CUDA operation");
}

// Stands where c10::cuda::CUDACachingAllocator::NativeCachingAllocator does, and like it has other
// virtual functions after those of at::Allocator.
class Pretended : public at::Allocator {
 public:
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &give_back, kDevice};
    auto* start = static_cast<int64_t*>(std::aligned_alloc(512, (size + 1023) / 512 * 512));
    *start = replaying ? 0 : static_cast<int64_t>(size);
    current += *start;  // 0 in a replay: its ops are to have no memory of their own
    if (current > peak) peak = current.load();
    const std::lock_guard<std::mutex> lock(pools_held);
    if (capturing != 0) pools[capturing].blocks[reinterpret_cast<char*>(start + 64)] = size;
    return {start + 64, start + 64, &give_back, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
  virtual int64_t statistic(int which) { return which == 0 ? current : peak; }
  virtual void reset() { peak = current.load(); }
};

Pretended pretended;

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (self.is_cpu()) host_waits();
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool) {
  if (to.is_cpu()) host_waits();
  on_cpu(to).copy_(on_cpu(source));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  host_waits();
  return on_cpu(self).item();
}

// The state of the default generator: what a random op draws depends on these two numbers alone.
struct Philox {
  uint64_t seed;
  uint64_t offset;  // in a capture, from its begin
  int64_t graph;    // that captures it
};
Philox* philox = nullptr;

// Lets the CPU's kernel draw the numbers that belong to the state, and moves the offset on.
class Drawing {
 public:
  explicit Drawing(int64_t elements) : before_(generator_.get_state()) {
    TORCH_CHECK((philox->graph != 0) == (capturing != 0),
                "Attempt to increase offset for a CUDA generator not in capture mode.");
    generator_.set_current_seed(philox->seed * 0x9E3779B97F4A7C15 + philox->offset);
    philox->offset += 4 * (1 + elements % 7);
  }
  ~Drawing() { generator_.set_state(before_); }

 private:
  at::Generator generator_ = at::detail::getDefaultCPUGenerator();
  at::Tensor before_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<Drawing> drawing;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(stack->at(0).toTensor().numel());
  // Its schema hides that it writes the running statistics: PyTorch's fallback would write copies.
  if (op.schema().name() == "aten::native_batch_norm") {
    for (const size_t i : {3, 4}) {
      at::IValue& statistic = torch::jit::peek(*stack, i, op.schema().arguments().size());
      if (statistic.isTensor()) statistic = on_cpu(statistic.toTensor());
    }
  }
  ++in_fallback;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    --in_fallback;
    throw;
  }
  --in_fallback;
}

}  // namespace

namespace c10::cuda::CUDACachingAllocator {
std::atomic<at::Allocator*> allocator{&pretended};
}

namespace {

at::Allocator* allocator() { return c10::cuda::CUDACachingAllocator::allocator; }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t bytes = self.numel() * self.element_size();
  if (self.storage().nbytes() < bytes) {
    self.storage().set_data_ptr_noswap(allocator()->allocate(bytes));
    self.storage().set_nbytes(bytes);
  }
  return self;
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("resize_", resize_);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

extern "C" int64_t pretended_statistic(int which) {
  return static_cast<Pretended*>(allocator())->statistic(which);
}
extern "C" void pretended_reset() { static_cast<Pretended*>(allocator())->reset(); }

// What copies ask of the CUDA runtime. They happen at once, or as late as can be: when something
// waits for an event that was recorded behind them.
namespace {

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};
struct Queue {
  std::deque<Copy> copies;
  size_t asked = 0;
  size_t done = 0;
};
struct Mark {
  void* stream = nullptr;
  size_t asked = 0;
};
std::mutex held;
std::map<void*, Queue> queues;
std::vector<std::pair<void*, void*>> waits;
bool late = false;

}  // namespace

extern "C" int cudaEventCreateWithFlags(void** event, unsigned) {
  *event = new Mark();
  return 0;
}

namespace {

struct Call {
  enum { kRecord, kWait, kCopy } kind;
  void* stream;
  void* event;
  Copy copy;
};
std::map<int64_t, std::vector<Call>> calls;  // by graph

void record(void* event, void* stream) {
  *static_cast<Mark*>(event) = {stream, queues[stream].asked};
}

void wait(void* stream, void* event) {
  const Mark& mark = *static_cast<Mark*>(event);
  waits.emplace_back(stream, mark.stream);
  Queue& queue = queues[mark.stream];
  for (; queue.done < mark.asked; ++queue.done) {
    const Copy& copy = queue.copies.front();
    std::memcpy(copy.to, copy.from, copy.bytes);
    queue.copies.pop_front();
  }
}

void copy_async(void* stream, const Copy& copy) {
  Queue& queue = queues[stream];
  queue.copies.push_back(copy);
  ++queue.asked;
  if (!late) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    queue.copies.pop_front();
    ++queue.done;
  }
}

void run(const Call& call) {
  if (call.kind == Call::kRecord) record(call.event, call.stream);
  if (call.kind == Call::kWait) wait(call.stream, call.event);
  if (call.kind == Call::kCopy) copy_async(call.stream, call.copy);
}

// During a capture, calls are recorded and nothing is done.
int ask(const Call& call) {
  const std::lock_guard<std::mutex> lock(held);
  if (capturing != 0) {
    calls[capturing].push_back(call);
  } else {
    run(call);
  }
  return 0;
}

}  // namespace

extern "C" int cudaEventRecord(void* event, void* stream) {
  return ask({Call::kRecord, stream, event, {}});
}
extern "C" int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  return ask({Call::kWait, stream, event, {}});
}
extern "C" int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
  return ask({Call::kCopy, stream, nullptr, {to, from, bytes}});
}

// As with unified addresses: kernels read pinned memory where the host does.
extern "C" int cudaHostGetDevicePointer(void** found, void* address, unsigned) {
  *found = address;
  return 0;
}

extern "C" void pretended_capture(int64_t graph) {
  capturing = graph;
  if (graph != 0) invalid = false;
}
extern "C" int pretended_invalid() { return invalid; }
extern "C" void pretended_draw_from(void* state) { philox = static_cast<Philox*>(state); }
extern "C" void pretended_replaying(int flag) { replaying = flag != 0; }
extern "C" void pretended_tell_waits(int flag) { waits_are_told = flag != 0; }
extern "C" int64_t pretended_calls(int64_t graph) {
  const std::lock_guard<std::mutex> lock(held);
  return static_cast<int64_t>(calls[graph].size());
}
extern "C" void pretended_replay(int64_t graph, int64_t first, int64_t last) {
  const std::lock_guard<std::mutex> lock(held);
  for (int64_t i = first; i < last; ++i) run(calls[graph][i]);
}
// Copies on streams that did not wait for the captured one before, or for which it does not wait.
extern "C" int64_t pretended_unjoined(int64_t graph, void* origin) {
  const std::lock_guard<std::mutex> lock(held);
  std::map<void*, size_t> asked, joined;
  std::map<void*, Mark> marks;
  std::set<void*> forked;
  int64_t found = 0;
  for (const Call& call : calls[graph]) {
    if (call.kind == Call::kRecord) marks[call.event] = {call.stream, asked[call.stream]};
    if (call.kind == Call::kCopy) {
      ++asked[call.stream];
      found += forked.count(call.stream) == 0;
    }
    if (call.kind == Call::kWait) {
      if (marks.count(call.event) == 0) return -1;  // an event from outside the capture
      const Mark& mark = marks[call.event];
      if (mark.stream == origin) forked.insert(call.stream);
      if (call.stream == origin) joined[mark.stream] = std::max(joined[mark.stream], mark.asked);
    }
  }
  for (const auto& [stream, count] : asked) found += static_cast<int64_t>(count - joined[stream]);
  return found;
}
// The blocks of a graph's pool: address and size of each; returns their number.
extern "C" int64_t pretended_pool(int64_t graph, int64_t* out, int64_t room) {
  const std::lock_guard<std::mutex> lock(pools_held);
  int64_t count = 0;
  for (const auto& [address, size] : pools[graph].blocks) {
    if (count < room) {
      out[2 * count] = reinterpret_cast<int64_t>(address);
      out[2 * count + 1] = static_cast<int64_t>(size);
    }
    ++count;
  }
  return count;
}
extern "C" void pretended_free_pool(int64_t graph) {
  const std::scoped_lock lock(pools_held, held);  // a collection may free a graph on any thread
  for (char* address : pools[graph].freed) std::free(reinterpret_cast<int64_t*>(address) - 64);
  pools.erase(graph);
  calls.erase(graph);
}
extern "C" void pretended_late(int flag) { late = flag != 0; }
extern "C" int64_t pretended_wait(int64_t number, int which) {
  const std::lock_guard<std::mutex> lock(held);
  if (number >= static_cast<int64_t>(waits.size())) return -1;
  const auto& [stream, other] = waits[number];
  return reinterpret_cast<int64_t>(which == 0 ? stream : other);
}
