"""Import the build side once, in the server that warm.py's processes are forked from."""

import gc
import importlib
import os
import pkgutil

from transformers import AutoConfig  # noqa: F401 (transformers imports it when it is named)

import prejit.compiler

for module in pkgutil.walk_packages(prejit.compiler.__path__, "prejit.compiler."):
    importlib.import_module(module.name)
gc.collect()
gc.freeze()  # no child looks for garbage among what is imported
threads = len(os.listdir("/proc/self/task"))
assert threads == 1, f"{threads} threads: a fork would have one of them"
