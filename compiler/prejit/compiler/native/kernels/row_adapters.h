// y = act(y + x A^T B): each row of a batch adds the low-rank change of its own adapter (models/layers/row_adapters.py).
//
// All is float32. The sums of a position have one order, whatever the other positions and rows are. A row without an
// adapter gets act(y), in the bits that `linear` gives it with that activation.
#pragma once

#include <cstdint>

#include "activation.h"

namespace prejit {

struct RowAdapters {
  int64_t rows = 0;
  int64_t positions = 0;  // Of each row.
  int64_t inputs = 0, outputs = 0, rank = 0;
  const int32_t* slot = nullptr;  // [rows], 0 for none.
  const float* x = nullptr;       // [rows, positions, inputs]
  const float* a = nullptr;       // A of slot 1, [rank, inputs].
  const float* b = nullptr;       // B of slot 1, [rank, outputs].
  int64_t a_stride = 0, b_stride = 0;  // Elements from one slot to the next.
  Activation activation = Activation::kNone;
  float* y = nullptr;  // [rows, positions, outputs], read and written.
};

// Changes y on this thread and the helpers. Returns false if memory is exhausted.
bool row_adapters(const RowAdapters& call);

}  // namespace prejit
