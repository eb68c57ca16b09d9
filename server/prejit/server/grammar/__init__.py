"""Grammars for generated text: JSON, JSON schemas, regular expressions, Lark and calls of tools.

A grammar becomes a token mask for the option `token_mask` of a generation. May import `text` and the rooms
below it, and llguidance (extras `grammar` and `server`), which nothing else imports. Begin with `grammars`.

    grammars           the grammars of one vocabulary; compiles each once, and the token masks of requests
    grammar_sources    grammars in Lark, before they are compiled
    grammar_compiling  llguidance's compiler, with limits
    grammar_trial      a process that compiles the grammars of strangers first
"""
