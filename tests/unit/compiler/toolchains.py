"""Toolchains of an older and a newer jaxlib, which compile nothing."""

from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain

V3, HOST, L4 = target("cpu-x86-64-v3"), target("cpu-host"), target("cuda-l4")


def old(on):
    """With a jaxlib that compiles for no described CPU."""
    return host_toolchain(on, {"jax": "0.10.2", "jaxlib": "0.10.2"})


def new(on):
    return host_toolchain(on, {"jax": "0.12.0", "jaxlib": "0.12.0"})


def for_gpu(on=L4):
    versions = (("jax", "0.12.0"), ("jax-cuda13-pjrt", "0.12.0"), ("jaxlib", "0.12.0"))
    return Toolchain(on, ("python",), versions, isolated=True)
