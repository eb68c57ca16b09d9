"""The families of models as data, and the modules that they configure.

Imports `layers`. Begin with `family_table`, then `decoders`.
"""
