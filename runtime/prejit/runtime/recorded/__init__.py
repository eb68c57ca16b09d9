"""Recorded caches: give jax what another run compiled, and report what it used.

`prejit record` (build side) packs the files of jax's compilation cache into a bundle; `prejit run` gives
them to jax again. `recorded_bundle` opens, matches and unpacks such a bundle, `watched_command` runs the
program's command, and `run_report` compares what jax asked for with what was recorded.

`hook` runs inside the program's own processes. It imports nothing of prejit, because their Python may have no
prejit. `site` holds the `sitecustomize` that starts it. Calls without traces begin in `hook.kept_calls`.
Imports `base`, `format` and `machine`.
Begin with `recorded_bundle`.
"""
