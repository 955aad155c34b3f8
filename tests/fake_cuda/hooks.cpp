// What torch's autograd engine needs to take tensors of a pretended CUDA device: the hooks that it asks for devices, and
// the guard that it asks for streams. Nothing here computes. A CPU build of torch has neither; a CUDA build has its own,
// which want a driver: these are preferred to them.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct PretendedHooks : public CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}
  // Attention by cuDNN is chosen from a version on.
  long versionRuntimeCuDNN() const override { return 0; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, PretendedHooks)
}  // namespace at

namespace {
constexpr auto CUDA = c10::DeviceType::CUDA;
const c10::Device FIRST{CUDA, 0};

struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return FIRST; }
  c10::Device exchangeDevice(c10::Device) const override { return FIRST; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, FIRST); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, FIRST); }
};
c10::impl::DeviceGuardImplRegistrar registrar(CUDA, new Guard());
}  // namespace
