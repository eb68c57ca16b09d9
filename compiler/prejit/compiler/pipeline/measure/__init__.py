"""Measuring on this machine: how fast and how exact the results of a build are.

`forms` measures products with matrices, `costs` the programs of encoders, `accuracy` what dtypes cost
(`comparison` runs both models). One build measures at a time. The store keeps every figure.
"""
