"""Limits on what a reader accepts before it trusts anything.

They are generous: 10,000 programs make a config of 10 MB.
"""

from __future__ import annotations

# Caps on what is read before anything is trusted. Generous: 10,000 programs make a config of 10 MB.
MAX_INDEX_BYTES = 4 << 20
MAX_MANIFEST_BYTES = 64 << 10
"""A manifest has some 3 kB."""
MAX_CONFIG_BYTES = 16 << 20
MAX_PROGRAM_BYTES = 1 << 30
"""One executable or portable program, decompressed."""
MAX_CHAT_BYTES = 4 << 20
"""Published templates have some 10 kB."""

MAX_TOKENIZER_BYTES = 128 << 20
"""Published tokenizers have up to 35 MB."""
MAX_GENERATION_BYTES = 1 << 20
"""Published generation configs have some 200 bytes."""
MAX_KERNELS_BYTES = 64 << 20
"""Libraries of kernels have some 600 kB, most of it libstdc++."""
MAX_MESH_DEVICES = 1 << 12
"""XLA:CPU makes as many devices as it is told, each with threads of its own; of 2**14 it does not return."""

MAX_SIZE = (1 << 31) - 1
"""Of a model or a bucket: tokens and positions are int32."""
MAX_BATCH = 1 << 16
"""Of a model's program: what a reader keeps for each row on the host must fit into memory."""
