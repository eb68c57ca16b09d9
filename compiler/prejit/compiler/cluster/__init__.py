"""Compiling on a Ray cluster that exists.

`cluster_executor.ClusterExecutor` is the executor of a build there. `connection` is the only module that
imports Ray on the build's machine; `node` is what a node runs, with this build's own code, which Ray sends
it. Programs and executables go through the shared store, or this machine's where all nodes are on it.
"""
