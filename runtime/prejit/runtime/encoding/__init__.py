"""Vectors from an encoder: sentences, the buckets that cover them, and the programs that run.

May import `programs`, `text` and the rooms below them. Decoders never import this room.

    sentences   the way of a call: texts to token ids, checked and cut, to embeddings; begin here
    encoder     runs and background loading of an encoder's programs
    buckets     which runs of which buckets cost least, and which buckets to load first; pure functions
"""
