"""Grammars of strangers: none of them hangs, fills or ends the process that serves."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.extent import sampled

from prejit.runtime.errors import UsageError
from prejit.server.grammar import grammars as module
from prejit.server.grammar.grammar_sources import lark_source, regex_source, schema_source
from prejit.server.grammar.grammar_trial import _Process
from prejit.server.grammar.grammars import Grammars


@pytest.fixture(scope="module")
def grammars(bundle):
    found = Grammars(bundle, of_strangers=True)
    yield found
    found.stop_trial()


def chain(count):
    """Return a schema whose definitions each refer twice to the next one."""
    steps = {
        f"a{place}": {"properties": {side: {"$ref": f"#/$defs/a{place + 1}"} for side in "lr"}}
        for place in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**steps, f"a{count}": {"type": "integer"}}}


RULES = (
    "start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "a"\n' for i in range(9_000)) + 'r9000: "x"'
)
BOTH = "start: A\nA: " r"/(.*(\d)?\d){1,101}/ & /((.*\d|\p{L}){1,101}){100}/"
DIVISOR = {"type": "integer", "multipleOf": 99_999_999}
HOSTILE = {  # `make test` comes to each limit by one form of a source, `make test-all` by both
    "divisor": (schema_source(DIVISOR), "more than 2 seconds"),
    "references": (schema_source(chain(3_000)), "nested too deeply"),
    "rules": (lark_source(RULES), "nested too deeply"),
    "intersection": (lark_source(BOTH), "more than 2 seconds"),
}


@pytest.mark.parametrize("name", sampled(HOSTILE, lambda name: name in ("divisor", "rules")))
def test_a_hostile_grammar_is_refused_and_the_next_one_compiles(bundle, grammars, name):
    source, message = HOSTILE[name]
    with pytest.raises(UsageError, match=message) as error:
        grammars.mask(source)
    assert error.value.hint == "send a smaller or simpler one"
    mask = grammars.mask(regex_source(f"[ab]{{1,3}}|{name}"))
    assert mask.accepts(bundle.tokenizer.encode("ab"))
    assert mask.again().accepts(bundle.tokenizer.encode("ab"))  # a new mask begins at the beginning


def test_a_wrong_grammar_has_the_same_error_as_without_a_trial(bundle, grammars):
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
    for source in (schema_source(schema), regex_source("("), lark_source("start: foo")):
        errors = []
        for each in (grammars, Grammars(bundle)):
            with pytest.raises(UsageError) as error:
                each.mask(source)
            errors.append((str(error.value), error.value.hint))
        assert errors[0] == errors[1]


def test_a_compilation_that_nobody_waits_for_ends(grammars):
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(grammars.mask, HOSTILE["divisor"][0])
        while not compiling.done():  # the process may not have begun yet
            grammars.stop_trial()
            time.sleep(0.01)
    assert isinstance(compiling.exception(), UsageError)


def test_kept_grammars_are_counted_by_their_memory(bundle, monkeypatch):
    asked, ask = [], _Process.ask
    monkeypatch.setattr(_Process, "ask", lambda *given: asked.append(given[1]) or ask(*given))
    monkeypatch.setattr(module, "_KEPT_BYTES", 20 << 20)
    grammars = Grammars(bundle, of_strangers=True)
    # 23 MB by a source of 60 characters, so that only a measurement finds it
    large = schema_source({"type": "integer", "multipleOf": 50_021})
    small = [regex_source(letter) for letter in "abc"]
    for source in (*small, *small, large, large, *small):
        grammars.mask(source)
    grammars.stop_trial()
    assert asked == [*small, large, *small]


def test_masks_that_take_long_end_their_own_request(bundle, grammars):
    """Each reading of the text is another parse, so the masks take ever longer."""
    source = lark_source('start: e\ne: e e | e e e | "a" | "b" | ')
    mask = grammars.mask(source)
    letter = bundle.tokenizer.encode("a")[:1]
    started = time.thread_time()

    def follow():
        for count in range(2_000):
            mask(letter * count)

    with pytest.raises(UsageError, match="expected masks that take at most 1 ms a token"):
        follow()
    assert time.thread_time() - started < 10
    assert grammars.mask(source)([]).any()


IN_SANDBOX = """
import asyncio, ctypes, struct, sys
from prejit.runtime import load
from prejit.server.grammar.grammar_sources import regex_source
from prejit.server.served.served import GrammarCompiling

# A filter of seccomp(2): EPERM for setpriority, and all else allowed.
steps = ((0x20, 0, 0, 0), (0x15, 0, 1, 141), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
bundle = load(sys.argv[1])
mask = asyncio.run(GrammarCompiling().mask(bundle, regex_source("ab"), None, "client"))
print(mask.accepts(bundle.tokenizer.encode("ab")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's seccomp")
def test_grammars_compile_in_a_sandbox_that_forbids_other_priorities(run_python, lettered_dir):
    """As the unit in deploy/systemd did: every request with a grammar had status 500."""
    assert run_python(IN_SANDBOX, str(lettered_dir)).stdout == "True\n"
