"""All that a build imports. The process that warm.py forks imports it."""

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
assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there after a fork"
