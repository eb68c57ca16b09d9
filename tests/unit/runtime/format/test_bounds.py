"""Bundles that somebody made to hang a reader, to fill its memory or to end in anything but a RejectError.

Whatever they say, all of their digests are right.
"""

import contextlib
import dataclasses
import itertools
import struct
import time
from collections import Counter

import pytest
from tests.campaigns.fuzz import Fuzzer
from tests.extent import examples

from prejit.runtime import __main__
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.checks import layers
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.checks.program_table import (
    _check_decoder,
    check_config,
    check_weight_sets,
)
from prejit.runtime.format.checks.seldom_parts import _check_encoder
from prejit.runtime.machine.fingerprint import Requirement

from .forging import PATH, golden_config, in_little_memory

SECONDS = 5.0


def names(count):
    letters = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return map("".join, itertools.islice(itertools.product(letters, repeat=4), count))


def read_config(versions, weight_sets):
    needs = '{"architecture":"x","cpu_features":[],"jaxlib":"1","platform":"cpu"}'
    head = f'{{"bundle":"x","format":1,"programs":[],"requirement":{needs},"target":"x"'
    text = f'{head},"versions":{versions},"weight_sets":{weight_sets}}}'
    assert len(text) <= limits.MAX_CONFIG_BYTES
    from_json(Config, text.encode(), PATH)


def read_weights(text):
    content = text.encode()
    layers.check_weights(memoryview(len(content).to_bytes(8, "little") + content), PATH)


def test_nothing_takes_much_more_memory_than_its_bytes():
    """Bytes that take as much as they can as Python values."""
    tensor = '"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    for read in (
        lambda: read_config("{}", f"[{','.join(['[]'] * (limits.MAX_CONFIG_BYTES // 3 - 100))}]"),
        lambda: read_config("{}", '{"a":["' + '","'.join([*names(10**6)] * 2) + '"]}'),
        lambda: read_config("{}", '{"' + '":[],"'.join(names(500000)) + '":[]}'),
        lambda: read_weights("{" + ",".join(tensor % name for name in names(100000)) + "}"),
        lambda: read_weights('{"a":' + "[" * (15 << 20)),
    ):
        with in_little_memory(256 << 20), contextlib.suppress(RejectError):
            read()


def elf(*sections, data=b"", start=64):
    """A 64-bit ELF file with these section headers (kind, offset, size, link) and data behind them."""
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", start)
    header = header.ljust(58, b"\0") + struct.pack("<HH", 64, len(sections)) + bytes(2)
    table = b"".join(struct.pack("<4xI16xQQI20x", *section) for section in sections)
    return header + table + data


MANY = b"".join(struct.pack("<IBBHQQ", 0, 16, 0, 1, 0, 0) for _ in range(1000))
STRINGS = 64 + 2 * 64
LIBRARIES = {
    "symbols with one endless name": elf(
        (3, STRINGS + len(MANY), 1 << 20, 0),
        (11, STRINGS, len(MANY), 0),
        data=MANY + b"a" * (1 << 20),
    ),
    "tables again and again": elf(
        *[(3, 64 + 65 * 64, 1 << 19, 0)] * 64, (11, 64 + 65 * 64, 24, 0), data=bytes(1 << 19)
    ),
    "headers behind the end": elf((11, 0, 1, 0), start=2**64 - 1),
    "versions that cross each other": elf(
        (3, 0, 1 << 16, 0),
        (0x6FFFFFFE, STRINGS, 1 << 17, 0),
        data=b"".join(struct.pack("<8xII", 1, 1) for _ in range(1 << 12)).ljust(1 << 17, b"\1"),
    ),
    "a name behind all": elf((3, 0, 8, 0), (6, STRINGS, 16, 0), data=struct.pack("<QQ", 1, 2**63)),
}


@contextlib.contextmanager
def in_no_time():
    started = time.thread_time()
    yield
    assert time.thread_time() - started < SECONDS


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_read_in_no_time_or_not(name):
    with in_no_time(), contextlib.suppress(ValueError):
        read_shared_library(LIBRARIES[name])


@pytest.mark.parametrize("axis", ["jaxlib", "cuda", "driver"])
def test_a_version_is_refused_in_no_time(axis):
    for text in ("1" + ".1" * 9999 + "!", "1." * 9999 + "!", "1" * 40000 + "!", "1" + ".a+" * 9999):
        plain = {"architecture": "x86_64", "cpu_features": [], "platform": "cpu", "jaxlib": "1"}
        with in_no_time(), pytest.raises(RejectError, match=f"{axis}: expected the form"):
            from_json(Requirement, to_json({**plain, axis: text}), PATH)


def test_forged_grids_and_repeated_layers_are_refused_in_no_time():
    """10,000 batches and 10,000 contexts, a program each: of their grid nothing may be made."""
    config = golden_config("decoder")
    decode = next(program for program in config.programs if program.kind == "decode")

    def resized(batch, context):
        texts = {
            which: tuple(text.replace("[1,", f"[{batch},") for text in getattr(decode, which))
            for which in ("arguments", "results")
        }
        bucket = {"batch": batch, "context": context}
        return dataclasses.replace(decode, name=f"{batch}-{context}", bucket=bucket, **texts)

    sizes = [size for n in range(1, 10_001) for size in ((n, 1), (1, n + 1))]
    programs = tuple(resized(*size) for size in sizes)
    forged = to_json(dataclasses.replace(config, programs=programs[:2000]))
    with in_no_time(), pytest.raises(ValueError, match="expected one"):
        _check_decoder(dataclasses.replace(config, programs=programs))
    with in_no_time(), pytest.raises(RejectError):
        check_config(forged, config.target, config.requirement, PATH)
    config = golden_config("encoder")
    encoder = dataclasses.replace(config.encoder, layers=config.encoder.layers[:1] * 200_000)
    sets = {**config.weight_sets, encoder.layers[0]: tuple(f"t{place}" for place in range(2000))}
    config = dataclasses.replace(config, encoder=encoder, weight_sets=sets, weight_shardings=None)
    shapes = {tensor: (1,) for names in sets.values() for tensor in names}
    with in_no_time():
        _check_encoder(config, encoder)
        check_weight_sets(config, shapes, PATH)


def test_verify_unpacks_each_frame_once(bundle_dir, monkeypatch):
    """Not once for every target and program: a small bundle could name one frame a million times."""
    unpacked, unpack = [], layers.unpack

    def counting(frame, segment, path):
        unpacked.append((path, segment.offset))
        return unpack(frame, segment, path)

    monkeypatch.setattr(layers, "unpack", counting)
    assert __main__.main(["verify", str(bundle_dir)]) == 0
    assert len(unpacked) == len(set(unpacked)) == 3 * 4, "two targets with executables of their own"


def test_verify_and_load_reject_the_same_hostile_bundles():
    """A sample of `make fuzz`."""
    outcomes, problems, count = Counter[str](), [], examples(90, 150)
    with Fuzzer() as fuzzer:
        for number in range(count):
            tried = fuzzer.attempt(number)
            outcomes[tried.outcome] += 1
            if tried.problem:
                problems.append(tried)
    assert not problems, f"repeat it: python -m tests.campaigns.fuzz {problems[0].number}"
    assert outcomes["rejected"] > count / 2
    assert outcomes["accepted"] > 5
