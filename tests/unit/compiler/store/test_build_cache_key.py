"""Keys: each ingredient changes the key and nothing else does."""

import pytest

from prejit.compiler.store.build_cache_key import Key, nearest, why

OLD = Key("compile", "demo/decode", (("jaxlib", "0.10.2"), ("portable", f"sha256:{'a' * 64}")))


def test_the_digest_is_that_of_kind_and_ordered_ingredients_for_ever():
    digest = "sha256:29fe1dd2fd3ade03de6094095877e4e18870a78874db2a0b34e71cb13e13a633"
    assert OLD.digest == digest == Key("compile", "another name", OLD.ingredients).digest
    found = (
        OLD,
        Key("lower", OLD.name, OLD.ingredients),
        Key("compile", OLD.name, OLD.ingredients[::-1]),
        Key("compile", "a", (("a", "b"), ("c", "d"))),
        Key("compile", "a", (("a", 'b"],["c'), ("", "d"))),
        Key("compile", "a", (("ab", ""), ("c", "d"))),
    )
    assert len({each.digest for each in found}) == len(found)
    with pytest.raises(ValueError, match="expected each ingredient once, found a again"):
        Key("compile", "a", (("a", "1"), ("b", "2"), ("a", "3")))


def test_why_tells_each_ingredient_that_differs_from_the_nearest_of_the_last_keys():
    new = Key("compile", OLD.name, (("jaxlib", "0.12.0.1"), ("xla_flags", ""), ("portable", "x")))
    assert why(OLD, new) == (
        f"jaxlib: 0.10.2 -> 0.12.0.1; xla_flags: absent -> ''; portable: sha256:{'a' * 12} -> x"
    )
    assert why(new, OLD).endswith("xla_flags: '' -> absent")
    assert why(None, OLD) == "first build of this program"
    assert why(OLD, OLD) == "its last result is gone from the cache, or was damaged"
    new, far, near = (
        Key("compile", "p", (("jaxlib", jaxlib), ("stablehlo", program), ("xla_flags", "")))
        for jaxlib, program in (("2", "x"), ("1", "y"), ("1", "x"))
    )
    assert nearest((far, near), new) == near
    assert why(near, new) == "jaxlib: 1 -> 2"
    assert nearest((), new) is None
