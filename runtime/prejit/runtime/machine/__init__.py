"""Machines: this one (`fingerprint`), what an executable needs, how both compare, and files that it keeps.

Imports `base`, `errors` and `verdict`. Begin with `compare`.
"""
