"""The table of measured forms: what it says of a product, and that its file loses and invents nothing."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.threads import in_threads

from prejit.compiler.native import form_table as tables
from prejit.compiler.native.form_table import Conditions, FormTable, KnownForms, Measured
from prejit.compiler.native.products import KERNEL, LOOP, WIDENED, Product
from prejit.runtime.errors import RejectError, StoreError

HERE = Conditions("x86-64-v4", "AMD EPYC", 2, "0.10.2", "g++ 12.2.0", "sha256:" + "1" * 64)
LARGE = Product("bfloat16", 1, 2048, 8192, False)
SMALL = Product("bfloat16", 1, 64, 64, False)


def measured(product=LARGE, conditions=HERE, date="2026-11-20", **nanoseconds):
    times = {form.replace("_", " "): time for form, time in nanoseconds.items()}
    return Measured(product, times or {KERNEL: 100, LOOP: 300}, conditions, date)


def table(*entries):
    return FormTable(tuple(entries))


dtypes, sizes = st.sampled_from(["float32", "bfloat16", "int8"]), st.integers(1, 200_000)
products = st.builds(Product, dtypes, st.integers(1, 10_000), sizes, sizes, st.booleans())


@st.composite
def any_measured(draw):
    product, text = draw(products), st.text(max_size=4)
    forms = st.sampled_from(product.forms)
    times = draw(st.dictionaries(forms, st.integers(1, 10**12), min_size=1))
    conditions = draw(st.builds(Conditions, text, text, st.integers(1, 512), text, text, text))
    return Measured(product, times, conditions, draw(st.dates()).isoformat())


@settings(max_examples=40, deadline=None)
@given(st.lists(any_measured(), max_size=4, unique_by=lambda m: (m.conditions, m.product)))
def test_a_written_table_is_read_as_it_was(entries):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "forms.json")
        path.write_text(tables.to_text(table(*entries)), encoding="ascii")
        found = tables.read_table(path)
    assert found.by_conditions == table(*entries).by_conditions
    assert tables.to_text(found.merged(FormTable())) == tables.to_text(FormTable().merged(found))


def test_the_fastest_form_counts_in_the_order_of_who_says_it():
    many = replace(LARGE, rows=512)
    assert LOOP not in many.forms
    for times, product, form in (
        ({"kernel": 1000, "loop": 1001}, LARGE, KERNEL),
        ({"kernel": 1000, "loop": 999}, LARGE, KERNEL),
        ({"kernel": 1000, "loop": round(1000 / tables.MARGIN) - 1}, LARGE, LOOP),
        ({"widened_dot": 5, "loop": 9}, LARGE, WIDENED),
        ({"kernel": 10, "loop": 1}, many, KERNEL),
        ({"loop": 1}, many, None),
    ):
        assert tables.fastest_form(measured(**times), product) == form, times
    choice = KnownForms(own=table(measured(loop=1))).choice(many, HERE)
    assert (choice.form, choice.measured) == (KERNEL, None)
    given = table(measured(loop=1, kernel=9))
    own = table(measured(widened_dot=1, kernel=9))
    recorded = table(measured(kernel=1, loop=9))
    for known, form in (
        (KnownForms(given, own, recorded), LOOP),
        (KnownForms(FormTable(), own, recorded), WIDENED),
        (KnownForms(FormTable(), FormTable(), recorded), KERNEL),
        (KnownForms(), KERNEL),
    ):
        assert known.choice(LARGE, HERE).form == form


def test_the_nearest_measurement_answers_and_others_are_made_if_asked():
    own = KnownForms(own=table(measured()))
    assert own.missing([LARGE], HERE) == ()
    for name in ("cpu", "cpus", "jaxlib", "compiler", "kernels", "level"):
        there = replace(HERE, **{name: 16 if name == "cpus" else "another"})
        assert own.missing([LARGE], there) == (LARGE,), name
        assert own.choice(LARGE, there).measured == measured()  # until it is
    recorded = KnownForms(recorded=table(measured(conditions=replace(HERE, cpu="Intel Xeon"))))
    assert recorded.missing([LARGE], HERE) == ()
    assert recorded.missing([LARGE], HERE, fresh=True) == (LARGE,)
    own_cpu, xeon = measured(loop=1, kernel=9), replace(HERE, cpu="Intel Xeon")
    newer = measured(conditions=xeon, date="2026-11-21", kernel=1, loop=9)
    both = KnownForms(recorded=table(own_cpu, newer))
    for product in (LARGE, replace(LARGE, rows=2)):  # itself, and the nearest
        assert both.choice(product, HERE).measured == own_cpu
        for other in (xeon, replace(HERE, cpu="Intel Atom")):
            assert both.choice(product, other).measured == newer
    edge = Product("bfloat16", 1, tables.LEAST_BYTES // 128, 64, False)
    smaller = Product("bfloat16", 1, tables.LEAST_BYTES // 128 - 1, 64, False)
    assert KnownForms().missing([SMALL, LARGE, smaller, edge, LARGE], HERE) == (LARGE, edge)
    only_dot = Product("float32", 1, 4096, 4096, True)
    assert KnownForms().missing([SMALL, only_dot], HERE, fresh=True) == (SMALL,)
    near = measured(replace(LARGE, rows=4, inputs=1024), loop=1, kernel=9)
    far = measured(replace(LARGE, rows=64), kernel=1, widened_dot=9)
    other_dtype = measured(replace(LARGE, dtype="float32"), kernel=1, dot=9)
    other_level = measured(LARGE, replace(HERE, level="x86-64-v3"), kernel=1, loop=9)
    other_order = measured(replace(LARGE, in_out=True), loop=9)
    known = KnownForms(recorded=table(far, near, other_dtype, other_level, other_order))
    choice = known.choice(replace(LARGE, rows=2), HERE)
    assert (choice.form, choice.measured) == (LOOP, near)
    # Sizes count by how many times they differ, not by how much: 64 is nearer to 32 than 4 is.
    assert known.choice(replace(LARGE, rows=32), HERE).measured == far
    own_level = measured(replace(LARGE, rows=512, inputs=16), kernel=1)
    other_level = measured(LARGE, replace(HERE, level="x86-64-v2"), loop=1, kernel=9)
    only_other = KnownForms(recorded=table(other_level))
    assert only_other.choice(LARGE, HERE).measured == other_level
    assert only_other.missing([LARGE], HERE) == (LARGE,)
    both = KnownForms(recorded=table(other_level, own_level))
    assert both.choice(LARGE, HERE).measured == own_level


def test_a_float32_copy_of_a_head_is_tried():
    head = replace(LARGE, inputs=4096, outputs=128_256)
    assert head.measured_forms == (LOOP, KERNEL)
    assert LARGE.measured_forms == LARGE.forms == head.forms
    # With many rows only XLA's dot is left beside the kernel.
    assert replace(head, rows=64).measured_forms == (WIDENED, KERNEL)


def test_builds_that_measure_at_once_lose_nothing(tmp_path):
    path = tmp_path / "forms.json"

    def add(number):
        tables.merge_into(path, table(measured(replace(LARGE, rows=number + 1), kernel=5)))

    in_threads(24, add)
    assert sorted(m.product.rows for m in tables.read_table(path).entries) == [*range(1, 25)]
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f".{path.name}.lock"}


def test_a_damaged_own_table_is_begun_anew_and_a_named_one_must_be_there(tmp_path):
    path = tmp_path / "forms.json"
    path.write_text(tables.to_text(table(measured()))[:-9])
    assert tables.read_own(path) == FormTable()
    tables.merge_into(path, table(measured(SMALL)))
    assert tables.read_table(path) == table(measured(SMALL))
    path = tmp_path / "none.json"
    with pytest.raises(StoreError, match="cannot read the table of forms: No such file"):
        tables.read_table(path)
    assert tables.read_own(path) == FormTable()
    for content in (b"", b"\xff", b"[" * 100_000, b'{"version": 1,}'):
        path.write_bytes(content)
        with pytest.raises(RejectError, match="expected a table of forms"):
            tables.read_table(path)


def test_an_error_names_the_file_and_the_key(tmp_path):
    path, data = tmp_path / "given.json", json.loads(tables.to_text(table(measured())))

    def section(**changed):
        return {**data, "measured": [{**data["measured"][0], **changed}]}

    unknown = {"int9 1 x 2 x 3 (out,in)": {}}
    for changed, message in (
        (data | {"version": 2}, "version: expected 1, found 2"),
        ({"version": 1}, "expected the key 'measured', found none"),
        (data | {"mesured": []}, "unknown key 'mesured'"),
        (data | {"measured": 3}, "measured: expected a list, found 3"),
        (section(nanoseconds=[]), "expected an object with products"),
        (section(nanoseconds={str(LARGE): 3}), "expected an object with a time for each form"),
        (section(cpus="2"), r'measured\[0\].cpus: expected a number, found "2"'),
        (section(nanoseconds=unknown), "expected a product such as"),
        (section(nanoseconds={str(LARGE): {"dot": 1}}), "expected loop or widened dot or kernel"),
        (section(nanoseconds={str(LARGE): {"loop": 0}}), "loop: expected nanoseconds, 1 or more"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(RejectError, match=message) as raised:
            tables.read_table(path)
        assert str(path) in str(raised.value)
        assert raised.value.hint is not None
