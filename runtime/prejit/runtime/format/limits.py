"""Maximum sizes that a reader accepts before it has verified anything.

They are generous: 10,000 programs make a config of 10 MB.
"""

from __future__ import annotations

MAX_INDEX_BYTES = 1 << 20
"""Maximum size of `index.json`, and of a bundle's index. A target takes about 800 bytes of it."""
MAX_TARGETS = 1 << 9
"""Maximum number of targets of a bundle. A reader compares each with the machine and reads its manifest."""
MAX_ROOT_ENTRIES = 1 << 11
"""Maximum number of entries of `index.json`: the bundle, its targets, and what refers to them."""
MAX_OCI_LAYOUT_BYTES = 4096
"""Maximum size of `oci-layout`. prejit writes 30 bytes; other tools may add spaces."""
MAX_MANIFEST_BYTES = 64 << 10
"""Maximum size of a manifest. Most have 3 kB."""
MAX_CONFIG_BYTES = 16 << 20
"""Maximum size of a config. 10,000 programs make one of 10 MB."""
MAX_PROGRAM_BYTES = 1 << 30
"""Maximum size of an executable or a portable program, decompressed."""
MAX_UNPACKED_RATIO = 256
"""Maximum ratio of the sizes of all programs of a pack to the pack. Executables have 3 to 6."""
FREE_UNPACKED_BYTES = 64 << 20
"""The programs of a pack may have this size whatever the ratio is."""
MAX_CHAT_BYTES = 4 << 20
"""Maximum size of the chat templates. Published ones have about 10 kB."""

MIN_CHUNK_BYTES = 64 << 10
"""Minimum size of a chunk of a layer; smaller ones would take longer to hand out than to hash."""
MAX_CHUNK_BYTES = 64 << 20
"""Maximum size of a chunk of a layer. Each thread that verifies chunks has a buffer for one."""

MAX_TOKENIZER_BYTES = 128 << 20
"""Maximum size of a tokenizer. Published ones have up to 35 MB."""
MAX_GENERATION_BYTES = 1 << 20
"""Maximum size of a generation config. Published ones have about 200 bytes."""
MAX_KERNELS_BYTES = 64 << 20
"""Maximum size of a library of kernels. Ours have 600 kB, most of it libstdc++."""
MAX_LIBRARY_BYTES = 256 << 20
"""Maximum size of a library of the user. A reader copies it into memory."""
MAX_MESH_DEVICES = 1 << 12
"""Maximum number of devices of a mesh. XLA:CPU starts threads for each device; with 2**14 it does not
return."""

MAX_SIZE = (1 << 31) - 1
"""Maximum of any size of a model or a bucket, because tokens and positions are int32."""
MAX_DIMENSIONS = 64
"""Maximum number of dimensions of an array, which is NumPy's."""
MAX_CACHE_ARRAYS = 1 << 14
"""Maximum number of arrays of a decoder's cache. 128 layers have 256; 16,384 take a second to read."""
MAX_BATCH = 1 << 16
"""Maximum batch of a model's program, because a reader keeps state for each row in the host's memory."""


MAX_DEPTH = 256
"""Maximum depth of a tree of arguments or results; code walks a tree by recursion."""
