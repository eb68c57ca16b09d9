"""What a build and its processes say to each other arrives as it was sent."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from prejit.compiler.pipeline.lower.lowerer_process import (
    Checked,
    Done,
    Project,
    Work,
    error_of,
    plain_error,
)
from prejit.compiler.pipeline.plan import Lowered, OwnFacts
from prejit.compiler.store.build_cache_key import Key
from prejit.runtime.base.typed_json import from_plain
from prejit.runtime.errors import (
    BuildError,
    CheckpointError,
    ManifestError,
    PrejitError,
    RejectError,
    StoreError,
    UsageError,
)
from prejit.runtime.format.bundle_schema import Segment

LOWERED = Lowered(
    Segment(0, 3, "sha256:a", 4, "sha256:b"),
    ("cpu", "cuda"),
    "1.2.3",
    ("w",),
    ("float32[2]",),
    ("float32[2]",),
    weight_sets={"layer": ("w", "v")},
    symbolic=Segment(0, 3, "sha256:c", 4, "sha256:d"),
)


KEY = Key("trace", "m/f", (("function", "code:f"), ("bucket", "{}")))


@pytest.mark.parametrize(
    "message",
    [
        Project("m.toml", "sha256:a", ("cpu-host",), "/model", None, True, "/s", "ns", ("", "/x")),
        Checked(None, None),
        Checked(512, OwnFacts(512, {"w": "float32[2]"}, {"w": (1, 0)})),
        Work({"f/n1": None, "f/n2": LOWERED}, chosen=True),
        Done({"f/n1": LOWERED}, {"w": "float32[2]"}, (KEY,)),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert from_plain(type(message), json.loads(json.dumps(asdict(message)))) == message


@pytest.mark.parametrize(
    "error",
    [
        BuildError("m.toml: no", hint="do that"),
        CheckpointError("m.toml: no"),
        ManifestError("m.toml: no", hint="do that"),
        RejectError("/a/file", "damaged: byte 3"),
        StoreError("/a/file: cannot read it"),
        UsageError("no"),
    ],
)
def test_an_error_of_the_user_reads_as_if_the_build_had_raised_it(error: PrejitError) -> None:
    found = error_of(json.loads(json.dumps(plain_error(error))))
    assert type(found) is type(error)
    assert found.describe() == error.describe()
    assert found.exit_code == error.exit_code
