"""Machines: the properties of this one, the requirement of an executable, and their comparison.

`fingerprint` reads this machine's properties, with `accelerator` for GPUs and TPUs and `environment` for
flags and variables. `requirement` holds what an executable needs, and `compare` decides, axis by axis.
`targets` describes classes of machines, with the catalogue. Imports `base`, `errors` and `verdict`. Begin
with `compare`.
"""
