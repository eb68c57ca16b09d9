"""Source files as keys see them: every supported version of Python reads them alike."""

import hashlib

from prejit.compiler.store.prejit_code import definitions

SYNTAX = """
import os, re as regex
from prejit.runtime.base import digests
limit: int = 0x10
a, (b, *c) = x = 1e3, (None, ..., b"b")

@cache
async def f(one: str = "a" 'b', /, two=-1, *rest: int, key: T = os.sep, **more) -> list[T]:
    "Prose."
    global limit
    from prejit.runtime.base.files import Identity as Named
    if TYPE_CHECKING:
        import unused
    async with one as two, three: await regex.match(f"{one!r:>{two}} {{}} " f"{digests.of(x)=}")
    try: return {**more, 1: [y async for y in x if y], 2: lambda: (yield)}
    except* (A, B) as error: raise C("said", f"{two}") from error
    finally: del rest[1:2, ::3]
    match rest:
        case [1, *_] | {"k": None, **more} if (z := one): x.y[0] @= not z
        case Point(x=0) as p: pass
    while 0 < x <= 1: continue
    else: assert x, "why"

class K(Base, metaclass=Meta):
    field: T | None = None
"""


def test_all_versions_of_python_find_the_same_digests():
    found, imports = definitions(SYNTAX)
    digests = " ".join(each.digest for each in found).encode()
    assert hashlib.sha256(digests).hexdigest()[:12] == "d3efbd006456"
    names = [("os", "regex"), ("limit",), ("a", "b", "c", "x"), ("f",), ("K",)]
    assert [each.names for each in found] == names
    assert [each.local for each in imports] == ["digests"]
    assert [each.local for each in found[3].imports] == ["Named"]
    mentioned = {("os", "sep"), ("regex", "match"), ("digests", "of"), ("Point", "")}
    assert found[3].mentions >= mentioned
    others = {(name, "") for name in ("str", "list", "unused", "TYPE_CHECKING")}
    assert not found[3].mentions & others
    assert found[4].mentions == {("Base", ""), ("Meta", ""), ("field", ""), ("T", "")}
