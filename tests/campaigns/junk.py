"""Damaged bytes, JSON and configuration, by a generator of random numbers; `mutated` is for Hypothesis."""

import json
import math
import re
from copy import deepcopy
from random import Random

HUGE = (
    *("9" * 5000, "1" + "0" * 400, "-1", "-0", "1e400", "1e5", "1.0", "0x10", "00", "NaN"),
    *("Infinity", "true", "null", "[]"),
    *(str(2**63), str(2**63 - 1), str(2**64), str(2**31), str(2**53 + 1)),
)
NUMBERS = (-2, -1, 0, 1, 3, 7, 100_000, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
FLOATS = (-1.0, 0.0, 1e-300, 0.5, 1.5, 1e300, math.inf, -math.inf, math.nan)
NASTY = (
    *(None, True, *NUMBERS, *FLOATS, "", " ", "0", "1e9", "1" * 5000, "x" * 9000, "é" * 40),
    *("\0", "\x1b[31m", "\u202e", "\ud800", "cpu", "float32", "silu", "/dev/zero", "../../x"),
    *([], {}, [[]], [0], [""], {"a": {"b": []}}, {"rope_type": "a", "factor": -1}, "[" * 900),
    *('["x"] foo[1]', '["x"] int8[' + "9" * 5000 + "]", '["a"] float32[-1]', "x86-64-v9"),
    *("sha256:" + "0" * 64, "1" + ".1" * 8000, "1." * 8000, "nested 90", "nested 2000"),
)
"""Values that replace any other. `nested N` is written as N lists in each other."""


def flipped(content, generator):
    """Return bytes with one to three bits flipped, half of the time in the first 200."""
    changed = bytearray(content)
    for _ in range(generator.randrange(1, 4)):
        if changed:
            size = min(200, len(changed)) if generator.random() < 0.5 else len(changed)
            changed[generator.randrange(size)] ^= 1 << generator.randrange(8)
    return bytes(changed)


def cut(content, generator):
    if generator.random() < 0.3:
        return content + generator.randbytes(generator.randrange(1, 100))
    return content[: generator.randrange(len(content) + 1)]


def zeroed(content, generator):
    start = generator.randrange(len(content) + 1)
    size = min(generator.randrange(1, 600), len(content) - start)
    middle = bytes(size) if generator.random() < 0.5 else generator.randbytes(size)
    return content[:start] + middle + content[start + size :]


def damaged(content, generator):
    return generator.choice([flipped, cut, zeroed])(content, generator)


def nasty(generator):
    value = deepcopy(generator.choice(NASTY))
    return [value, nasty(generator)] if generator.random() < 0.1 else value


def edited(plain, generator, more=()):
    """Return a JSON value with one to three of its parts changed, taken away, doubled or exchanged."""
    plain = deepcopy(plain)
    for _ in range(generator.randrange(1, 4)):
        if more and generator.random() < 0.3:
            plain[generator.choice(more)] = nasty(generator)
            continue
        holder = plain
        while isinstance(holder, dict | list) and holder:
            key = generator.choice(_keys(holder))
            if isinstance(holder[key], dict | list) and holder[key] and generator.random() < 0.85:
                holder = holder[key]
                continue
            _edit(holder, key, generator)
            break
    return plain


def _keys(holder):
    return list(holder) if isinstance(holder, dict) else [*range(len(holder))]


def _edit(holder, key, generator):
    value = holder[key]
    match generator.randrange(6):
        case 0:
            del holder[key]
        case 1:
            other = generator.choice(_keys(holder))
            holder[key], holder[other] = holder[other], value
        case 2 if isinstance(holder, list):
            holder += [deepcopy(value) for _ in range(generator.randrange(1, 4))]
        case 2:
            holder[generator.choice(["zzz", "", "digest", "mesh", "\ud800"])] = deepcopy(value)
        case 3 if type(value) is bool:
            holder[key] = not value
        case 3 if type(value) is int:
            holder[key] = generator.choice(
                [value - 1, value + 1, 2 * value, value // 2, value + 2**31, value - 2**40]
            )
        case 3 if type(value) is float:
            holder[key] = value * generator.choice([0.5, 2, -1])
        case 3 if isinstance(value, str):
            holder[key] = flipped(value.encode(errors="replace"), generator).decode("latin1")
        case _:
            holder[key] = nasty(generator)


def mutated(plain, more=()):
    """Return a strategy that draws what `edited` returns."""
    import hypothesis.strategies as st  # here: each process of a campaign imports this file

    return st.integers(0, 2**32 - 1).map(lambda seed: edited(plain, Random(seed), more))


def huge_numbers(generator):
    """Return what puts a huge or strange number in place of an integer of some JSON."""

    def change(content):
        places = list(re.finditer(rb"(?<=[:,\[])-?\d+(?=[,\]}])", content))
        if not places:
            return content
        at = generator.choice(places)
        return content[: at.start()] + generator.choice(HUGE).encode() + content[at.end() :]

    return change


def deep(generator):
    """Return what puts deep JSON in place of some JSON, or of one of its values."""
    depth = generator.choice([200, 990, 5000, 100_000])
    open_, close = generator.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = open_ * depth + (b"0" if close == b"}" else b"") + close * generator.choice([0, depth])

    def change(content):
        places = list(re.finditer(rb'(?<=":)("[^"\\]*"|\d+)(?=[,}])', content))
        if not places or generator.random() < 0.3:
            return inner
        at = generator.choice(places)
        return content[: at.start()] + inner + content[at.end() :]

    return change


def wide(generator):
    """Return what puts very many small values in place of some JSON."""
    piece = generator.choice([b"[]", b"{}", b'{"":0}', b"0", b'""', b'"\\u1234"', b"1.5", b"null"])
    size = generator.choice([64 << 10, 1 << 20, 4 << 20])

    def change(_):
        return b'{"manifests":[' + b",".join([piece] * (size // (len(piece) + 1))) + b"]}"

    return change


def encoded(plain):
    return _nested(json.dumps(plain, sort_keys=True, separators=(",", ":"))).encode()


def to_json(value):
    """Return JSON, NaN as Python writes it."""
    return _nested(json.dumps(value))


def to_toml(value):
    """Return a value as TOML; null, which TOML lacks, becomes text."""
    match value:
        case dict():
            named = (f"{json.dumps(name)} = {to_toml(each)}" for name, each in value.items())
            return f"{{{', '.join(named)}}}"
        case list():
            return f"[{', '.join(map(to_toml, value))}]"
        case float():
            return str(value)
        case None:
            return '"null"'
    return _nested(json.dumps(value))


def _nested(text):
    """Write lists in lists where `NASTY` names them: json.dumps does not go as deep."""
    return re.sub(r'"nested (\d+)"', lambda m: "[" * int(m[1]) + "0" + "]" * int(m[1]), text)
