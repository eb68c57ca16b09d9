"""The steps of a build, each a function of frozen values.

    run.py           all steps in order: begin here
    plan.py          programs x targets, and what the store has of them; `prejit plan` ends here
    keys.py          the ingredients of every key
    model.py         the model: its files, and what they say
    model_layers.py  tokenizer, chat templates and licence, checked
    lowering.py      programs and functions to StableHLO
    executables.py   StableHLO to executables
    weights.py       the weights layer and what its dtypes cost (accuracy.py compares)
    measuring.py     forms of products; costs.py: programs of encoders
    contents.py      tables, blobs and index of the bundle (requirement.py, compatibility.py, packaging.py)
    garbage.py       what `prejit gc` removes

This package imports every room of the build side below `api` and `cli`. A step asks for what is expensive by
name: `store` keeps results, `executor` compiles, `progress` shows what happens.
"""
