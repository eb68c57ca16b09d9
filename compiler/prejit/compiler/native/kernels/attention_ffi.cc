// The XLA FFI handlers of attention, of decoders and of encoders. They check shapes once a call.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "attention_vector.h"
#include "encoder_attention.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using prejit::Bf16;
using prejit::attention::DecoderCall;
using FloatBuffer = ffi::Buffer<ffi::F32, 4>;
using IntBuffer = ffi::Buffer<ffi::S32, 1>;
using Dimensions = ffi::AnyBuffer::Dimensions;

bool same(Dimensions a, Dimensions b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

ffi::Error invalid(const char* message) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, message);
}

// XLA gives a result the memory of the argument that it is aliased to. If a program has no alias, the whole cache is
// copied.
template <typename E>
ffi::Error run(DecoderCall<E> call, const ffi::AnyBuffer& keys_before, const ffi::AnyBuffer& values_before,
               ffi::AnyBuffer& keys, ffi::AnyBuffer& values) {
  call.keys = static_cast<E*>(keys.untyped_data());
  call.values = static_cast<E*>(values.untyped_data());
  const void* before = keys_before.untyped_data();
  if (before != call.keys) std::memcpy(call.keys, before, keys.size_bytes());
  before = values_before.untyped_data();
  if (before != call.values) std::memcpy(call.values, before, values.size_bytes());
  if (prejit::attention::attend_decoder(call)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_attention: out of memory");
}

// Reads how heads turn and, behind that, their norms, if a program passes them. Returns what is wrong with them.
template <typename E>
const char* read_changes(DecoderCall<E>& call, const ffi::RemainingArgs& changes) {
  if (changes.size() == 0) return nullptr;
  if (changes.size() != 2 && changes.size() != 4) return "prejit_attention: expected cos and sin, or these and two norms";
  const auto cos = changes.get<FloatBuffer>(0), sin = changes.get<FloatBuffer>(1);
  const char* angles = "prejit_attention: expected cos and sin, float32 [B, T, 1, P], P at most H / 2";
  if (cos.has_error() || sin.has_error()) return angles;
  const auto shape = cos->dimensions();
  if (!same(shape, sin->dimensions()) || shape[0] != call.batch || shape[1] != call.tokens || shape[2] != 1 ||
      2 * shape[3] > call.size) {
    return angles;
  }
  call.turns.cos = cos->typed_data(), call.turns.sin = sin->typed_data(), call.turns.pairs = shape[3];
  if (changes.size() == 2) return nullptr;
  const auto query = changes.get<ffi::BufferR1<ffi::F32>>(2), key = changes.get<ffi::BufferR1<ffi::F32>>(3);
  if (query.has_error() || key.has_error() || query->dimensions()[0] != call.size ||
      key->dimensions()[0] != call.size) {
    return "prejit_attention: expected norms of queries and keys, float32 [H]";
  }
  call.query_norm.weight = query->typed_data(), call.key_norm.weight = key->typed_data();
  return nullptr;
}

ffi::Error attention(FloatBuffer query, FloatBuffer new_keys, FloatBuffer new_values, IntBuffer start, IntBuffer length,
                     IntBuffer query_start, ffi::AnyBuffer keys_before, ffi::AnyBuffer values_before,
                     ffi::RemainingArgs changes, ffi::Result<FloatBuffer> out, ffi::Result<ffi::AnyBuffer> keys,
                     ffi::Result<ffi::AnyBuffer> values, float scale, float softcap, int32_t window,
                     int32_t key_head, int32_t value_head, int32_t interleaved, float epsilon, float offset) {
  const auto q = query.dimensions(), n = new_keys.dimensions(), c = keys->dimensions();
  if (c.size() != 4) return invalid("prejit_attention: expected a cache [B, K, S, H]");
  const auto o = out->dimensions();
  const int64_t batch = q[0], heads = o[2], kv_heads = c[1], size = q[3];
  const ffi::DataType dtype = keys->element_type();
  const int64_t tail = dtype == ffi::S8 ? prejit::attention::kTail<int8_t> : 0;
  const int64_t key_end = int64_t{key_head} + kv_heads, value_end = int64_t{value_head} + kv_heads;
  const bool fits = same(n, new_values.dimensions()) && o[0] == batch && o[1] == q[1] && o[3] == size &&
                    heads <= q[2] && key_head >= 0 && value_head >= 0 && key_end <= n[2] && value_end <= n[2] &&
                    same(c, values->dimensions()) && same(c, keys_before.dimensions()) &&
                    same(c, values_before.dimensions()) && n[0] == batch && c[0] == batch &&
                    n[3] == size && c[3] == size + tail && kv_heads > 0 && heads % kv_heads == 0 &&
                    start.dimensions()[0] == batch && length.dimensions()[0] == batch &&
                    query_start.dimensions()[0] == batch;
  if (!fits) {
    return invalid(
        "prejit_attention: expected out [B, Q, N, H], query [B, Q, at least N, H], new keys and values [B, T, at least "
        "K, H], start, length and query_start [B], cache [B, K, S, H], or H + 4 of int8, N a multiple of K, found "
        "other shapes");
  }
  if (values->element_type() != dtype || keys_before.element_type() != dtype || values_before.element_type() != dtype) {
    return invalid("prejit_attention: expected keys and values of one dtype, found several");
  }
  const auto run_with = [&](auto element) {
    DecoderCall<decltype(element)> call = {};
    call.batch = batch, call.queries = q[1], call.tokens = n[1], call.heads = heads;
    call.kv_heads = kv_heads, call.size = size, call.slots = c[2];
    call.query = query.typed_data(), call.out = out->typed_data();
    call.new_keys = new_keys.typed_data() + key_head * size;
    call.new_values = new_values.typed_data() + value_head * size;
    call.query_width = q[2], call.new_width = n[2];
    call.start = start.typed_data(), call.length = length.typed_data();
    call.query_start = query_start.typed_data();
    call.scale = scale, call.cap = softcap, call.window = window;
    call.turns.interleaved = interleaved != 0;
    call.query_norm.width = size, call.query_norm.epsilon = epsilon, call.query_norm.offset = offset;
    call.key_norm = call.query_norm;
    if (const char* wrong = read_changes(call, changes)) return invalid(wrong);
    return run(call, keys_before, values_before, *keys, *values);
  };
  if (dtype == ffi::F32) return run_with(float{});
  if (dtype == ffi::BF16) return run_with(Bf16{});
  if (dtype == ffi::S8) return run_with(int8_t{});
  return invalid("prejit_attention: expected a cache of float32, bfloat16 or int8, found another dtype");
}

ffi::Error encoder_attention(FloatBuffer query, FloatBuffer keys, FloatBuffer values, IntBuffer length,
                             ffi::Result<FloatBuffer> out, float scale, int32_t rounds) {
  const auto shape = query.dimensions();
  if (!same(shape, keys.dimensions()) || !same(shape, values.dimensions()) ||
      !same(shape, out->dimensions()) || (shape[0] != 1 && shape[0] != length.dimensions()[0])) {
    return invalid(
        "prejit_encoder_attention: expected query, keys, values and out [B, T, N, H] and length [B], or [S] if B is 1; "
        "found other shapes");
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

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_attention(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_attention, attention,
                              ffi::Ffi::Bind()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<FloatBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<IntBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<FloatBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("key_head")
                                  .Attr<int32_t>("value_head")
                                  .Attr<int32_t>("interleaved")
                                  .Attr<float>("epsilon")
                                  .Attr<float>("offset"));

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
