"""The steps of a build, each a function of frozen values.

    run.py           all steps in order: begin here
    plan.py          programs x targets, and what the store has of them
    reuse.py         which executables the store has, for `prejit plan` and a build alike
    keys.py          the ingredients of every key
    model.py         the model: its files, and what they say
    lowering.py      programs and functions to StableHLO
    lowerers         the same in processes of their own, side by side
    checks.py        mistakes in models and code, before anything is lowered
    executables.py   StableHLO to executables
    measure          forms of products, costs of programs, accuracy of dtypes
    pack             tables, layers and index of the bundle

This package imports every room of the build side below `api` and `cli`. A step asks for what is expensive by
name: `store` keeps results, `executor` compiles, `progress` shows what happens.
"""
