"""The report of a start: its time in parts, and hints. A start itself imports nothing of it.

May import `programs`, `store` and the rooms below them. Begin with `report.split`: it adds up the spans that
`load`, `Verification`, `Programs` and the imports noted.

    report   a start in parts that add up
    hints    why a part was slow, where the user can change it
"""
