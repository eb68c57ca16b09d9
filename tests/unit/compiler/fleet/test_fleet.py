"""Fleets: what each machine loads, and advice that must be right and the least there is."""

import dataclasses
import json
import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples
from tests.html_pages import EVIL, Elements, alone
from tests.manifests import functions_manifest

from prejit.compiler.fleet.fleet_report import explain_fleet, fleet_page
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.targets.target_classes import catalogue
from prejit.runtime import __main__
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.fallback_reporting import closest_target
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import REF_NAME, REQUIREMENT
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement, effective_xla_flags
from prejit.runtime.machine.fleet_machines import Machine, read_fleet

LEVELS = {name: catalogue()[f"cpu-x86-64-{name}"].cpu_features or () for name in ("v2", "v3", "v4")}
HOST = Fingerprint("cpu", "x86_64", LEVELS["v3"], "0.12.0.1", "Some CPU", 4, 1 << 34)


def device(target, **told):
    known = catalogue()[target]
    same = {"device_kind": known.device_kind, "device_memory_bytes": known.memory_bytes}
    return dataclasses.replace(HOST, **{**same, "platform": known.platform, **told})


def gpu(target="cuda-l4", **other):
    told = {"cuda": "13.0.96", "driver": "580.95.05", "device_count": 1}
    told["plugin"] = f"jax-cuda13-pjrt {other.get('jaxlib', HOST.jaxlib)}"
    told["compute_capability"] = catalogue()[target].compute_capability
    return device(target, **told | other)


def tpu(target="tpu-v5e", **other):
    known = catalogue()[target]
    told = {"device_count": known.device_count, "topology": known.topology}
    return device(target, plugin=other.pop("plugin", "libtpu 0.0.50"), **told | other)


def cpu(level, odd, architecture, **other):
    features = tuple(sorted(set(level) - odd)) if architecture == "x86_64" else ()
    return dataclasses.replace(HOST, architecture=architecture, cpu_features=features, **other)


def needs(target, jaxlib="0.12.0.1", **other):
    known = catalogue()[target]
    plugin = {"cuda": f"jax-cuda13-pjrt {jaxlib}", "tpu": "libtpu 0.0.50"}.get(known.platform)
    cuda = "13.0" if known.platform == "cuda" else None
    return target, known.requirement(jaxlib, plugin=plugin, cuda=cuda, **other)


def named(*machines):
    return tuple(Machine(f"m{i}", f"fleet/m{i}.json", m) for i, m in enumerate(machines))


def save(directory, *machines):
    for machine in machines:
        path = directory / f"{machine.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_json(machine.fingerprint) + b"\n")
    return directory


JAXLIBS = st.sampled_from(["0.11.2", "0.12.0.1"])
FLAGS = st.sampled_from([(), (), (), ("--xla_cpu_enable_fast_math=true",)])
CPUS = st.builds(
    cpu,
    st.sampled_from([*LEVELS.values(), (*LEVELS["v4"], "sha")]),
    st.sets(st.sampled_from(("sse2", "fma", "avx512f")), max_size=1),
    st.sampled_from(["x86_64", "x86_64", "x86_64", "aarch64"]),
    **{"jaxlib": JAXLIBS, "xla_flags": FLAGS},
)
GPUS = st.builds(
    gpu,
    st.sampled_from(["cuda-l4", "cuda-h100", "cuda-h200", "cuda-a100"]),
    **{"jaxlib": JAXLIBS, "driver": st.sampled_from(["580.95.05", "580.95.05", "535.1"])},
    device_count=st.sampled_from([1, 8]),
    environment=st.sampled_from([(), (), ("NVIDIA_TF32_OVERRIDE=0",)]),
    architecture=st.sampled_from(["x86_64", "x86_64", "aarch64"]),
)
PLUGINS = st.sampled_from(["libtpu 0.0.50", "libtpu 0.0.51"])
SLICES = st.sampled_from(["tpu-v5e", "tpu-v5e-2x2", "tpu-v6e"])
TPUS = st.builds(tpu, SLICES, jaxlib=JAXLIBS, plugin=PLUGINS)
MACHINES = st.one_of(CPUS, CPUS, GPUS, TPUS)
KNOWN = [needs(name) for name in ("cpu-x86-64-v3", "cuda-h100", "tpu-v5e")]
KNOWN.append(needs("cpu-x86-64-v4", "0.11.2"))
KNOWN.append(needs("cuda-l4", device_memory_bytes=30_000_000_000))
TARGETS = st.lists(st.sampled_from(KNOWN), min_size=1, unique_by=lambda target: target[0])


