"""Check that a model keeps the rules of `models.protocol`: `prejit check-model`.

The engine cuts texts into pieces, pads them, and puts rows beside each other. It trusts a model that the
results do not depend on that. Each rule has a check, which runs the model and returns a `Finding`.

    finding.py     what a check found
    subject.py     the model under test, with the texts and shapes that all checks use
    shapes.py      attributes, caches and logits: shapes and dtypes, nothing is computed
    rules.py       the rules of a decoder, by numbers
    encoding.py    the rules of an encoder-decoder's sources
    parity.py      the logits of a reference
    kit.py         all checks in order: begin here
    user_model.py  find a model by name, for the command
"""
