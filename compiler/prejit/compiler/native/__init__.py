"""Native kernels: their C++ sources, the compiler that builds them, and which product uses which form.

Imports `targets`. Begin with `products`, then `library`.
"""
