"""Encoder families, a file each, and the sentence-transformers layout around them.

Imports `layers`. Begin with `bert`.
"""
