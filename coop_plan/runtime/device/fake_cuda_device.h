// Guard and hooks of a fake CUDA device: the queries that PyTorch makes before it runs an op. There is
// one device, and all streams are the default stream.

#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const at::Device kDevice(at::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<at::DeviceType::CUDA> {
  at::Device exchangeDevice(at::Device) const override { return kDevice; }
  at::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(at::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(kDevice); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex current_device() const override { return 0; }
};

}  // namespace
