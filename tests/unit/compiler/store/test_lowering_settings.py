"""The settings of jax in keys: all that may decide what a function lowers to, and no others."""

import json
import os
import subprocess
import sys
from enum import Enum
from types import SimpleNamespace

import jax
import pytest

from prejit.compiler.store.lowering_settings import COUNTED, HARMLESS, jax_configuration
from prejit.runtime.errors import UsageError

BEFORE_AND_AFTER = """
import json, os
from prejit.compiler.store.lowering_settings import jax_configuration
before = jax_configuration(os.environ)
import jax
print(json.dumps([before, jax_configuration(os.environ)]))
"""
UNREAD = ("jax_sort_devices_by_process_index", "jax_use_hlo_logistic_lowering")
"""Settings that jax takes from no environment variable."""


def before_and_after(settings):
    """The configuration of a process with environment variables, before and after it imports jax."""
    plain = {name: value for name, value in os.environ.items() if name.lower() not in COUNTED}
    command, env = [sys.executable, "-c", BEFORE_AND_AFTER], {**plain, **settings}
    return json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)


def other(name, value):
    """A value of a setting that is not its default, as the text of a variable."""
    kind, _, options = jax.config.meta[name]
    if "enum_values" in options or "enum_class" in options:
        values = options.get("enum_values") or [each.name.lower() for each in options["enum_class"]]
        now = value.name.lower() if isinstance(value, Enum) else value
        return next(each for each in values if each != now)
    if kind is bool:
        return "off" if value else "on"
    return "3" if kind in (int, float) else "other"


def test_every_setting_of_jax_that_is_not_known_to_be_harmless_is_in_the_configuration():
    """A setting that a new jax adds must be listed as counted or harmless."""
    known = COUNTED.keys() | HARMLESS
    assert set(jax.config.values) - known == set()
    assert COUNTED.keys() & HARMLESS == set()
    values = {name: value for name, value in jax.config.values.items() if name in COUNTED}
    settings = {name: other(name, values[name]) for name in values.keys() - set(UNREAD)}
    levels = ("jax_optimization_level", "jax_memory_fitting_level")
    settings |= dict.fromkeys(levels, "O1")  # their values are not in the registry
    settings["jax_export_calling_convention_version"] = "9"
    variables = {name.upper(): value for name, value in settings.items()}
    spelled = "JAX_EXPORT_IGNORE_FORWARD_COMPATIBILIY"
    variables[spelled] = variables.pop("JAX_EXPORT_IGNORE_FORWARD_COMPATIBILITY")
    before, after = before_and_after(variables)
    assert before.split() == after.split()
    assert {each.partition("=")[0] for each in after.split()} == settings.keys()


def test_other_settings_count_and_defaults_do_not(monkeypatch):
    assert before_and_after({}) == ["", ""]
    values = {**dict.fromkeys(("jax_platforms", "jax_log_compiles"), "x"), "jax_scan4": False}
    module = SimpleNamespace(config=SimpleNamespace(values=values))
    monkeypatch.setitem(sys.modules, "jax", module)
    assert jax_configuration({}) == "jax_scan4=False"
    monkeypatch.delitem(sys.modules, "jax")
    assert jax_configuration({"JAX_SCAN4": "1"}) == "jax_scan4=1"
    assert jax_configuration({"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "/x"}) == ""
    assert jax_configuration({"JAX_ENABLE_X64": "true"}) == "jax_enable_x64=True"
    with pytest.raises(UsageError, match=r"JAX_ENABLE_X64: expected true or false.*found 'maybe'"):
        jax_configuration({"JAX_ENABLE_X64": "maybe"})
