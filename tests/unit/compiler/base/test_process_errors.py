"""What a build and its processes say to each other arrives as it was sent."""

import json

from prejit.compiler.base.process_errors import error_of, plain_error
from prejit.runtime import errors


def test_an_error_of_the_user_reads_as_if_the_build_had_raised_it():
    for error in (
        errors.BuildError("m.toml: no", hint="do that"),
        errors.ManifestError("m.toml: no", hint="do that"),
        errors.CheckpointError("m.toml: no"),
        errors.StoreError("/a/file: cannot read it"),
        errors.UsageError("no"),
        errors.RejectError("/a/file", "damaged: byte 3"),
    ):
        found = error_of(json.loads(json.dumps(plain_error(error))))
        assert type(found) is type(error)
        assert found.describe() == error.describe()
        assert found.exit_code == error.exit_code
