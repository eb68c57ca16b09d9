"""The steps of a build, each a function of frozen values. Begin with `build_run.py`: all of them in order.

    build_interface.py   the options of a build, its services, its shard among several machines, its result
    plan.py              manifest -> plan: programs x targets, and what the store has of them
    target_tools.py      what compiles for each target, and what its programs may call
    executable_jobs.py   plan and lowered -> jobs -> compiled: which executables the store has, and the others
    result_keys.py       the ingredients of every key
    stored_traces.py     traces of the user's code in the store
    model.py             the model, and what its files say
    published_files.py   the files of its checkpoint, hashed while tensors are read
    workspace.py         what all steps of one build share: its plan, its model, the user's code, the store
    lower                plan -> lowered: checks, lowering here and in processes, and handing to the executor
    measure              speed of products and programs, accuracy of dtypes, golden answers, other sizes
    pack                 compiled -> packed -> written: tables, layers, index, descriptions
    build_report.py      what a build did and how long that took, what each bucket costs, and what changed
    report_files.py      the report beside the bundle
    bundle_wheel.py      a bundle as a Python wheel

This package imports every room of the build side below `api` and `cli`. A step asks for what is expensive by
name: `store` keeps results, `executor` compiles, `progress` shows what happens.
"""
