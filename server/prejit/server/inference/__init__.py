"""The Open Inference Protocol for the `[[program]]`s of bundles: /v2, as KServe and Triton speak it.

`routes` answers requests, `models` says what a program takes and gives, `tensors` reads and
writes arrays, and `schema` has the JSON.
"""
