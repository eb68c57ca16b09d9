"""Adapters beside the weights of a decoder: read from PEFT's files, held in slots, chosen by each request.

Imported only for bundles that take adapters. May import generation and what is below it.
"""
