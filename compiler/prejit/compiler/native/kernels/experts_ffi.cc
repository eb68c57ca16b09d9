// The XLA FFI handler `prejit_experts`: checks what the program passes and calls expert_products().
#include <cstdint>
#include <initializer_list>

#include "experts.h"
#include "linear_int4.h"
#include "xla/ffi/api/ffi.h"

namespace prejit {
namespace {

namespace ffi = xla::ffi;

ffi::Error unfit(const char* message) { return ffi::Error::InvalidArgument(message); }

bool has_shape(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  auto dimensions = buffer.dimensions();
  if (dimensions.size() != shape.size()) return false;
  size_t axis = 0;
  for (int64_t size : shape)
    if (dimensions[axis++] != size) return false;
  return true;
}

// Reads the matrices of all experts, [E, outputs, inputs] or words, their scales and their biases.
ffi::Error read_matrices(ffi::RemainingArgs arguments, bool has_bias, int64_t outputs, ExpertProducts& products) {
  size_t at = 0;
  auto next = [&] { return arguments.get<ffi::AnyBuffer>(at++); };
  Weights& weights = products.each.weights;
  int64_t inputs = products.each.inputs, tiles = (outputs + kInt4Tile - 1) / kInt4Tile;
  auto matrices = next();
  if (matrices.has_error() || matrices->dimensions().size() < 3)
    return unfit("prejit_experts: expected a matrix for each expert");
  int64_t experts = products.experts = matrices->dimensions()[0];
  weights.data = matrices->untyped_data();
  switch (matrices->element_type()) {
    case ffi::F32: weights.dtype = Dtype::kFloat32; break;
    case ffi::BF16: weights.dtype = Dtype::kBfloat16; break;
    case ffi::S8: weights.dtype = Dtype::kInt8; break;
    case ffi::U32: weights.dtype = Dtype::kInt4; break;
    default: return unfit("prejit_experts: expected matrices of float32, bfloat16, int8 or words, found another dtype");
  }
  if (weights.dtype == Dtype::kInt4) {
    if (inputs % kInt4Group || (products.each.gated && products.each.outputs % kInt4Tile))
      return unfit("prejit_experts: expected words of whole groups of 32 inputs, and of whole tiles of 16 outputs");
    if (!has_shape(*matrices, {experts, tiles, inputs / kInt4InWord, kInt4Tile}))
      return unfit("prejit_experts: expected words [experts, outputs / 16, inputs / 8, 16], found another shape");
    auto scales = next();
    if (scales.has_error() || (scales->element_type() != ffi::F16 && scales->element_type() != ffi::BF16) ||
        !has_shape(*scales, {experts, tiles, inputs / kInt4Group, kInt4Tile}))
      return unfit(
          "prejit_experts: expected factors [experts, outputs / 16, inputs / 32, 16] of words, float16 or of E2M1 bfloat16");
    weights.is_e2m1 = scales->element_type() == ffi::BF16;
    weights.group_scales = static_cast<const uint16_t*>(scales->untyped_data());
  } else if (!has_shape(*matrices, {experts, outputs, inputs})) {
    return unfit("prejit_experts: expected matrices [experts, outputs, inputs], found another shape");
  }
  if (weights.dtype == Dtype::kInt8) {
    auto scale = next();
    if (scale.has_error() || scale->element_type() != ffi::F32 || !has_shape(*scale, {experts, outputs}))
      return unfit("prejit_experts: expected a float32 factor for each output of int8 matrices");
    weights.scale = scale->typed_data<float>();
  }
  if (has_bias) {
    auto bias = next();
    if (bias.has_error() || bias->element_type() != ffi::F32 || !has_shape(*bias, {experts, outputs}))
      return unfit("prejit_experts: expected a float32 bias for each output");
    weights.bias = bias->typed_data<float>();
  }
  return at == arguments.size() ? ffi::Error::Success() : unfit("prejit_experts: expected fewer arguments");
}

// x is [R, K], or [R, chosen, K]; y is [R, chosen, N].
ffi::Error experts_handler(ffi::AnyBuffer x, ffi::BufferR2<ffi::S32> chosen, ffi::RemainingArgs arguments,
                           ffi::ResultBufferR3<ffi::F32> y, int32_t bias, int32_t gated, int32_t activation) {
  auto in = x.dimensions(), pairs = chosen.dimensions(), out = y->dimensions();
  if (x.element_type() != ffi::F32 || (in.size() != 2 && in.size() != 3))
    return unfit("prejit_experts: expected float32 x of two or three axes");
  if (in[0] != pairs[0] || (in.size() == 3 && in[1] != pairs[1]) || out[0] != pairs[0] || out[1] != pairs[1])
    return unfit("prejit_experts: expected x and y for each token and each of its experts");
  if (activation < 0 || activation > 4) return unfit("prejit_experts: expected an activation of 0 to 4");
  ExpertProducts products;
  products.pairs = pairs[0] * pairs[1];
  products.row_pairs = in.size() == 2 ? pairs[1] : 1;
  products.expert = chosen.typed_data();
  products.each.inputs = in[in.size() - 1];
  products.each.outputs = out[2];
  products.each.x = x.typed_data<float>();
  products.each.y = y->typed_data();
  products.each.gated = gated != 0;
  products.each.activation = static_cast<Activation>(activation);
  if (auto error = read_matrices(arguments, bias != 0, gated ? 2 * out[2] : out[2], products); error.failure())
    return error;
  for (int64_t i = 0; i < products.pairs; ++i)
    if (products.expert[i] < 0 || products.expert[i] >= products.experts)
      return unfit("prejit_experts: expected numbers of experts that there are");
  if (!expert_products(products)) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_experts: out of memory");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace prejit

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_experts(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_experts, prejit::experts_handler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::BufferR3<xla::ffi::F32>>()
                                  .Attr<int32_t>("bias")
                                  .Attr<int32_t>("gated")
                                  .Attr<int32_t>("activation"));
