"""Native kernels: their C++ sources, the library that they become, and which product uses which form.

`products` defines products and forms and names kernels in programs, `form_table` holds measured times and
chooses a form from these. `compilers` finds C++ compilers, `kernel_library` builds `kernels/` with one.
Imports `targets`. Begin with `products`, then `kernel_library`.
"""
