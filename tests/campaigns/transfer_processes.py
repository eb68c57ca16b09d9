"""A transfer in a process of its own, without the rights of root and with small limits."""

import ctypes
import json
import os
import resource
import traceback
from functools import partial
from pathlib import Path

from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import PrejitError, RejectError
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, arrive, pull, pull_into
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

PRELOADED = (
    *("prejit.runtime.ship.registry_repository", "prejit.runtime.ship.object_repository"),
    *("prejit.runtime.ship.directory_repository", "tests.campaigns.transfer_processes"),
    *("oras.auth", "oras.container", "requests", "pytest"),
)
PIECE_BYTES = 64 << 10  # pieces are smaller than usual, so that the weights have some
_CAPABILITIES_V3 = 0x20080522  # the version of capset's structures (linux/capability.h)
PULL, HTTP, DIRECTORY, TAR = "pull", "pull by http", "pull into a directory", "pull into a tar"
PUSH, PUSH_TAR, COPY = "push", "push of a tar", "copy within a registry"
ARRIVE = "load while it arrives"
INTO_STORE = (PULL, HTTP, ARRIVE)
INTO_REGISTRY = (PUSH, PUSH_TAR, COPY)


def transfer(way, source, target, outcome, env, answer_seconds, file_bytes):
    """Transfer in this process, which may write files of so many bytes (0: any); write how it ended."""
    os.environ.update(env)
    os.umask(0o022)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)  # gives up root's rights to read-only files
    ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
    _hurry(answer_seconds)
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
    end = {"error": "", "is_ours": True, "text": ""}
    try:
        found = parse_reference(source)
        if way == ARRIVE:
            _read_while_it_arrives(found, MachineStore(Path(target)))
        elif way in INTO_STORE:
            pull(found, MachineStore(Path(target)), Wanted())
        elif way in (DIRECTORY, TAR):
            pull_into(found, parse_reference(target), Wanted())
        else:
            ship(found, parse_reference(target))
    except BaseException as error:
        is_ours = isinstance(error, PrejitError | KeyboardInterrupt)
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(each.filename).name}:{each.lineno}" for each in frames][-6:]
        said = f"{error} at {' '.join(ours)}"
        end = {"error": type(error).__name__, "is_ours": is_ours, "text": said}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    outcome.write_text(json.dumps(end))
    os._exit(0)


def _read_while_it_arrives(source, store):
    """Read the weights of a bundle as `load` reads them, and check that their bytes are right."""
    path, _, bundle = arrive(source, store, Wanted())
    if bundle is None:
        return
    for digest, arrival in bundle._arrivals.items():
        descriptor = arrival.open()
        size = os.fstat(descriptor).st_size
        content = b""
        for place in range(0, size, PIECE_BYTES):
            end = min(size, place + PIECE_BYTES)
            arrival.wait(end)
            content += os.pread(descriptor, end - place, place)
        os.close(descriptor)
        if digest_of(content) != digest:  # the checks of `load`, which come after
            raise RejectError(str(path), f"expected the bytes of {digest}")
    assert bundle._thread is not None
    bundle._thread.join()
    bundle.close()


def _hurry(answer_seconds):
    """Make pauses, time limits and pieces small in this process."""
    from prejit.runtime.ship import (
        blob_directory,
        directory_repository,
        object_repository,
        registry_client,
        registry_repository,
        repository,
    )

    changes = [
        (repository, "PAUSES_SECONDS", (0.0, 0.0, 0.01)),
        (registry_client, "PAUSES_SECONDS", (0.0, 0.0, 0.01)),
        (registry_client, "_MOST_PAUSE_SECONDS", 0.02),
        (registry_repository, "_MANIFEST_PAUSES_SECONDS", (0.0, 0.01)),
        # As if others filled the disk after the store has looked at it.
        (MachineStore, "check_room", lambda store, shipment: None),
        (object_repository, "ANSWER_SECONDS", answer_seconds),
        (object_repository, "open_objects", partial(object_repository.open_objects, retries=False)),
    ]
    for module in (blob_directory, directory_repository, object_repository, registry_repository):
        changes.append((module, "PIECE_BYTES", PIECE_BYTES))
    for module, name, value in changes:
        getattr(module, name)
        setattr(module, name, value)
    defaults = registry_repository.Registry.__init__.__kwdefaults__
    defaults["answer_seconds"] = answer_seconds
