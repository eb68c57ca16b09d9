"""Files for those who watch servers: dashboards of Grafana, alert rules of Prometheus, runbooks. No JAX.

May import `base` and `errors`. Only the command line imports it. The names of the metrics are those of
`server/collector.py`; a test compares them, because nothing else would notice a name that no server has.

    files        writes all of them into a directory; begin here
    dashboards   the panels of each dashboard
    panels       queries, and the panels that several dashboards have
    grafana      panels and dashboards as Grafana imports them
    alerts       the alert rules
    templates/   one runbook for each alert, an example of a configuration, and how to use all of it
"""
