"""Time `prejit store`, `--gc` and a start by digest in a machine's store of 1, 10 and 100 bundles.

    python -m benchmarks.studies.machine_stores artifacts/demo        about two minutes on two cores

The bundles are copies of the given one under other names: they share its layers and have indexes, manifests
and configs of their own. Sixteen processes then load one of them at once, from a registry in this process
which counts what it sends.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.fake_registry import fake_registry

from benchmarks.harness.fresh_processes import environment, progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.base.wording import size
from prejit.runtime.format.checks.oci import check_index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME
from prejit.runtime.format.root import encode_root, read_root
from prejit.runtime.ship.machine_store import BUNDLES, MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

COUNTS = (1, 10, 100)
PROCESSES = 16
START = """
import sys, time
from prejit.runtime import load
began = time.process_time()
with load(sys.argv[1]) as bundle:
    print(time.process_time() - began, bundle.start_report().hashed_bytes)
"""


def renamed(bundle: Path, name: str, out: Path) -> Path:
    """Write a bundle again under another name, with links to the layers, which stay the same."""
    blobs = out / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for file in (bundle / "blobs" / "sha256").iterdir():
        os.link(file, blobs / file.name)

    def changed(content: bytes, replaced: Mapping[str, bytes]) -> bytes:
        """Write a document with the new name and the new digests; return it."""

        def walk(plain: Any) -> Any:
            if isinstance(plain, list):
                return [walk(each) for each in plain]
            if not isinstance(plain, dict):
                return name if plain == old else plain
            found = {key: walk(value) for key, value in plain.items()}
            if now := replaced.get(plain.get("digest", "")):
                found |= {"digest": digest_of(now), "size": len(now)}
            return found

        now = to_json(walk(json.loads(content)))
        (blobs / digest_of(now)[7:]).write_bytes(now)
        return now

    with Layout(bundle) as layout:
        root = read_root(layout)
        old = root.bundle.annotations[BUNDLE_NAME]
        manifests = dict[str, bytes]()
        for at in root.bundle.manifests:
            manifest = layout.read_blob(at)
            config = json.loads(manifest)["config"]["digest"]
            configs = {config: changed((blobs / config[7:]).read_bytes(), {})}
            manifests[at.digest] = changed(manifest, configs)
        assert root.subject is not None
        index = changed(layout.read_blob(root.subject), manifests)
    (out / "oci-layout").write_bytes((bundle / "oci-layout").read_bytes())
    (out / "index.json").write_bytes(encode_root(check_index(index, str(out)), index, ()))
    return out


def median_ms(call: Callable[[], object], times: int = 5) -> float:
    """Return the CPU time of a call, in milliseconds."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return statistics.median(found) * 1e3


def start(reference: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Load a reference in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-c", START, reference]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def main() -> None:
    """Measure, and write the page."""
    parser = option_parser()
    parser.add_argument("bundle", type=Path)
    bundle = parser.parse_args().bundle
    use_two_cores()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        env = environment({BUNDLES: f"{name}/store", "PREJIT_RUNTIME_CACHE": f"{name}/cache"})
        os.environ.update({key: env[key] for key in (BUNDLES, "PREJIT_RUNTIME_CACHE")})
        store = MachineStore(directory / "store")
        digests: list[str] = []
        facts = begin(5)
        for count in COUNTS:
            while len(digests) < count:
                path = renamed(bundle, f"b{len(digests)}", directory / f"b{len(digests)}")
                digests.append(pull(parse_reference(str(path)), store, Wanted()).digest)
            progress(f"{count} bundles")
            listed = median_ms(store.bundles)
            collected = median_ms(lambda: store.collect(1 << 50, 1e10, dry_run=True))
            starts = []
            for _ in range(7):
                told = start(f"oci://nowhere.invalid/b@{digests[0]}", env).communicate()[0].split()
                assert told[1] == "0", "a start hashed something"
                starts.append(float(told[0]) * 1e3)
            starts = starts[1:]  # the first one fills the page cache
            shown = f"{statistics.median(starts):.0f} [{min(starts):.0f}..{max(starts):.0f}]"
            rows.append((f"{count}", f"{listed:.1f}", f"{collected:.1f}", shown))
        sizes = Table(
            "Stores",
            ("bundles", "`prejit store`", "`prejit store --gc`", "`load` by digest"),
            rows,
            "Milliseconds of CPU time: of the call in a process that runs, and of `load` in fresh processes.",
        )
        with fake_registry() as registry:
            at = parse_reference(f"oci://{registry.host}/b:v1")
            total = ship(parse_reference(str(directory / "b0")), at).moved_bytes
            env |= {BUNDLES: f"{name}/empty", "PREJIT_RUNTIME_CACHE": f"{name}/other"}
            registry.seen.clear()
            began = time.perf_counter()
            running = [start(str(at), env) for _ in range(PROCESSES)]
            assert all(each.wait() == 0 for each in running)
            seconds = time.perf_counter() - began
            got = [
                path for method, path, _ in registry.seen if method == "GET" and "/blobs/" in path
            ]
            sent = sum(len(registry.blobs["b", path.rpartition("/")[2]]) for path in got)
            again = len(got) - len(set(got))
        once = Table(
            f"{PROCESSES} processes that load one reference at once, from an empty store",
            ("bundle", "its blobs that were sent", "sent twice", "until the last has loaded, s"),
            [(size(total), f"{len(got)}, {size(sent)}", f"{again}", f"{seconds:.1f}")],
        )
    publish(facts, "machine-stores", "A machine's store of bundles", [sizes, once])


if __name__ == "__main__":
    main()
