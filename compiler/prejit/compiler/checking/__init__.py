"""Check that a model keeps the rules of `models.protocol`: `prejit check-model`.

The engine cuts texts into pieces, pads them, and puts rows beside each other. It trusts a model that the
results do not depend on that. Each rule has a check in `kit` or `model_rules`, which runs a `Subject` and
returns a `Finding`. Begin with `kit.check_model`.
"""
