"""The Open Inference Protocol for the `[[program]]`s of bundles: /v2, as KServe and Triton speak it.

`inference_routes` answers requests, `inference_models` says what a program takes and gives, and
`inference_protocol` has the JSON and reads and writes arrays.
"""
