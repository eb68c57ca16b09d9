"""One engine for all callers of a bundle: a queue, one loop that drives one batch, shared calls of encoders.

May import `encoding`, `generation` and the rooms below them. The server is built on this room.

    admission what is computed of new prompts between two decode steps
    metrics   what an engine measures, as callers get it: counters and histograms of each kind of requests
    recorder  what the loop and the lanes of shared calls count into
"""
