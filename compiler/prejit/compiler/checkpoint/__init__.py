"""Read and check a model directory: weights, tokenizer and chat templates.

Imports `models`. Begin with `model_source`, then `checkpoint`.
"""
