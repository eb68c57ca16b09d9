"""OpenAI's HTTP API: completions, chat, responses, embeddings, models, and vLLM's /tokenize and /detokenize.

May import `engine`, `bundle` and the modules of the server that know no API. Each endpoint has a module.
Those that generate text share `text_request_fields` (what requests have in common) and `engine_calls`
(requests to the engine, and streams of answers).
"""
