"""What a model directory holds: weights, tokenizer, chat templates, each checked.

Imports `models`. Begin with `source`, then `checkpoint`.
"""
