"""The families of models as data, and the modules that they configure.

Imports `layers`. Begin with `family_table`, then `decoders`; of models that embed or score with
`encoder_table`.
"""
