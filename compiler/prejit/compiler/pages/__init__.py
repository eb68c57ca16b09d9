"""HTML pages of reports: one file each, which needs nothing beside itself.

`render` holds the jinja2 environment, which escapes every value; `templates/` holds the HTML and one style
sheet. `bench.bench_page`, `fleet.fleet_page` and `reporting.build_page` turn their reports into the
values of a template.
"""
