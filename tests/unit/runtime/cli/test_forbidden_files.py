"""A file that this user may not open is an error of the kind that a missing one is, and no wrong usage."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

GOLDEN = Path(__file__).parents[3] / "format" / "v1" / "chunks"
AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
"""Without these capabilities, permissions count for root too."""


CASES = {
    "verify BUNDLE --trust FILE": (5, "error[policy]: FILE: cannot read: Permission denied"),
    "generate BUNDLE --prompt-ids 1 --trust FILE": (5, "error[policy]: FILE: cannot read: "),
    "sign BUNDLE --key FILE": (6, "error[store]: FILE: cannot read a key: Permission denied"),
    "serve BUNDLE --keys FILE": (6, "error[store]: FILE: cannot read the keys: Permission"),
    "serve BUNDLE --log FILE": (6, "error[store]: FILE: cannot write the log: Permission"),
}
RUN_ALL = """
import contextlib, io, json, sys
from prejit.runtime.__main__ import main

found = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        found.append((main(command.split()), errors.getvalue()))
print(json.dumps(found))
"""


@pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None,
    reason="root may open every file, and needs setpriv to lose that",
)
def test_a_forbidden_file_is_no_wrong_usage(tmp_path: Path) -> None:
    bundle = shutil.copytree(GOLDEN, tmp_path / "bundle")
    file = tmp_path / "file"
    file.write_text("x")
    file.chmod(0)
    commands = [each.replace("BUNDLE", str(bundle)).replace("FILE", str(file)) for each in CASES]
    python = [*(AS_OTHERS if os.geteuid() == 0 else []), sys.executable, "-c", RUN_ALL]
    done = subprocess.run(
        [*python, json.dumps(commands)], capture_output=True, text=True, check=True
    )
    for (status, error), found in zip(CASES.values(), json.loads(done.stdout), strict=True):
        assert found[0] == status, found
        assert error.replace("FILE", str(file)) in found[1]
        assert "hint: " in found[1]
