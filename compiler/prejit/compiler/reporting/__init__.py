"""The report of a build: what it did and how long that took, what each bucket costs, and what changed.

    Progress.steps + Built + the bundle's program tables -> BuildReport -> NAME.report.json, NAME.report.html

`report` makes the values without reading files, `timing` finds lanes and the critical path, `change` compares
two reports, `page` draws, and `files` reads the bundle and writes. Imports `pipeline`. Begin with `report`.
"""