@settings(max_examples=examples(50, 150), deadline=None)
@given(TARGETS, st.lists(MACHINES, min_size=1, max_size=30))
def test_with_what_is_advised_every_machine_matches(targets, machines):
    fleet = named(*machines)
    report = explain_fleet(targets, fleet)
    added = [(f"added-{i}", a.requirement) for i, a in enumerate(report.additions)]
    beyond = {name for group in report.beyond_help for name in group.machines}
    lost = {machine.name for machine, verdict in report.verdicts if not verdict.matches}
    for machine, verdict in explain_fleet([*targets, *added], fleet).verdicts:
        assert verdict.matches == (machine.name not in beyond)
    for addition in report.additions:
        assert addition.machines
        assert lost - beyond >= {*addition.machines}
        for name in addition.machines:
            assert compare("", addition.requirement, machines[int(name[1:])]).matches
    assert sum(len(group.machines) for group in report.groups) == len(machines)
    names = [addition.table["name"] for addition in report.additions]
    jaxlibs = [addition.requirement.jaxlib for addition in report.additions]
    assert len(set(zip(names, jaxlibs, strict=True))) == len(names), "a name is unique"


def test_what_no_target_can_mend_is_told_by_its_axis_or_described_by_the_machine():
    """Rather than a target that is built for nothing."""
    targets = [
        needs("cpu-x86-64-v4", "0.11.2"),
        needs("cuda-h100", "0.11.2", device_memory_bytes=2_000_000_000),
    ]
    for machine, axis in (
        (gpu(driver="535.1"), "driver"),
        (gpu(plugin="jax-cuda13-pjrt 0.12.0"), "plugin"),
        (tpu("tpu-v5e-2x2"), "topology"),
        (dataclasses.replace(HOST, jaxlib="0.12.0.dev1"), "jaxlib"),
    ):
        report = explain_fleet(targets, named(machine))
        [group] = report.beyond_help
        found = [each.name for each in group.mismatches]
        assert (report.additions, found, group.machines) == ((), [axis], ("m0",))
    # `prejit build` refuses the small one, and the machine's own board has the room.
    targets = [needs("cuda-h100", device_memory_bytes=30_000_000_000)]
    machine = gpu("cuda-l4", device_kind="NVIDIA L40S", device_memory_bytes=48_000_000_000)
    [addition] = explain_fleet(targets, named(machine)).additions
    assert addition.table == {"name": "m0", "fingerprint": "fleet/m0.json"}
    machine = gpu(device_kind="NVIDIA GeForce RTX 5090", compute_capability="12.0")
    [addition] = explain_fleet([needs("cpu-x86-64-v3")], named(machine)).additions
    assert "gpu = {" in (addition.note or "")
    assert tomllib.loads(addition.toml())["target"][0]["fingerprint"] == "fleet/m0.json"


