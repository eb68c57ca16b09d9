"""Two bundles of one name, and a state that goes back, would serve the wrong model or one too early."""

from types import SimpleNamespace

import pytest
from tests.unit.server.running import served

from prejit.runtime.errors import UsageError
from prejit.server.served.served import ModelNotFoundError, Models


def bundle(name):
    return SimpleNamespace(name=name)


def test_a_name_is_that_of_one_bundle_and_others_are_refused():
    models = Models(served(bundle("one")), served(bundle("two")))
    assert models.get("two").bundle.name == "two"
    with pytest.raises(ModelNotFoundError, match=r"'one', 'two'.*found 'three'"):
        models.get("three")
    with pytest.raises(UsageError, match="two bundles named 'one'"):
        models.add(served(bundle("one")))
    models.add(served(bundle("one"), "other"))
    assert [each.name for each in models] == ["one", "two", "other"]
    models.close()


def test_a_drain_while_it_loads_can_be_undone_and_a_server_that_ends_stays_so():
    models = Models()
    assert models.drain()
    assert not models.change("loading", "ready")
    assert models.undrain()
    assert models.state == "ready"
    models = Models()
    assert models.state == "loading"
    assert models.drain(ends=True)
    assert not models.change("loading", "ready")
    assert models.state == "draining"
    assert not models.undrain()
    assert models.state == "draining"


def test_drain_reaches_every_engine_and_undrain_too():
    models = Models(served(bundle("one")), served(bundle("two")))
    engines = [each.engine for each in models]
    assert models.drain()
    assert [each.drained for each in engines] == [True, True]
    assert models.undrain()
    assert [each.drained for each in engines] == [False, False]
    models.close()
