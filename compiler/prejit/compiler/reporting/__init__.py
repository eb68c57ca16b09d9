"""The report of a build: what it did and how long that took, what each bucket costs, and what changed.

    Progress.steps + Built + the bundle's program tables -> BuildReport -> NAME.report.json, NAME.report.html

`build_report` makes the values without reading files, finds lanes and the critical path, and compares two
reports; `report_files` reads the bundle, draws and writes. Imports `pipeline`.
"""
