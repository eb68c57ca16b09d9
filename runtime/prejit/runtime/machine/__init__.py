"""What this machine is, what a target is, and whether code fits it.

`fingerprint` describes this machine, `requirement` what an executable needs, and `compare` decides, axis by
axis. `target` and `catalogue` describe classes of machines by name. Imports `base`. Begin with `compare`.
"""
