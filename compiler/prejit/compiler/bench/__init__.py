"""`prejit bench`: measure a bundle, and compare it with another or with a saved report.

`measure` runs fresh processes (`bench_child`) and `probes` in rounds; `bench_report` holds what comes out and
compares it, `bench_page` shows it to people. Imports the public face of the runtime. Begin with
`measure.judge`.
"""
