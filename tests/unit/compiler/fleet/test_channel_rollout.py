"""A rollout that takes a target from a machine must not happen by accident, and each one can be undone."""

import json

import pytest
from tests.extent import cases
from tests.fake_registry import fake_registry
from tests.layouts import GOLDEN
from tests.unit.compiler.sharing.fixtures import S3_SETTINGS, s3_store

from prejit.compiler.fleet.channel_rollout import Rollout
from prejit.runtime import __main__
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.fleet_machines import Machine
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import open_repository, ship

OF_V2 = ("64bit", "cmov", "sse", "sse2", "sse4.1", "ssse3")
OLD = Fingerprint("cpu", "x86_64", OF_V2, "0.0.0", "", 2, 1 << 33)
ARM = Fingerprint("cpu", "aarch64", (), "0.0.0", "", 2, 1 << 33)
FLEET = (Machine("old-1", "", OLD), Machine("old-2", "", OLD), Machine("arm", "", ARM))


@pytest.fixture(params=cases(["registry"], others=["bucket"]))
def place(request, monkeypatch):
    """A repository with a bundle of six targets, and one of another bundle that serves no old CPU."""
    if request.param == "registry":
        yield request.getfixturevalue("registry")[0]
        return
    with s3_store() as endpoint:
        for name, value in (S3_SETTINGS | {"AWS_ENDPOINT": endpoint}).items():
            monkeypatch.setenv(name, value)
        yield filled("s3://bucket/demo")


@pytest.fixture
def registry():
    with fake_registry() as found:
        yield filled(f"oci://{found.host}/demo"), found


def filled(at):
    ship(parse_reference(str(GOLDEN / "fleet")), parse_reference(f"{at}:all"))
    ship(parse_reference(str(GOLDEN / "call")), parse_reference(f"{at}:other"))
    ship(parse_reference(f"{at}:all"), parse_reference(f"{at}:prod"))
    return at


def tags(at):
    return {each.tag: each.digest for each in open_repository(parse_reference(at)).tags()}


def test_a_channel_goes_forward_and_back_and_a_new_one_has_no_way_back(place):
    first, other = tags(place)["all"], tags(place)["other"]
    before = first
    for bundle, now in ((f"{place}:other", other), ("", first), ("", other)):
        found = Rollout(f"{place}:prod", bundle, ())
        plan = found.plan
        assert (plan.before, plan.after, plan.copied_bytes) == (before, now, 0)
        found.move()
        assert (tags(place)["prod"], tags(place)["prod-previous"]) == (now, before)
        before = now
    new = place.replace("/demo", "/fresh") + ":prod"
    with pytest.raises(StoreError, match="expected a bundle to go back to, found no tag"):
        Rollout(new, "", ())
    found = Rollout(new, str(GOLDEN / "fleet"), FLEET)
    assert (found.plan.before, found.plan.losing) == ("", ())
    assert found.plan.copied_bytes > 0
    found.move()
    assert tags(new) == {"prod": first}


def test_what_is_attached_to_a_bundle_goes_with_it(place, tmp_path):
    Rollout(f"{place}:prod", tags(place)["other"], ()).move()
    ship(parse_reference(f"{place}:prod"), parse_reference(str(tmp_path / "back")))
    found = audit(tmp_path / "back", check_generation)
    assert found == audit(GOLDEN / "call", check_generation)
    assert found.attached_count == 2


def test_of_two_rollouts_at_once_the_second_changes_nothing(place):
    slow = Rollout(f"{place}:prod", str(GOLDEN / "chunks"), ())
    Rollout(f"{place}:prod", f"{place}:other", ()).move()
    before = tags(place)
    with pytest.raises(StoreError, match="another rollout moved it while this one copied"):
        slow.move()
    assert tags(place) == before


def test_a_tag_that_another_takes_at_the_same_moment_is_noticed(registry):
    at, server = registry
    found = Rollout(f"{at}:prod", f"{at}:other", ())

    def taken(method, path):
        was_moved = server.count("PUT", "/manifests/prod")
        if was_moved and method == "GET" and path.endswith("/manifests/prod"):
            server.manifests["demo", "prod"] = server.manifests["demo", "all"]

    server.seen.clear()
    server.fault = taken
    with pytest.raises(StoreError, match="at the same moment"):
        found.move()


def test_who_is_served_by_a_channel_which_is_a_tag_elsewhere(place):
    for channel in (str(GOLDEN / "fleet"), f"{place}:prod@{tags(place)['prod']}"):
        with pytest.raises(UsageError, match="expected a tag of a registry or a bucket"):
            Rollout(channel, f"{place}:all", ())
    Rollout(f"{place}:{'x' * 119}", f"{place}:all", ())
    with pytest.raises(UsageError, match="at most 119 letters, found 120"):
        Rollout(f"{place}:{'x' * 120}", f"{place}:all", ())
    with pytest.raises(UsageError, match="64 digits of 0-9a-f after @sha256:, found '123'"):
        Rollout(f"{place}:prod", "sha256:123", ())
    plan = Rollout(f"{place}:prod", f"{place}:other", FLEET).plan
    assert plan.losing == ("old-1", "old-2")
    assert [(each.machines, each.was_served, each.is_served) for each in plan.changes] == [
        (("old-1", "old-2"), True, False),
        (("arm",), False, False),
    ]
    lost, never = plan.changes
    assert lost.before == "cpu-x86-64-v2"
    assert "jaxlib: needs" in lost.why
    assert "architecture" in never.why_before
    Rollout(f"{place}:prod", f"{place}:other", ()).move()
    assert not Rollout(f"{place}:prod", "", FLEET).plan.losing


def test_the_command(registry, tmp_path, capsys, ran):
    (at, _), saved = registry, tmp_path / "saved"
    saved.mkdir()
    for machine in FLEET:
        (saved / f"{machine.name}.json").write_bytes(to_json(machine.fingerprint))
    before = tags(at)
    other, first = before["other"], before["all"]

    def run(*words):
        return __main__.main(["rollout", f"{at}:prod", *map(str, words)])

    assert run(f"{at}:other", "--fleet", saved, "--json") == 1
    refused = json.loads(capsys.readouterr().out)
    assert (refused["is_moved"], refused["losing"]) == (False, ["old-1", "old-2"])
    assert run(f"{at}:other", "--fleet", saved) == 1
    said = "not moved: 2 machines load a target now and would compile"
    assert said in capsys.readouterr().out
    assert run(other, "--dry-run") == 0
    assert tags(at) == before
    assert run(other, "--fleet", saved, "--allow-compile") == 0
    (saved / "broken.json").write_text("{")
    for words, status in (((), 2), ((other, "--back"), 2), ((other, "--fleet", saved), 6)):
        assert run(*words) == status
        assert tags(at)["prod"] == other
    for word in ("--back", first):  # it leads there already
        assert run(word) == 0
        assert tags(at)["prod"] == first
    assert "--back` moves it back" in capsys.readouterr().out
    assert "--back" not in ran("rollout", f"{at}:fresh", first).out
