#include "norm.h"

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace prejit {
namespace {

// Calls each(vector, index, count) along a row; the last vector may end in zeros.
template <typename Each>
PREJIT_INLINE void along(const float* row, int64_t width, const Each& each) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) each(load(row + i), i, kLanes);
  if (i < width) each(load_first(row + i, width - i), i, width - i);
}

constexpr int64_t kBlockElements = 16384;  // About 5 us of work: less does not justify a thread.

}  // namespace

void norm_row(const Norm& n, const float* x, float* y) {
  const float count = static_cast<float>(n.width);
  float mean = 0;
  if (n.centred) {
    Floats total{};
    along(x, n.width, [&](Floats v, int64_t, int64_t) { total += v; });
    mean = sum(total) / count;
  }
  // The mean is subtracted first: its square may be as large as the mean of the squares.
  Floats squares{};
  along(x, n.width, [&](Floats v, int64_t, int64_t lanes) {
    Floats centred = v - mean;
    if (lanes < kLanes)
      for (int64_t i = lanes; i < kLanes; ++i) centred[i] = 0;
    squares += centred * centred;
  });
  const float factor = 1.0f / std::sqrt(sum(squares) / count + n.epsilon);
  along(x, n.width, [&](Floats v, int64_t i, int64_t lanes) {
    const bool whole = lanes == kLanes;
    Floats weight = whole ? load(n.weight + i) : load_first(n.weight + i, lanes);
    Floats result = (v - mean) * factor * (weight + n.offset);
    if (n.bias) result += whole ? load(n.bias + i) : load_first(n.bias + i, lanes);
    if (whole)
      store(y + i, result);
    else
      store_first(y + i, result, lanes);
  });
}

void norm(const Norm& n) {
  if (n.width == 0) return;
  const int64_t block = std::max<int64_t>(1, kBlockElements / n.width);
  parallel_for((n.rows + block - 1) / block, [&](int64_t index) {
    const int64_t end = std::min(n.rows, (index + 1) * block);
    for (int64_t row = index * block; row < end; ++row) norm_row(n, n.x + row * n.width, n.y + row * n.width);
  });
}

}  // namespace prejit
