// The XLA FFI handler `prejit_first_largest`: checks what the program passes and calls first_largest().
#include "first_largest.h"
#include "xla/ffi/api/ffi.h"

namespace prejit {
namespace {

namespace ffi = xla::ffi;

ffi::Error first_largest_handler(ffi::BufferR2<ffi::F32> values, ffi::BufferR2<ffi::F32> bias,
                                 ffi::ResultBufferR1<ffi::S32> at) {
  auto sizes = values.dimensions(), others = bias.dimensions();
  if (others[0] != sizes[0] || others[1] != sizes[1] || at->dimensions()[0] != sizes[0])
    return ffi::Error::InvalidArgument("prejit_first_largest: expected values and bias of one shape, and a result for each row");
  if (first_largest({sizes[0], sizes[1], values.typed_data(), bias.typed_data(), at->typed_data()}))
    return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_first_largest: out of memory");
}

}  // namespace
}  // namespace prejit

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_first_largest(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_first_largest, prejit::first_largest_handler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>());
