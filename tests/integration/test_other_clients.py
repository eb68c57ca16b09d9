"""Other clients read what prejit pushed, and prejit reads what they pushed, through a real registry."""

import shutil
from pathlib import Path

import pytest
from oras.layout.layout import Layout, NewLayoutFromRegistry
from oras.provider import Registry
from tests.extent import one_in
from tests.processes import ran

from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

FLEET = Path(__file__).parents[1] / "format" / "v1" / "fleet"
TARGET = "cpu-x86-64-v3"


@pytest.fixture
def place(registry):
    """A repository of a registry, without `oci://`."""
    return registry.url.removeprefix("oci://")


def run(*words):
    program = str(words[0])
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    ran(*words)


def moved(source, target, *targets):
    return ship(parse_reference(str(source)), parse_reference(str(target)), targets).digest


def by_skopeo(place, work):
    tls = ("--src-tls-verify=false", "--dest-tls-verify=false")
    copy = ("skopeo", "--insecure-policy", "copy", "--all", *tls)
    run(*copy, f"docker://{place}:ours", f"oci:{work}/copy:fleet")
    run(*copy, f"oci:{work}/copy:fleet", f"docker://{place}:theirs")


def by_oras(place, work):
    run("oras", "copy", "--from-plain-http", f"{place}:ours", "--to-oci-layout", f"{work}/copy:x")
    run("oras", "copy", "--from-oci-layout", f"{work}/copy:x", "--to-plain-http", f"{place}:theirs")


def by_oras_of_python(place, work):
    provider = Registry(insecure=True, tls_verify=False)
    NewLayoutFromRegistry(f"{work}/copy", provider, f"{place}:ours", tag="fleet")
    Layout(f"{work}/copy").push_to_registry(
        provider=provider, target=f"{place}:theirs", tag="fleet"
    )


CLIENTS = {"skopeo": by_skopeo, "oras": by_oras, "oras of Python": by_oras_of_python}


@pytest.mark.parametrize("copy", one_in(3, CLIENTS.values()), ids=CLIENTS)
def test_what_a_client_copies_within_a_registry_is_the_same_bundle(copy, place, tmp_path):
    (tmp_path / "work").mkdir()
    moved(FLEET, f"oci://{place}:ours")
    copy(place, tmp_path / "work")
    expected = audit(FLEET, check_generation)
    assert moved(f"oci://{place}:theirs", tmp_path / "back") == expected.digest
    assert audit(tmp_path / "back", check_generation) == expected
    if (layout := tmp_path / "work" / "copy").exists():
        assert audit(layout, check_generation).target_count == expected.target_count


def test_a_layout_of_one_target_in_which_umoci_tags_and_collects(place, tmp_path):
    """umoci knows no index of several targets (it says that its tag is ambiguous)."""
    digest = moved(FLEET, f"oci://{place}:one", TARGET)
    layout = tmp_path / "layout"
    moved(f"oci://{place}:one", layout)
    run("umoci", "tag", "--image", f"{layout}:{TARGET}", "other")
    run("umoci", "gc", "--layout", layout)
    assert audit(layout, check_generation).digest == digest
    assert moved(layout, f"oci://{place}:two") == digest
