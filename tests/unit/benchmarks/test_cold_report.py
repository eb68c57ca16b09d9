"""Tables of cold starts: each ratio names the row that it was made with."""

from benchmarks.harness import cold_report
from benchmarks.harness.fresh_processes import Row
from benchmarks.harness.report import JAX_WARM

FIRST, RECEIPT = "prejit int8, first load", "prejit int8, with receipt"
LLAMA, BUNDLE = "llama.cpp q8_0", "reading the bundle, int8"
ALL = "reading bundle, interpreter and libraries, int8"


def rows():
    return [
        *(Row(name, ("-",), {}, "int8") for name in (FIRST, RECEIPT, LLAMA, BUNDLE, ALL)),
        Row("llama.cpp f32", ("-",), {}, "float32"),
        Row(JAX_WARM, ("-",), {}, "float32"),
    ]


def figures(**seconds):
    names = {"first": FIRST, "receipt": RECEIPT, "llama": LLAMA, "bundle": BUNDLE, "jax": JAX_WARM}
    return {
        names[name]: [{"first_seconds": each} for each in values]
        for name, values in seconds.items()
    }


def test_a_row_is_compared_with_peers_of_its_dtype_and_with_jax():
    assert cold_report.references(rows()[0], rows()) == {
        "to llama.cpp": LLAMA,
        "to reading the bundle": BUNDLE,
        "to reading bundle, interpreter and libraries": ALL,
        f"to {JAX_WARM}": JAX_WARM,
        "to the start with a receipt": RECEIPT,
    }


def test_ratios_are_within_rounds_and_stay_empty_where_a_row_did_not_run():
    found = {"page cache warm": figures(first=[1.0, 4.0, 2.0], llama=[2.0, 2.0, 1.0])}
    table = cold_report.ratios("title", rows(), found)
    (line,) = table.rows
    by_column = dict(zip(table.head, line, strict=True))
    assert by_column["to llama.cpp"] == "2.00"
    assert by_column["to reading the bundle"] == ""


def test_the_goals_are_missed_where_prejit_is_slower():
    found = {
        "page cache warm": figures(first=[0.6], receipt=[0.5], llama=[0.5]),
        "disk cold": figures(first=[1.1], llama=[1.2], bundle=[1.0]),
    }
    made = cold_report.targets("GPT-2", rows(), found)
    assert [(t.found, t.met) for t in made] == [
        (1.2, False),
        (1.2, False),
        (1.1 / 1.2, True),
        (1.1, True),
    ]
