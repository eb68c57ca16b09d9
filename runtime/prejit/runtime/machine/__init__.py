"""Machines: this one (`fingerprint`), what an executable needs, and how both compare. Begin with `compare`.

Imports `base`, `errors` and `verdict`.
"""
