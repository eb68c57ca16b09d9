"""Native kernels: their C++ sources, the library that they become, and which product uses which form.

`products` defines products and forms, `form_table` holds measured times, `form_choice` chooses a form from
these. `compilers` finds C++ compilers, `library` builds `kernels/` with one, `calls` names kernels in
programs. Imports `targets`. Begin with `products`, then `library`.
"""
