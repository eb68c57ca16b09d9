"""Decide if a release may replace the bundle that serves: `prejit gate` before, a canary in a server.

`release_contents` compares what two bundles say of themselves, `measured_checks` what they answer and how
fast, with the statistics for that. Begin with `gate_run`.
"""
