"""Vectors from an encoder: sentences and images, the buckets that cover them, and the programs that run.

May import `programs`, `text` and the rooms below them. Decoders never import this room.

    sentences   the way of a call: texts to token ids, checked and cut, to embeddings; begin here
    images      pictures to pixels, and the programs that read them
    encoder     runs and background loading of an encoder's programs, in the buckets that cost least
"""
