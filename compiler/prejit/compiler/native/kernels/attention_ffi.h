// Types and checks of arguments that both attention handlers use.
#pragma once

#include <algorithm>

#include "xla/ffi/api/ffi.h"

namespace prejit::attention {

using FloatBuffer = xla::ffi::Buffer<xla::ffi::F32, 4>;
using IntBuffer = xla::ffi::Buffer<xla::ffi::S32, 1>;
using Dimensions = xla::ffi::AnyBuffer::Dimensions;

inline bool same(Dimensions a, Dimensions b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

}  // namespace prejit::attention