def test_the_tables_are_targets_that_a_manifest_takes(tmp_path):
    """Pasted into a manifest and read by the compiler, they serve the machines they were said to."""
    same = dataclasses.replace
    odd = same(HOST, cpu_features=tuple(f for f in LEVELS["v2"] if f != "popcnt"))
    flags = ("--xla_cpu_enable_fast_math=true",)
    machines = [
        *(HOST, same(HOST, xla_flags=flags), odd, gpu(), gpu("cuda-h100")),
        gpu("cuda-h100", xla_flags=('--xla_gpu_x="a\\b"',)),
        *(tpu(), tpu(plugin="libtpu 0.0.51"), tpu("tpu-v6e", jaxlib="0.11.2")),
        same(HOST, architecture="aarch64", cpu_features=()),
        same(gpu("cuda-h200"), architecture="aarch64"),
        same(HOST, jaxlib="0.11.2", cpu_features=LEVELS["v4"]),
    ]
    names = [f'a "b" {i}/[{i}]' if i % 2 else f"cuda-l4/{i}" for i in range(len(machines))]
    directory, by_name = tmp_path / "fleet", dict(zip(names, machines, strict=True))
    save(directory, *(Machine(name, "", machine) for name, machine in by_name.items()))
    report = explain_fleet([needs("tpu-v6e")], read_fleet(directory).machines)
    assert not report.beyond_help
    assert len(report.additions) == 11, "what serves the odd machine serves HOST too"
    (tmp_path / "score.py").write_text("def score(x): return x\n")
    keys = 'function = "score:score"; args = { x = "float32[1]" }'
    manifest = functions_manifest(tmp_path / "m.toml", {"score": keys}, ())
    with manifest.open("a") as file:
        file.writelines(f"\n\n{each.toml()}" for each in report.additions)
    targets = read_manifest(manifest).targets
    for addition, target in zip(report.additions, targets, strict=True):
        assert target.jax == addition.requirement.jaxlib
        plugin = {"cuda": f"jax-cuda13-pjrt {target.jax}"}.get(target.platform)
        if target.platform == "tpu":
            plugin = target.constraints[0].replace("==", " ")
        cuda = "13.0" if target.platform == "cuda" else None
        flags = effective_xla_flags(" ".join(target.xla_flags))
        found = target.requirement(target.jax or "", plugin=plugin, cuda=cuda, xla_flags=flags)
        for name in addition.machines:
            assert compare(target.name, found, by_name[name]).matches, addition.toml()


@settings(max_examples=30, deadline=None)
@given(machines=st.lists(MACHINES, min_size=1, max_size=5))
def test_it_is_what_a_loader_would_choose(machines, fleet_bundle):
    with Layout(fleet_bundle) as layout:
        root = read_root(layout)
        needs = []
        for each in root.bundle.manifests:
            found = each.annotations or {}
            needed = from_json(Requirement, found[REQUIREMENT].encode(), "")
            needs.append((found[REF_NAME], needed))
        for machine, verdict in explain_fleet(needs, named(*machines)).verdicts:
            ranked = match(root, machine.fingerprint)
            chosen = next((t for t in ranked if t.verdict.matches), None)
            assert verdict == (chosen or closest_target(ranked)).verdict


@pytest.fixture(scope="session")
def fleet_bundle(recipe, tmp_path_factory):
    """A bundle of two targets, of a GPU and of a CPU; and of programs that nobody runs here."""
    requirements = {
        "cpu-host": needs("cuda-h100", device_memory_bytes=1 << 30)[1],
        "cpu-x86-64-v3": needs("cpu-x86-64-v3")[1],
    }

    def change(config):
        return dataclasses.replace(config, requirement=requirements[config.target])

    return recipe.configured(change).write(tmp_path_factory.mktemp("fleet") / "bundle")


def test_machines_are_named_by_their_files_and_no_fleet_is_an_error(tmp_path):
    save(tmp_path, Machine("b/c", "", HOST), Machine("a", "", gpu()))
    (tmp_path / "notes.txt").write_text("no fingerprint")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "b" / "gone.json").symlink_to("nowhere")
    fleet = read_fleet(tmp_path)
    found = [(each.name, each.fingerprint) for each in fleet.machines]
    assert found == [("a", gpu()), ("b/c", HOST)]
    for each, path in zip(fleet.unreadable, ("b/gone", "empty"), strict=True):
        assert each.path == f"{tmp_path}/{path}.json"
        assert each.why.startswith(f"{each.path}: ")
    assert "cannot read" in fleet.unreadable[0].why
    for name in ("empty", "bad"):
        (tmp_path / name).mkdir()
    for name in ("bad/a.json", "bad/b.json"):
        (tmp_path / name).write_text("[]")
    both = r"expected 2 fingerprints, found 2 that cannot.*bad/a\.json: .*bad/b\.json: "
    for path, kind, problem in (
        ("empty", UsageError, "empty: expected fingerprints"),
        ("none", StoreError, "none: cannot read a fleet"),
        ("bad/a.json", StoreError, r"a\.json: cannot read a fleet"),
        ("bad", StoreError, both),
    ):
        with pytest.raises(kind, match=f"(?s){problem}"):
            read_fleet(tmp_path / path)


