// The XLA FFI handler of encoder attention. It checks shapes once a call.
#include "encoder_attention.h"

#include "attention_ffi.h"

namespace ffi = xla::ffi;

namespace {

using prejit::attention::FloatBuffer;
using prejit::attention::IntBuffer;
using prejit::attention::same;

ffi::Error encoder_attention(FloatBuffer query, FloatBuffer keys, FloatBuffer values, IntBuffer length,
                             ffi::Result<FloatBuffer> out, float scale, int32_t rounds) {
  const auto shape = query.dimensions();
  if (!same(shape, keys.dimensions()) || !same(shape, values.dimensions()) ||
      !same(shape, out->dimensions()) || (shape[0] != 1 && shape[0] != length.dimensions()[0])) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "prejit_encoder_attention: expected query, keys, values and out [B, T, N, H] and length [B], "
                      "or [S] if B is 1; found other shapes");
  }
  const prejit::attention::EncoderCall call = {shape[0],
                                               shape[1],
                                               shape[2],
                                               shape[3],
                                               query.typed_data(),
                                               keys.typed_data(),
                                               values.typed_data(),
                                               length.typed_data(),
                                               out->typed_data(),
                                               scale,
                                               length.dimensions()[0],
                                               rounds != 0};
  if (prejit::attention::attend_encoder(call)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_encoder_attention: out of memory");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_encoder_attention(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_encoder_attention, encoder_attention,
                              ffi::Ffi::Bind()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<IntBuffer>()
                                  .Ret<FloatBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("rounds"));
