"""Text to token ids and back, chat templates, and stop strings.

Imports `format`, and no JAX. Begin with `tokenizer`.
"""
