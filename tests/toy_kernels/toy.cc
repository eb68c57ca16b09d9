// Two kernels for tests of how a library is built, shipped and registered.

#include <cmath>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

ffi::Error Scale(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, float factor) {
  for (int64_t i = 0; i < static_cast<int64_t>(x.element_count()); ++i) {
    y->typed_data()[i] = x.typed_data()[i] * factor;
  }
  return ffi::Error::Success();
}

ffi::Error Root(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  for (int64_t i = 0; i < static_cast<int64_t>(x.element_count()); ++i) {
    y->typed_data()[i] = std::exp(0.5f * std::log(x.typed_data()[i]));
  }
  return ffi::Error::Success();
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default"))) XLA_FFI_Error*

EXPORT prejit_scale(XLA_FFI_CallFrame*);
EXPORT prejit_root(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_scale, Scale,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("factor"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    prejit_root, Root, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
