// A fake CUDA device for tracing with PyTorch's CPU build: fake tensors on "cuda:0" pass through
// autograd and the dispatcher as on a machine with a GPU. No memory is allocated and no kernel runs.
//
// Without the guard, autograd aborts the process at the first CUDA tensor
// (c10/core/impl/DeviceGuardImplInterface.h). Without the hooks there is no current device. Without a
// kernel choice, attention is traced as matrix products and a softmax.

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include "fake_cuda_device.h"

namespace {

bool half(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// As select_sdp_backend of ATen/native/transformers/cuda/sdp_utils.cpp on devices from sm80 on, for
// the conditions on dtypes and shapes.
int64_t sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const std::optional<at::Tensor>& mask, double, bool, std::optional<double>,
                   bool) {
  const auto& context = at::globalContext();
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 ||
      query.scalar_type() != key.scalar_type() || query.scalar_type() != value.scalar_type())
    return static_cast<int64_t>(at::SDPBackend::math);
  const auto head = query.sym_size(-1);
  const bool equal = head == value.sym_size(-1);
  const bool trained = mask && mask->requires_grad();
  if (context.userEnabledFlashSDP() && half(query) && !mask && equal && head <= 256)
    return static_cast<int64_t>(at::SDPBackend::flash_attention);
  const int64_t lanes = half(query) ? 8 : 4;
  const bool aligned = head % lanes == 0 && value.sym_size(-1) % lanes == 0;
  const bool known = half(query) || query.scalar_type() == at::kFloat;
  const bool grouped = query.sym_size(1) != key.sym_size(1);
  if (context.userEnabledMemEfficientSDP() && known && aligned && !trained && !grouped)
    return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  return static_cast<int64_t>(at::SDPBackend::math);
}

// `torch.tensor(values, device="cuda")` allocates before a mode sees the tensor.
struct Nowhere final : at::Allocator {
  at::DataPtr allocate(size_t) override { return {nullptr, nullptr, &nothing, kDevice}; }
  at::DeleterFnPtr raw_deleter() const override { return &nothing; }
  void copy_data(void*, const void*, size_t) const override {}
  static void nothing(void*) {}
};

Nowhere nowhere;

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &nowhere, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &nowhere,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor&, bool) { return self; }

// Tracing decomposes an op if the device has no kernel for it; these ops have one on CUDA.
void untouched(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), " cannot run on a fake device");
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  for (const char* name : {"silu_backward", "mish_backward", "_fused_rms_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&untouched>());
}

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &sdp_choice);
}
