"""Bundles that somebody made to hang a reader, to fill its memory or to end in anything but a RejectError.

Whatever they say, all of their digests are right.
"""

import contextlib
import dataclasses
import itertools
import struct
import time

import pytest

from prejit.runtime import __main__
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format import limits
from prejit.runtime.format.checks import layers
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.checks.program_table import (
    _check_decoder,
    check_config,
    check_weight_sets,
)
from prejit.runtime.format.checks.seldom_parts import _check_encoder
from prejit.runtime.machine.fingerprint import Requirement

from .forging import golden_config

PATH = "somewhere/blob"
SECONDS = 5.0
MEGABYTES = 256


def names(count):
    letters = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return map("".join, itertools.islice(itertools.product(letters, repeat=4), count))


NEEDS = '{"architecture":"x","cpu_features":[],"jaxlib":"1","platform":"cpu"}'
MAX = limits.MAX_CONFIG_BYTES - 300


def config_of(versions, weight_sets):
    head = f'{{"bundle":"x","format":1,"programs":[],"requirement":{NEEDS},"target":"x"'
    return f'{head},"versions":{versions},"weight_sets":{weight_sets}}}'.encode()


def header_of(text):
    content = text.encode()
    return len(content).to_bytes(8, "little") + content


TENSOR = '"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
LARGE = {
    # What the reader was told to expect, and bytes that take as much as they can as Python values.
    "lists": ("Config", lambda: config_of("{}", f"[{','.join(['[]'] * (MAX // 3))}]")),
    "texts": (
        "Config",
        lambda: config_of("{}", '{"a":["' + '","'.join([*names(10**6)] * 2) + '"]}'),
    ),
    "sets": ("Config", lambda: config_of("{}", '{"' + '":[],"'.join(names(500000)) + '":[]}')),
    "tensors": (
        "weights",
        lambda: header_of("{" + ",".join(TENSOR % n for n in names(100000)) + "}"),
    ),
    "nesting": ("weights", lambda: header_of('{"a":' + "[" * (15 << 20))),
}
READ = """
import os, sys
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.format import bundle_schema as schema, names
from prejit.runtime.format.checks.oci import check_manifest
from prejit.runtime.format.checks.layers import check_weights
from prejit.runtime.errors import RejectError

def read(kind, path):
    content = open(path, "rb").read()
    if kind == "weights":
        check_weights(memoryview(content), path)
    else:
        from_json(getattr(schema, kind), content, path)

for kind, path in zip(*[iter(sys.argv[1:])] * 2):
    sys.stdout.flush()
    if os.fork() == 0:  # a process of its own, whose peak is its own
        try:
            read(kind, path)
            print("read", end=" ")
        except RejectError:
            print("rejected", end=" ")
        [peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
        print(int(peak) >> 10, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_nothing_refused_takes_more_memory_than_this(tmp_path, run_python):
    arguments = []
    for name, (kind, make) in LARGE.items():
        (tmp_path / name).write_bytes(make())
        arguments += [kind, tmp_path / name]
    found = run_python(READ, *arguments, timeout=300).stdout.splitlines()
    for name, line in zip(LARGE, found, strict=True):
        said, megabytes = line.split()
        assert said in ("read", "rejected")
        assert int(megabytes) < MEGABYTES, name


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


def in_no_time(read):
    started = time.thread_time()
    with contextlib.suppress(ValueError, RejectError):
        read()
    assert time.thread_time() - started < SECONDS


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_is_read_in_no_time_or_not(name):
    in_no_time(lambda: read_shared_library(LIBRARIES[name]))


VERSIONS = ["1" + ".1" * 20000 + "!", "1." * 20000 + "!", "1" * 40000 + "!", "1" + ".a+" * 9000]


@pytest.mark.parametrize("text", VERSIONS)
def test_a_version_is_read_in_no_time(text):
    for axis in ("jaxlib", "cuda", "driver"):
        plain = {"architecture": "x86_64", "cpu_features": [], "platform": "cpu", "jaxlib": "1"}
        needs = to_json({**plain, axis: text})
        in_no_time(lambda needs=needs: from_json(Requirement, needs, PATH))
        with pytest.raises(RejectError, match=f"{axis}: expected the form"):
            from_json(Requirement, needs, PATH)


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
    started = time.thread_time()
    with pytest.raises(ValueError, match="expected one"):
        _check_decoder(dataclasses.replace(config, programs=programs))
    with pytest.raises(RejectError):
        check_config(forged, config.target, config.requirement, PATH)
    assert time.thread_time() - started < SECONDS
    config = golden_config("encoder")
    encoder = dataclasses.replace(config.encoder, layers=config.encoder.layers[:1] * 200_000)
    sets = {**config.weight_sets, encoder.layers[0]: tuple(f"t{place}" for place in range(2000))}
    config = dataclasses.replace(config, encoder=encoder, weight_sets=sets, weight_shardings=None)
    shapes = {tensor: (1,) for names in sets.values() for tensor in names}
    started = time.thread_time()
    _check_encoder(config, encoder)
    check_weight_sets(config, shapes, PATH)
    assert time.thread_time() - started < SECONDS


def test_verify_unpacks_each_frame_once(bundle_dir, monkeypatch):
    """Not once for every target and program: a small bundle could name one frame a million times."""
    unpacked = []
    unpack = layers.unpack

    def counting(frame, segment, path):
        unpacked.append((path, segment.offset))
        return unpack(frame, segment, path)

    monkeypatch.setattr(layers, "unpack", counting)
    assert __main__.main(["verify", str(bundle_dir)]) == 0
    assert len(unpacked) == len(set(unpacked)) == 3 * 4, "two targets with executables of their own"
