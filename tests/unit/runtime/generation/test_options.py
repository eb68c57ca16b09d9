"""Each option of a generation is defined once: what spells it again must agree with the definition."""

from dataclasses import fields

import click
import pytest

from prejit.runtime import Defaults, Options, Request, Sampling
from prejit.runtime.cli.commands import commands
from prejit.runtime.cli.generate_command import generate
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decode import CALL_SECONDS, steps_per_call
from prejit.runtime.generation.options import OPTIONS, resolve


def test_options_are_typed_published_flags_and_checked():
    assert Options.__annotations__.keys() == OPTIONS.keys()
    defined = {
        field.name: str(field.type) for kind in (Sampling, Request) for field in fields(kind)
    }
    for name in OPTIONS.keys() - {"stop"}:  # text, which no request has
        assert defined[name].startswith(Options.__annotations__[name].__forward_arg__), name
    names = {field.name for field in fields(Defaults)} - {"do_sample"}
    assert names == {option.name for option in OPTIONS.values() if option.published}
    given = ["bundle", "--prompt-ids", "1"]
    top = click.Context(commands, **commands.context_settings)
    plain = generate.make_context("generate", [*given], top).params
    for option in OPTIONS.values():
        flag = f"--{option.name.replace('_', '-')}"
        if option.flag is None:
            assert option.name not in plain
            continue
        value = [] if option.flag is bool else ["1"]
        found = generate.make_context("generate", [*given, flag, *value], top).params[option.name]
        assert found == {bool: True, list: ("1",), int: 1, float: 1.0, str: "1"}[option.flag], flag
        if option.flag is not str:  # the command line opens it first
            resolve({option.name: found})
    for name, option in OPTIONS.items():
        assert option.check(name, option.default) == option.default
        with pytest.raises(UsageError, match=name):
            option.check(name, object())


@pytest.mark.parametrize(
    ("step_seconds", "most", "steps"),
    [
        (CALL_SECONDS / 4.5, 16, 4),
        (CALL_SECONDS / 100, 16, 16),
        (CALL_SECONDS * 3, 16, 1),
        (0.0, 16, 16),
        (CALL_SECONDS, 1, 1),
    ],
)
def test_a_call_takes_the_steps_that_fit(step_seconds, most, steps):
    assert steps_per_call(step_seconds, most) == steps
