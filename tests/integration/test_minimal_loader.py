"""The loader stays small: what of ours a fresh process imports from `load` to its first result."""

import json
import time

from prejit.runtime.machine.kept_files import SETTLED_SECONDS

MOST_MODULES, MOST_LINES = 60, 10_850
"""From `load` to the first token of a decoder. Lines are those of files, docstrings and comments included."""

MEASURE = """
import json, sys
import prejit.runtime

bundle = prejit.runtime.load(sys.argv[1], on_mismatch="error")
{use}
files = {{n: getattr(m, "__file__", None) for n, m in sys.modules.items() if n.startswith("prejit.")}}
print(json.dumps({{n: len(open(f).read().splitlines()) for n, f in files.items() if f}}))
"""
STREAM = 'next(iter(bundle.stream("def main(", max_new_tokens=4)))'
CALL = """
import numpy as np
bundle.call("score", x=np.ones((2, 16), np.float32))
"""


def imported(run_python, bundle, use, cache):
    """Return the lines of each module that a start imports, of a bundle that this machine has run before."""
    time.sleep(SETTLED_SECONDS)  # a file that was written just now gets no receipt
    for _ in range(3):  # receipts, golden answers and the names of the first programs are kept
        done = run_python(MEASURE.format(use=use), bundle, env={"PREJIT_RUNTIME_CACHE": str(cache)})
    return json.loads(done.stdout)


def test_from_load_to_the_first_token(demo, run_python, tmp_path):
    found = imported(run_python, demo, STREAM, tmp_path / "cache")
    print(f"from load to the first token: {len(found)} modules, {sum(found.values()):,} lines")
    assert len(found) <= MOST_MODULES, sorted(found)
    assert sum(found.values()) <= MOST_LINES, found


def test_a_bundle_without_a_decoder_imports_no_generation(settled_dir, run_python, tmp_path):
    found = imported(run_python, settled_dir, CALL, tmp_path / "cache")
    rooms = {name.split(".")[2] for name in found if name.count(".") > 1}
    assert "programs" in rooms
    assert rooms.isdisjoint({"generation", "encoding", "bundle_decodes", "bundle_encodes"})
