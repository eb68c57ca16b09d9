// The XLA FFI handler `prejit_norm`: checks what the program passes and calls norm().
#include "norm.h"
#include "xla/ffi/api/ffi.h"

namespace prejit {
namespace {

namespace ffi = xla::ffi;

bool is_row(ffi::BufferR1<ffi::F32> values, int64_t width) { return values.dimensions()[0] == width; }

ffi::Error norm_handler(ffi::Buffer<ffi::F32> x, ffi::BufferR1<ffi::F32> weight, ffi::RemainingArgs bias,
                        ffi::Result<ffi::Buffer<ffi::F32>> y, int32_t centred, float epsilon, float offset) {
  auto dimensions = x.dimensions();
  if (dimensions.size() == 0 || y->element_count() != x.element_count())
    return ffi::Error::InvalidArgument("prejit_norm: expected x and y of one shape, of rank 1 at least");
  Norm n;
  n.width = dimensions[dimensions.size() - 1];
  n.rows = n.width == 0 ? 0 : static_cast<int64_t>(x.element_count()) / n.width;
  if (!is_row(weight, n.width)) return ffi::Error::InvalidArgument("prejit_norm: expected a weight for each column");
  if (bias.size() > 1) return ffi::Error::InvalidArgument("prejit_norm: expected at most one bias");
  if (bias.size() == 1) {
    auto values = bias.get<ffi::BufferR1<ffi::F32>>(0);
    if (values.has_error() || !is_row(*values, n.width))
      return ffi::Error::InvalidArgument("prejit_norm: expected a float32 bias for each column");
    n.bias = values->typed_data();
  }
  n.x = x.typed_data();
  n.weight = weight.typed_data();
  n.centred = centred != 0;
  n.epsilon = epsilon;
  n.offset = offset;
  n.y = y->typed_data();
  norm(n);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace prejit

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_norm(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_norm, prejit::norm_handler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int32_t>("centred")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));
