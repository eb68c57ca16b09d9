// Lets test_kernel_linear.py choose what multiplies weights of few bits: a machine's best is not the only one to be tested.
#include "linear_multiplier.h"

extern "C" __attribute__((visibility("default"))) int use_multiplier(int wanted) {
  return prejit::use_multiplier(static_cast<prejit::Multiplier>(wanted));
}

extern "C" __attribute__((visibility("default"))) int use_vnni(int wanted) { return prejit::use_vnni(wanted != 0); }

extern "C" __attribute__((visibility("default"))) int use_byte_tiles(int wanted) {
  return prejit::use_byte_tiles(wanted != 0);
}
