"""One engine for all callers of a bundle: a queue, one loop that drives one batch, shared calls of encoders.

May import `encoding`, `generation` and the rooms below them. The server is built on this room.

    engine            what callers use; begin here
    generation_loop   the thread that admits requests and steps the batch
    fair_queue        whose turn it is, and how much of prompts a step computes
    stream            requests on their way, and what their callers hold
    microbatch        shared runs of encoders and of the user's functions
    engine_metrics    what an engine measures; request_recorder counts it
"""
