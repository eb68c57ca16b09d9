"""Text to token ids and back, chat templates, and stop strings.

May import `format` and the rooms below it, and no JAX. Everything is imported lazily except `bundle_text`
and `stop`: a request with token ids needs neither the tokenizer (20 ms) nor Jinja (40 ms).

    bundle_text   the tokenizer and the chat templates of one bundle; begin here
    tokenizer     the bundle's tokenizer.json, and text from tokens as they come
    token_bytes   the bytes of single tokens, for log-probabilities
    vocabulary    how tokens spell bytes; grammars need all of them
    chat          messages to the text of a prompt, as transformers renders them
    sandbox       Jinja with limits, because a template is somebody else's code
    stop          stop strings in text that comes in pieces
"""
