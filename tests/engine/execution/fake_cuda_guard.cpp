// Lets a build of torch for CPUs hold fake tensors on "cuda": their device is switched to by doing nothing.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using FakeCudaGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)
}  // namespace
