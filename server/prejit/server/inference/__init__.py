"""The Open Inference Protocol for the `[[program]]`s of bundles: /v2, as KServe and Triton speak it.

`inference_routes` answers requests, `inference_models` says what a program takes and gives, `tensors` reads
and writes arrays, and `inference_schema` has the JSON.
"""
