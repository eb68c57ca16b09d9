// The XLA FFI handler `prejit_linear`: checks what the program passes and calls linear().
#include <cstdint>

#include "linear.h"
#include "linear_int4.h"
#include "linear_integers.h"
#include "xla/ffi/api/ffi.h"

namespace prejit {
namespace {

namespace ffi = xla::ffi;

ffi::Error wrong(const char* message) { return ffi::Error::InvalidArgument(message); }

int64_t product_of(ffi::AnyBuffer::Dimensions dimensions) {
  int64_t product = 1;
  for (int64_t d : dimensions) product *= d;
  return product;
}

bool is_vector(const ffi::AnyBuffer& buffer, int64_t size) {
  return buffer.element_type() == ffi::F32 && buffer.dimensions().size() == 1 && buffer.dimensions()[0] == size;
}

// Whether words have 16 outputs beside each other, and one for 8 inputs.
bool are_tiled(const ffi::AnyBuffer& buffer, const Linear& product) {
  auto dimensions = buffer.dimensions();
  return dimensions.size() == 3 && dimensions[0] == (product.outputs + kInt4Tile - 1) / kInt4Tile &&
         product.inputs % kInt4InWord == 0 && dimensions[1] == product.inputs / kInt4InWord && dimensions[2] == kInt4Tile;
}

// Reads the scales of words, whose shape says the size of groups and whether there are zero points.
bool read_scales(const ffi::AnyBuffer& buffer, const Linear& product, Weights& weights) {
  auto dimensions = buffer.dimensions();
  if (buffer.element_type() != ffi::F16 || dimensions.size() != 3) return false;
  int64_t groups = dimensions[1], width = dimensions[2];
  if (dimensions[0] != (product.outputs + kInt4Tile - 1) / kInt4Tile) return false;
  if (width != kInt4Tile && width != 2 * kInt4Tile) return false;
  if (product.inputs > 0) {
    if (groups < 1 || product.inputs % groups != 0 || product.inputs / groups % kInt4Group != 0) return false;
    weights.group = product.inputs / groups;
  }
  weights.has_zeros = width > kInt4Tile;
  weights.group_scales = static_cast<const uint16_t*>(buffer.untyped_data());
  return true;
}

// Reads a weight, its scales and its bias, and moves `at` behind them. The dtypes are those of base/stored_dtypes.py.
ffi::Error read_weights(ffi::RemainingArgs arguments, size_t& at, bool has_bias, const Linear& product, Weights& weights) {
  auto next = [&] { return arguments.get<ffi::AnyBuffer>(at++); };
  auto matrix = next();
  if (matrix.has_error()) return wrong("prejit_linear: expected a weight, found no argument");
  auto dimensions = matrix->dimensions();
  bool are_words = matrix->element_type() == ffi::U32;
  if (are_words && !are_tiled(*matrix, product))
    return wrong("prejit_linear: expected words [outputs / 16, inputs / 8, 16], found another shape");
  if (!are_words && (dimensions.size() != 2 || dimensions[0] != product.outputs || dimensions[1] != product.inputs))
    return wrong("prejit_linear: expected a weight [outputs, inputs], found another shape");
  weights.data = matrix->untyped_data();
  switch (matrix->element_type()) {
    case ffi::F32: weights.dtype = Dtype::kFloat32; break;
    case ffi::BF16: weights.dtype = Dtype::kBfloat16; break;
    case ffi::S8: weights.dtype = Dtype::kInt8; break;
    case ffi::U32: weights.dtype = Dtype::kInt4; break;
    default: return wrong("prejit_linear: expected a weight of float32, bfloat16, int8 or words, found another dtype");
  }
  if (are_words) {
    auto scales = next();
    if (scales.has_error() || !read_scales(*scales, product, weights))
      return wrong("prejit_linear: expected float16 factors [outputs / 16, groups, 16 or 32] of words");
  }
  if (weights.dtype == Dtype::kInt8) {
    auto scale = next();
    if (scale.has_error() || !is_vector(*scale, product.outputs))
      return wrong("prejit_linear: expected a float32 factor for each output of an int8 weight");
    weights.scale = scale->typed_data<float>();
  }
  if (has_bias) {
    auto bias = next();
    if (bias.has_error() || !is_vector(*bias, product.outputs))
      return wrong("prejit_linear: expected a float32 bias for each output");
    weights.bias = bias->typed_data<float>();
  }
  return ffi::Error::Success();
}

template <bool (*compute)(const Linear&)>
ffi::Error handle(ffi::RemainingArgs arguments, ffi::RemainingRets results, int32_t bias, int32_t gated, int32_t residual,
                  int32_t activation, int32_t many_rows) {
  auto x = arguments.get<ffi::AnyBuffer>(0);
  auto y = results.get<ffi::AnyBuffer>(0);
  if (x.has_error() || y.has_error() || results.size() != 1) return wrong("prejit_linear: expected x and one result");
  if (x->element_type() != ffi::F32 || (*y)->element_type() != ffi::F32)
    return wrong("prejit_linear: expected float32 x and y");
  auto in = x->dimensions(), out = (*y)->dimensions();
  if (in.size() == 0 || in.size() != out.size()) return wrong("prejit_linear: expected x and y of one rank, at least 1");
  if (activation < 0 || activation > 4) return wrong("prejit_linear: expected an activation of 0 to 4");

  Linear product;
  product.inputs = in[in.size() - 1];
  product.outputs = out[out.size() - 1];
  product.rows = product_of(in.first(in.size() - 1));
  if (in.size() > 2) product.positions = in[in.size() - 2];
  if (product_of(out.first(out.size() - 1)) != product.rows)
    return wrong("prejit_linear: expected as many rows of y as of x");
  product.x = x->typed_data<float>();
  product.y = (*y)->typed_data<float>();
  product.activation = static_cast<Activation>(activation);
  product.gated = gated != 0;
  product.many_rows = many_rows != 0;

  size_t at = 1;
  if (auto error = read_weights(arguments, at, bias != 0, product, product.weights); error.failure()) return error;
  if (product.gated) {
    if (auto error = read_weights(arguments, at, bias != 0, product, product.up); error.failure()) return error;
    if (product.up.dtype != product.weights.dtype) return wrong("prejit_linear: expected two weights of one dtype");
  }
  if (residual) {
    auto added = arguments.get<ffi::AnyBuffer>(at++);
    if (added.has_error() || added->element_type() != ffi::F32 || product_of(added->dimensions()) != product_of(out))
      return wrong("prejit_linear: expected a float32 residual of the shape of y");
    product.residual = added->typed_data<float>();
  }
  if (at != arguments.size()) return wrong("prejit_linear: expected fewer arguments");
  if (!compute(product)) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_linear: out of memory");
  return ffi::Error::Success();
}

}  // namespace
}  // namespace prejit

// The library hides all symbols that are not marked.
#define PREJIT_EXPORTED extern "C" __attribute__((visibility("default"))) XLA_FFI_Error*
PREJIT_EXPORTED prejit_linear(XLA_FFI_CallFrame* call_frame);
PREJIT_EXPORTED prejit_linear_integers(XLA_FFI_CallFrame* call_frame);

#define PREJIT_LINEAR                  \
  xla::ffi::Ffi::Bind()                \
      .RemainingArgs()                 \
      .RemainingRets()                 \
      .Attr<int32_t>("bias")           \
      .Attr<int32_t>("gated")          \
      .Attr<int32_t>("residual")       \
      .Attr<int32_t>("activation")     \
      .Attr<int32_t>("many_rows")

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_linear, prejit::handle<prejit::linear>, PREJIT_LINEAR);
XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_linear_integers, prejit::handle<prejit::linear_by_integers>, PREJIT_LINEAR);
