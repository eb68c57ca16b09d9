"""Files for those who watch servers: dashboards of Grafana, alert rules of Prometheus, runbooks. No JAX.

May import `base` and `errors`. Only the command line imports it. The names of the metrics are those of
`telemetry/metrics_collector.py`; a test compares them.

    templates/          the files: dashboards, rules, one runbook for each alert, and how to use all of it
    monitoring_files    writes them into a directory

Two objectives of the rules have burn-rate alerts over several windows (The Site Reliability Workbook, chapter
5): a fast burn wakes somebody, a slow one makes a ticket. The other alerts name causes. The short window of
each pair ends the alert soon after its cause has ended.
"""
