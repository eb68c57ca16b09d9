// The XLA FFI handler `prejit_choose`: checks what the program passes and calls choose().
#include "choose.h"
#include "simd.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace prejit {
namespace {

namespace ffi = xla::ffi;

ffi::Error choose_handler(ffi::BufferR2<ffi::F32> logits, ffi::BufferR2<ffi::F32> bias, ffi::BufferR1<ffi::F32> temperature,
                          ffi::BufferR1<ffi::S32> top_k, ffi::BufferR1<ffi::F32> top_p, ffi::BufferR1<ffi::F32> min_p,
                          ffi::BufferR2<ffi::U32> seed, ffi::BufferR1<ffi::S32> position, ffi::ResultBufferR1<ffi::S32> token) {
  auto sizes = logits.dimensions(), biases = bias.dimensions(), seeds = seed.dimensions();
  Choice c;
  c.rows = sizes[0], c.width = sizes[1];
  for (int64_t rows : {biases[0], temperature.dimensions()[0], top_k.dimensions()[0], top_p.dimensions()[0],
                       min_p.dimensions()[0], seeds[0], position.dimensions()[0], token->dimensions()[0]})
    if (rows != c.rows) return ffi::Error::InvalidArgument("prejit_choose: expected arguments of as many rows as the logits");
  if (biases[1] != c.width || seeds[1] != 2)
    return ffi::Error::InvalidArgument("prejit_choose: expected a bias for each logit, and seeds of 2");
  c.logits = logits.typed_data();
  c.bias = bias.typed_data();
  c.temperature = temperature.typed_data();
  c.top_k = top_k.typed_data();
  c.top_p = top_p.typed_data();
  c.min_p = min_p.typed_data();
  c.seed = seed.typed_data();
  c.position = position.typed_data();
  c.token = token->typed_data();
  if (choose(c)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_choose: out of memory");
}

}  // namespace
}  // namespace prejit

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_choose(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_choose, prejit::choose_handler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::U32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>());
