"""One engine for all callers of a bundle: a queue, one loop that drives one batch, shared calls of encoders.

May import `encoding`, `generation` and the rooms below them. The server is built on this room.

    admission what is computed of new prompts between two decode steps
    metrics   what an engine measures: counters, histograms, and the one object that holds them all
"""
