"""Machines that share a store: what one compiled no other compiles, and all build the same."""

import json

from tests.decoders import write_random
from tests.manifests import write_manifest


def test_a_second_machine_compiles_nothing_and_builds_the_same(warm, tmp_path):
    model = write_random("gpt2", tmp_path / "model")
    manifest = write_manifest(tmp_path / "m.toml", model, prompt=(4,), context=(24,))
    store = tmp_path / "store"
    without_compiler = {"PATH": "/nonexistent"}  # kernels would take 15 s

    def options(machine):
        return ("--cache", tmp_path / machine / "cache", "--store", store, "--json")

    def built(machine):
        output = ("-o", tmp_path / machine / "artifacts")
        done = warm.prejit(
            "build", manifest, *output, *options(machine), env=without_compiler, quick=True
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)[0], done.stderr

    def planned(machine):
        done = warm.prejit("plan", manifest, *options(machine), env=without_compiler, quick=True)
        return {(each["state"], each["where"]) for each in json.loads(done.stdout)["programs"]}

    first, _ = built("first")
    assert first["compiled"] > 0
    assert planned("second") == {("cached", store.as_uri())}
    second, told = built("second")
    assert (second["compiled"], second["digest"]) == (0, first["digest"])
    assert "results read" in told
    assert planned("second") == {("cached", "local")}, "what it took is now on this machine"
