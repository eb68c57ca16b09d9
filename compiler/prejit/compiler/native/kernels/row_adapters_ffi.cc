// The XLA FFI handler `prejit_row_adapters`: checks what the program passes and calls row_adapters().
#include <cstring>

#include "row_adapters.h"
#include "xla/ffi/api/ffi.h"

namespace prejit {
namespace {

namespace ffi = xla::ffi;

ffi::Error unfit_adapters(const char* message) { return ffi::Error::InvalidArgument(message); }

// A is [slots, L, rank, in], B [slots, L, rank, out]. XLA gives y the memory of `before`, unless that is used again.
ffi::Error row_adapters_handler(ffi::BufferR3<ffi::F32> x, ffi::BufferR3<ffi::F32> before, ffi::BufferR1<ffi::S32> slot,
                                ffi::BufferR4<ffi::F32> a, ffi::BufferR4<ffi::F32> b, ffi::ResultBufferR3<ffi::F32> y,
                                int32_t layer, int32_t activation) {
  auto in = x.dimensions(), old = before.dimensions(), out = y->dimensions(), down = a.dimensions(), up = b.dimensions();
  RowAdapters call;
  call.rows = in[0], call.positions = in[1], call.inputs = in[2], call.outputs = out[2], call.rank = down[2];
  if (out[0] != in[0] || out[1] != in[1] || old[0] != in[0] || old[1] != in[1] || old[2] != out[2] ||
      slot.dimensions()[0] != in[0])
    return unfit_adapters("prejit_row_adapters: expected x, y and slots of the same rows, found other shapes");
  if (down[3] != call.inputs || up[3] != call.outputs || down[0] != up[0] || down[1] != up[1] || down[2] != up[2])
    return unfit_adapters("prejit_row_adapters: expected A [slots, L, rank, in] and B [slots, L, rank, out], found other shapes");
  if (layer < 0 || layer >= down[1]) return unfit_adapters("prejit_row_adapters: expected the number of a layer");
  if (activation < 0 || activation > 4) return unfit_adapters("prejit_row_adapters: expected an activation of 0 to 4");
  call.slot = slot.typed_data();
  for (int64_t i = 0; i < call.rows; ++i)
    if (call.slot[i] < 0 || call.slot[i] > down[0])
      return unfit_adapters("prejit_row_adapters: expected slots that there are, or 0");
  call.x = x.typed_data();
  call.a = a.typed_data() + layer * call.rank * call.inputs;
  call.b = b.typed_data() + layer * call.rank * call.outputs;
  call.a_stride = down[1] * call.rank * call.inputs;
  call.b_stride = down[1] * call.rank * call.outputs;
  call.activation = static_cast<Activation>(activation);
  call.y = y->typed_data();
  if (before.typed_data() != call.y) std::memcpy(call.y, before.typed_data(), before.size_bytes());
  if (row_adapters(call)) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "prejit_row_adapters: out of memory");
}

}  // namespace
}  // namespace prejit

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* prejit_row_adapters(XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(prejit_row_adapters, prejit::row_adapters_handler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::BufferR3<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR3<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR4<xla::ffi::F32>>()
                                  .Arg<xla::ffi::BufferR4<xla::ffi::F32>>()
                                  .Ret<xla::ffi::BufferR3<xla::ffi::F32>>()
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("activation"));
