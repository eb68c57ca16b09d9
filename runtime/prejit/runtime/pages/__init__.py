"""HTML pages: what `prejit explain --fleet --page` and `prejit bench --page` write.

A page is one file that needs nothing beside itself. `render` holds the jinja2 environment, which escapes
every value; `fleet` and `bench` turn a report into the values of a template; `templates/` holds the HTML and
one style sheet. Imports the rooms `fleet` and `bench`. Begin with `fleet`.
"""
