"""The table of rules is what the code does: each function is there, and they run in the table's order."""

import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.signers import key_table, signer, write_policy

from prejit.runtime import errors, load
from prejit.runtime.format import checks
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation

ORDER = tomllib.loads((Path(__file__).parents[4] / "runtime" / "check-order.toml").read_text())
RULES = (*ORDER["loading"], *ORDER["attached"])
X = np.ones((2, 16), np.float32)


def function_of(name):
    return inspect.unwrap(pkgutil.resolve_name(f"prejit.runtime.{name}"))


def test_the_functions_of_the_rules_are_those_that_have_their_numbers():
    listed = {(rule["number"], function_of(name)) for rule in RULES for name in rule["functions"]}
    numbered = set()
    inner = pkgutil.iter_modules(checks.__path__, f"{checks.__name__}.")
    for name in ("prejit.runtime.format.audit", *(found.name for found in inner)):
        for function in vars(importlib.import_module(name)).values():
            if inspect.isfunction(function) and function.__module__ == name:
                number = re.match(r"([0-9]+)\. ", function.__doc__ or "")
                if number is not None:
                    numbered.add((number[1], inspect.unwrap(function)))
    assert numbered
    assert numbered <= listed
    assert all(hasattr(errors, each["error"]) for each in RULES if "error" in each)
    for number, function in listed:  # elsewhere a number is not said, or is the same
        said = re.match(r"([0-9]+)\. ", function.__doc__ or "")
        assert said is None or said[1] == number, function


def order_of(run, rules):
    """The numbers of rules, as functions of theirs are first called while something runs."""
    rows = dict[Any, int]()
    for place, rule in enumerate(rules):
        rows |= {function_of(name).__code__: place for name in rule["functions"]}
    found = dict[int, None]()

    def watch(frame, event, _):
        if event == "call" and frame.f_code in rows:
            found.setdefault(rows[frame.f_code])

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert [*found] == sorted(found), f"found {' '.join(rules[place]['number'] for place in found)}"
    return [rules[place]["number"] for place in found]


@pytest.fixture
def signed(bundle_dir):
    pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
    from prejit.compiler.signing.bundle_signing import sign

    sign(bundle_dir, signer("a"))
    return bundle_dir


def test_a_load_and_an_audit_keep_the_order_of_the_rules(signed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rule = '[[rules]]\nnames = ["example"]\nkeys = ["a"]\n'
    policy = write_policy(tmp_path / "trust.toml", key_table("a"), rule)

    def use():
        with load(signed, trust=policy) as bundle:
            bundle.call("score", x=X)

    assert order_of(use, ORDER["loading"]) == [*"142356", "P1", "P2", "P3", *"78", "10", *"79"]
    found = order_of(lambda: audit(signed, check_generation), ORDER["attached"])
    assert found == ["14", "15", "16", "17"]
