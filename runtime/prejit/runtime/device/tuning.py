"""Tuning for a GPU: record what XLA measures on the device, for builds on machines without it.

XLA times the variants of a matrix product on the GPU that it compiles for (autotuning). Without the GPU it
guesses. `prejit tune` compiles a bundle's programs on the device and writes the measurements to a file,
with XLA's description of the device. A build reads that file. XLA uses a measurement only for exactly that
description (xla/service/gpu/autotuning/autotune_cache_key.cc).
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.base.written_files import write_file
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.blobs import Layer, check_blobs, read_whole
from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PORTABLE_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import Receipts
from prejit.runtime.trust.enforcing import enforce


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measurements of XLA on a device.

    Attributes:
        machine: the machine with the device.
        topology: XLA's description of the device (a PjRtTopologyDescriptionProto), base64.
        results: XLA's measurements (an AutotuneResults), base64.
    """

    machine: Fingerprint
    topology: str
    results: str

    @classmethod
    def read(cls, path: Path) -> Tuning:
        """Read a file that `prejit tune` wrote.

        Raises:
            StoreError: it cannot be read.
            RejectError: it is not such a file.
        """
        try:
            tuning = from_json(cls, path.read_bytes().rstrip(b"\n"), str(path))
            base64.b64decode(tuning.topology, validate=True)
            base64.b64decode(tuning.results, validate=True)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot read tuning results: {error.strerror}",
                hint="write them with `prejit tune BUNDLE -o FILE` on the device that they are for",
            ) from error
        except RejectError as error:
            error.hint = "write it again with `prejit tune BUNDLE -o FILE` on the device"
            raise
        except ValueError as error:
            raise RejectError(str(path), f"expected base64: {error}") from error
        return tuning


def tune(path: str | os.PathLike[str], tell: Callable[[str], None]) -> Tuning:
    """Compile every program of a bundle on this machine's GPU and record what XLA measures.

    Call it before anything else uses XLA in this process, because XLA reads its flags once. `tell` is called
    with a line of text for each program.

    Raises:
        UsageError: this machine has no GPU.
        RejectError, StoreError: the bundle is damaged, or cannot be read.
        UntrustedError, PolicyError: a trust policy does not let the bundle run.
        BuildError: XLA does not compile a program.
    """
    machine = Fingerprint.current()
    if machine.platform != "cuda":
        raise UsageError(
            f"expected an NVIDIA GPU and jax's plugin for it, found platform {machine.platform}",
            hint="run `prejit tune` on a machine of the target, with jax[cuda13] installed",
        )

    def read(layout: Layout, root: Root) -> tuple[Config, Layer]:
        chosen = match(root, machine)[0]
        contents = read_contents(layout, chosen)
        if policies := policy_paths():
            manifests = {chosen.name: contents.manifest}
            for text in enforce(policies, layout, root, [chosen], manifests).reported:
                tell(f"warning: {text}")
        of_target = [contents.manifest]
        blobs = check_blobs(
            layout, of_target, Receipts(layout.blobs_root, is_shared=layout.has_shared_blobs)
        )
        return contents.config, blobs.layers(contents.manifest)[PORTABLE_MEDIA_TYPE]

    config, portable = read_whole(path, read)
    with tempfile.TemporaryDirectory() as directory:
        measured = Path(directory, "results")  # XLA writes text where the name ends in .txt
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_dump_autotune_results_to={measured}"
        os.environ["XLA_FLAGS"] = flags.strip()
        from prejit.runtime.device.device import Device

        device = Device(machine.platform, config.mesh)
        for number, program in enumerate(config.programs, 1):
            tell(f"compiling {program.name} ({number}/{len(config.programs)})")
            device.compile(
                portable.unpack(program.portable),
                program.platforms or (),
                tuple(map(Array.parse, program.results)),
            )
        results = measured.read_bytes() if measured.exists() else b""
        topology = device.describe()
    return Tuning(machine, base64.b64encode(topology).decode(), base64.b64encode(results).decode())


def write(tuning: Tuning, path: Path) -> None:
    """Write a tuning file.

    Raises:
        StoreError: it cannot be written.
    """
    write_file(path, to_json(tuning) + b"\n")
