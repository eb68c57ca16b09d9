"""`prejit bench`: measure a bundle, and compare it with another or with a saved report.

`measure` runs fresh processes (`processes`, `child`) and probes (`probes`, in `rounds`); `report` holds
what comes out, `comparison` judges it, `wording` puts it into text. Imports the public face of the runtime.
Begin with `measure.judge`.
"""