def run(*argv):
    return __main__.main([str(argument) for argument in argv])


def test_the_table_says_who_loads_what_and_what_to_add(fleet_bundle, tmp_path, capsys, ran):
    machines = named(*[HOST] * 4, gpu("cuda-h200"), gpu("cuda-l4"), tpu("tpu-v5e-2x2"))
    small_fleet = save(tmp_path / "fleet", *machines)
    page = tmp_path / "p.html"
    assert run("fleet", fleet_bundle, small_fleet, "--page", page) == 0
    shown = alone(page.read_text(encoding="utf-8"))
    assert sum(tag == "tr" and "data-out" in found for tag, found in shown.found) == 2
    for part in ("m0", "m6", "cpu-x86-64-v3", "cuda-l4", "none: compiles", "needs 9.0, found 8.9"):
        assert part in shown.text
    said = capsys.readouterr().out
    for line in (
        *(r"4 +cpu-x86-64-v3 +m0, m1, m2 and 1 more", r"1 +cpu-host +m4"),
        r"1 +nothing: compiles +m5 +cpu-host +compute_capability: needs 9.0, found 8.9",
        "2 of 7 machines are none of the targets: every program would be compiled there",
        r"add 1 target \(the fewest there can be\); then no machine except those at the end falls",
        r"\[\[target\]\]\n# needs a build host with x86_64; .*0.12.0.1\nname = \"cuda-l4\"",
        r"1 +m6 +topology: needs 1x1, found 2x2",
    ):
        assert re.search(line, said), f"{line}\n{said}"
    save(tmp_path / "one", *named(HOST))
    said = ran("fleet", fleet_bundle, tmp_path / "one", "--on-mismatch", "error").out
    assert re.search(r"\ncpu-host +0\n", said), "a target that serves nobody is listed"
    assert "[[target]]" not in said
    bad, argv = small_fleet / "edited.json", ("fleet", fleet_bundle, small_fleet)
    bad.write_text("{")  # it is named after the report of all others
    captured = ran(*argv, "--page", page, status=6)
    assert "machines  loads" in captured.out
    assert f"found 1 that cannot be read:\n  {bad}: " in captured.err
    assert str(bad) in Elements(page.read_text(encoding="utf-8")).text
    said = json.loads(ran(*argv, "--json", "--on-mismatch", "error", status=6).out)
    assert (said["machines"], [file["path"] for file in said["unreadable"]]) == (7, [str(bad)])


def test_text_from_files_stays_text_on_the_page():
    machine = gpu("cuda-l4", device_kind=EVIL, xla_flags=(f"--{EVIL}".replace(" ", ""),))
    host = dataclasses.replace(HOST, cpu_model=EVIL, jaxlib="0.11.2")
    machines = (Machine(EVIL, EVIL, machine), Machine(f"{EVIL}2", EVIL, host))
    targets = [(EVIL, needs("cuda-h100")[1])]
    page = fleet_page(EVIL, EVIL, EVIL, explain_fleet(targets, machines))
    Elements(page).check_harmless(6, scripts=1)
    text = fleet_page("fleet", "sha256:0", "fleet", explain_fleet([needs("cpu-x86-64-v3")], []))
    assert "fleet on the fleet" not in Elements(text).text
    assert "<h1>Bundle <code>fleet</code>, machines of <code>fleet</code></h1>" in text
