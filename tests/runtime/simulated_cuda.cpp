// A pretended CUDA device for PyTorch's CPU build: tensors on "cuda:0" lie in memory from malloc and
// are computed by the CPU's kernels, the backward runs on a thread of autograd's, and memory comes
// from an object where PyTorch keeps its CUDA allocator.

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_cuda_device.h"

namespace {

std::atomic<int64_t> current{0};
std::atomic<int64_t> peak{0};

void give_back(void* pointer) {
  auto* start = static_cast<int64_t*>(pointer) - 64;
  current -= *start;
  std::free(start);
}

// Stands where c10::cuda::CUDACachingAllocator::NativeCachingAllocator does, and like it has other
// virtual functions after those of at::Allocator.
class Pretended : public at::Allocator {
 public:
  at::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &give_back, kDevice};
    auto* start = static_cast<int64_t*>(std::aligned_alloc(512, (size + 1023) / 512 * 512));
    *start = static_cast<int64_t>(size);
    current += *start;
    if (current > peak) peak = current.load();
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
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(source));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& to) {
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy_from(source, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return on_cpu(self).item(); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
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
extern "C" int cudaEventRecord(void* event, void* stream) {
  const std::lock_guard<std::mutex> lock(held);
  *static_cast<Mark*>(event) = {stream, queues[stream].asked};
  return 0;
}
extern "C" int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::lock_guard<std::mutex> lock(held);
  const Mark& mark = *static_cast<Mark*>(event);
  waits.emplace_back(stream, mark.stream);
  Queue& queue = queues[mark.stream];
  for (; queue.done < mark.asked; ++queue.done) {
    const Copy& copy = queue.copies.front();
    std::memcpy(copy.to, copy.from, copy.bytes);
    queue.copies.pop_front();
  }
  return 0;
}
extern "C" int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int, void* stream) {
  const std::lock_guard<std::mutex> lock(held);
  Queue& queue = queues[stream];
  queue.copies.push_back({to, from, bytes});
  ++queue.asked;
  if (!late) {
    std::memcpy(to, from, bytes);
    queue.copies.pop_front();
    ++queue.done;
  }
  return 0;
}
extern "C" void pretended_late(int flag) { late = flag != 0; }
extern "C" int64_t pretended_wait(int64_t number, int which) {
  const std::lock_guard<std::mutex> lock(held);
  if (number >= static_cast<int64_t>(waits.size())) return -1;
  const auto& [stream, other] = waits[number];
  return reinterpret_cast<int64_t>(which == 0 ? stream : other);
}
