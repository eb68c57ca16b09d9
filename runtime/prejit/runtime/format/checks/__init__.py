"""Every check of a bundle's files, numbered as in docs/bundle-format.md. No file access, no JAX.

A check takes bytes and raises RejectError, which names the file at fault, or returns what the bytes mean. It
trusts only what earlier ones have verified: runtime/check-order.toml has all of them in the order of a load.

Begin with `oci`.
"""
