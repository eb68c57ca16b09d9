"""Text to token ids and back, chat templates and stop strings, without JAX. Begin with `bundle_text`.

A request with token ids needs neither the tokenizer (20 ms) nor Jinja (40 ms), so both are imported late.
"""
