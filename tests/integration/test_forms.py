"""Forms by measurement: a build measures once, another one reads it, and a table decides what is compiled."""

import json
import re
from types import SimpleNamespace

import pytest
from tests.decoders import gpt2_config
from tests.layouts import blob, contents_of
from tests.manifests import write_manifest
from tests.parity.cases import Case

WIDTH, LARGE_INNER = 64, 4096
"""A matrix of 64 x 4096 has 1 MB: the least that a build measures."""


def write_model(directory, inner):
    sizes = {"n_positions": 64, "n_embd": WIDTH, "n_head": 4, "n_layer": 1, "n_inner": inner}
    config = gpt2_config(**sizes, bos_token_id=None, eos_token_id=None)
    Case("measured", config, seed=1).write(directory)
    return directory


def inspected(run, bundle):
    (target,) = json.loads(run("inspect", bundle, "--json").stdout)["targets"]
    if "forms" not in target["config"]:
        pytest.skip("no C++ compiler here, so no kernels and no choice")
    return {each["product"]: each for each in target["config"]["forms"]}


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory, build_cache):
    """A bundle whose build measured, its manifest, stderr of its build, and the build cache's own table."""
    directory, table = tmp_path_factory.mktemp("forms"), build_cache / "forms.json"
    if table.exists():  # a cache that outlives the run has measured these products
        sections = json.loads(table.read_text())["measured"]
        for section in sections:
            times = section["nanoseconds"].items()
            section["nanoseconds"] = {n: t for n, t in times if str(LARGE_INNER) not in n}
        left = [section for section in sections if section["nanoseconds"]]
        table.write_text(json.dumps({"version": 1, "measured": left}))
    model = write_model(directory / "model", LARGE_INNER)
    manifest = write_manifest(directory / "m.toml", model, prompt=[8], context=[32])
    told = run("build", manifest, "-o", directory / "out").stderr
    path = directory / "out" / "model"
    return SimpleNamespace(path=path, manifest=manifest, told=told, table=table)


@pytest.mark.thorough
def test_a_build_measures_large_products_and_says_so_in_bundle_and_table(run, measured):
    forms = inspected(run, measured.path)
    assert "measuring the forms of 2 products for cpu-host" in measured.told
    large = {name: each for name, each in forms.items() if str(LARGE_INNER) in name}
    assert len(large) == 2
    for each in large.values():
        assert each["nanoseconds"].keys() == {"dot", "kernel"}
        assert "like" not in each
        assert re.search(r"x86-64-v\d on .*, jaxlib", each["measured_on"])
    sections = json.loads(measured.table.read_text())["measured"]
    recorded = {name: times for each in sections for name, times in each["nanoseconds"].items()}
    assert {name: recorded[name] for name in large} == {
        name: each["nanoseconds"] for name, each in large.items()
    }
    shown = run("inspect", measured.path).stdout
    assert re.search(rf"float32 1 x {WIDTH} x {LARGE_INNER} \(out,in\) .* x (dot|kernel) ", shown)


def test_what_one_build_measured_the_next_one_reads(run, measured, tmp_path):
    before = measured.table.read_bytes()
    again = run("build", measured.manifest, "-o", tmp_path)
    assert "measuring the forms" not in again.stderr
    assert "compiled 0" in again.stderr
    assert measured.table.read_bytes() == before
    copy = tmp_path / "model"
    assert (copy / "index.json").read_bytes() == (measured.path / "index.json").read_bytes()


@pytest.mark.thorough
def test_a_table_decides_what_is_compiled(run, measured, tmp_path):
    inner = LARGE_INNER + 64
    model = write_model(tmp_path / "model", inner)
    manifest = write_manifest(tmp_path / "m.toml", model, prompt=[8], context=[32])
    sizes = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 48), (WIDTH, inner), (inner, WIDTH)]
    products = [f"float32 {rows} x {k} x {n} (out,in)" for rows in (1, 8) for k, n in sizes]
    sections = json.loads(measured.table.read_text())["measured"]  # other tests measure as well
    section = next(s for s in sections if str(LARGE_INNER) in str(s["nanoseconds"]))
    section["nanoseconds"] = {name: {"dot": 1000, "kernel": 3000} for name in products}
    given = tmp_path / "given.json"
    given.write_text(json.dumps({"version": 1, "measured": [section]}))
    before = measured.table.read_bytes()
    built = run("build", manifest, "-o", tmp_path / "out", "--no-measure", "--forms", given)
    assert "measuring the forms" not in built.stderr
    assert measured.table.read_bytes() == before
    forms = inspected(run, tmp_path / "out" / "model")
    assert {each["form"] for each in forms.values()} == {"dot"}
    assert linear_calls(tmp_path / "out" / "model")["decode/b1-c32"] == 0
    in_decode = [x["form"] for name, x in inspected(run, measured.path).items() if " 1 x " in name]
    assert (linear_calls(measured.path)["decode/b1-c32"] > 0) == ("kernel" in in_decode)


def linear_calls(bundle):
    """How often the executables of a bundle's only target call the kernel of products, by program."""
    import zstandard

    from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE

    [contents] = contents_of(bundle).values()
    packed = blob(bundle, contents.manifest.layer(EXECUTABLES_MEDIA_TYPE).digest).read_bytes()
    unpack = zstandard.ZstdDecompressor().decompress
    return {
        program.name: unpack(packed[at.offset : at.offset + at.size]).count(b"prejit_linear.")
        for program in contents.config.programs
        for at in [program.executable]
    }
