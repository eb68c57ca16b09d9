"""Trust: who signed a bundle, and whether a policy lets it run. No JAX; `cryptography` only under a policy.

`enforcing` reads what is attached to a bundle and asks every policy that applies. `decision` is the rule,
without any reading of files; `signed_statements` and `channel` parse signatures; `policy` reads `trust.toml`.
Imports `format`. Begin with `decision`.
"""
