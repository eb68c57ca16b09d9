"""Machines: this one (`fingerprint`), what an executable needs, how both compare, and files that it keeps.

`fleet_machines` reads the machines of a fleet. Imports `base`, `errors` and `verdict`. Begin with `compare`.
"""
