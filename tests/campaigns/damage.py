"""Damage any file of a signed bundle at random, verify and use it, and say what became of it."""

import contextlib
import gc
import json
import os
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from unittest import mock

from tests.layouts import blob, index_file, index_of

from prejit.runtime.base.files import digest_of

PROMPT = "def read_lines(path):"
NEW_TOKENS = 12
MOST_BYTES = 8 << 10  # the largest range that is zeroed, swapped or appended

MODES = ("beside", "early", "late", "receipts", "policy", *("checks",) * 5)
"""Ways to use a damaged bundle. An example has the mode at the index that is its last digit.

- beside: a reply is streamed while threads verify.
- early: a reply is wanted after the threads have ended.
- late: no thread verifies anything before somebody waits for it, or before the end of the reply.
- receipts: as beside, with receipts of the sound bundle, and with the times of the file set back.
- policy: as beside, with a trust policy that demands signatures, the provenance and the list of parts.
- checks: load, and wait until all is verified. Only a bundle that passes is used.
"""
IN_PLACE = ("bit flipped", "byte written", "range zeroed", "ranges swapped", "cut", "appended")
"""Kinds of damage that write into a file. The others change what a directory lists."""
OF_DIRECTORIES = ("deleted", "linked", "exchanged", "added")


@dataclass(frozen=True)
class Damage:
    """A change of a file, in place or in its directory."""

    kind: str
    roles: tuple[str, ...]
    file: Path
    writes: tuple[tuple[int, bytes], ...]
    size: int
    other: Path | None = None

    @property
    def role(self):
        """Return the role of the file, for counts."""
        return self.roles[0] if len(self.roles) == 1 else "two files"

    @property
    def is_lenient(self):
        """Return whether a load takes many spellings of a file."""
        return not {*self.roles}.isdisjoint(LENIENT)


def build(arguments):
    """Build a manifest, with chunks of 1 MiB: the smallest ones that a load does not wait for. Sign it."""
    from tests.quick_compiling import compile_children_quickly
    from tests.signers import key_table, signer, write_policy

    from prejit.compiler.pipeline.pack import chunks
    from prejit.compiler.signing.bundle_signing import sign
    from prejit.runtime.__main__ import main

    compile_children_quickly()
    chunks.CHUNK_BYTES = 1 << 20
    manifest, output, kept = arguments
    status = main(["build", manifest, "-o", output, "--cache", kept, "--no-measure"])
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["a"]\nsbom = true\nprovenance = {}\n'
    for bundle in (each for each in Path(output).iterdir() if not status and each.is_dir()):
        sign(bundle, signer("a"))
        write_policy(policy_of(bundle), key_table("a"), rule)
    return status


def policy_of(bundle):
    """Return the trust policy beside a bundle."""
    return bundle.with_name("trust.toml")


@cache
def files(bundle):
    """Return every file of a bundle by its role."""
    from prejit.runtime import load

    served = load(bundle, on_mismatch="error").target
    found = {name: bundle / name for name in LENIENT}
    found["index"] = index_file(bundle)
    targets = index_of(bundle)["manifests"]
    named = "org.opencontainers.image.ref.name"
    targets.sort(key=lambda at: at["annotations"][named] != served)
    for target in targets:
        whose = "" if target["annotations"][named] == served else "other "
        manifest = json.loads(blob(bundle, target["digest"]).read_bytes())
        layers = {each["mediaType"].removeprefix(_MEDIA): each for each in manifest["layers"]}
        for role, at in {"manifest": target, "config": manifest["config"], **layers}.items():
            file = blob(bundle, at["digest"])
            if file not in found.values():
                found[whose + role] = file
    found |= _attached(bundle)
    assert {file for file in bundle.rglob("*") if file.is_file()} == set(found.values())
    return found


LENIENT = ("index.json", "oci-layout")
"""Files that other tools write too, so that a load takes many spellings of them."""
ATTACHED = "attached "


def _attached(bundle):
    """Return the files of the signatures, the provenance and the list of parts, by their roles."""
    from prejit.runtime.format.layout import Layout
    from prejit.runtime.format.referrers import referrers
    from prejit.runtime.format.root import read_root

    with Layout(bundle) as layout:
        found = referrers(layout, read_root(layout))
    files = {}
    for number, each in enumerate(found):
        kind = f"{ATTACHED}{number} {each.artifact_type.rpartition('.')[2]}"
        files[kind] = blob(bundle, each.layers[0].digest)
        files[f"{kind} manifest"] = blob(bundle, each.descriptor.digest)
        files[f"{ATTACHED}config"] = blob(bundle, each.config.digest)
    return files


_MEDIA = "application/vnd.prejit."


@cache
def chunked(bundle):
    """Return the size of the chunks of each file that is read by chunks; kernels are read whole."""
    roles = files(bundle)
    chunks = json.loads(roles["config"].read_bytes())["chunks"]
    named = {name.removeprefix(_MEDIA): each["size"] for name, each in chunks.items()}
    return {roles[name]: size for name, size in named.items() if not name.startswith("kernels")}


def draw(bundle, generator, kinds=()):
    """Draw the damage of one file: in a third of all cases, of one with chunks."""
    roles = files(bundle)
    large = [role for role, file in roles.items() if file in chunked(bundle)]
    role = generator.choice(large if generator.random() < 1 / 3 else list(roles))
    file = roles[role]
    content = file.read_bytes()
    size = len(content)
    at = generator.randrange(size)
    length = generator.randrange(1, min(MOST_BYTES, size) + 1)
    kind = generator.choice(kinds or (*IN_PLACE, *OF_DIRECTORIES))
    writes = ()
    match kind:
        case "bit flipped":
            writes = ((at, bytes([content[at] ^ 1 << generator.randrange(8)])),)
        case "byte written":
            writes = ((at, generator.randbytes(1)),)
        case "range zeroed":
            writes = ((min(at, size - length), bytes(length)),)
        case "ranges swapped":
            length = min(length, size // 2)
            one = generator.randrange(size - 2 * length + 1)
            other = generator.randrange(one + length, size - length + 1)
            ours, theirs = content[one : one + length], content[other : other + length]
            writes = ((one, theirs), (other, ours))
        case "cut":
            size = at
        case "appended":
            more = generator.randbytes(length) if generator.random() < 0.5 else bytes(length)
            writes, size = ((size, more),), size + length
        case "exchanged":
            second = generator.choice([each for each in roles if each != role])
            return Damage(kind, (role, second), file, (), size, roles[second])
        case "added":
            content = file.read_bytes() if generator.random() < 0.5 else generator.randbytes(length)
            name = generator.choice(
                [
                    *("notes.txt", "index.json.bak", ".index.json.1.0badcafe.tmp", "blobs/x"),
                    *("blobs/sha256/x", f"blobs/sha256/{generator.randbytes(32).hex()}"),
                    f"blobs/sha256/{digest_of(content + b'x').removeprefix('sha256:')}",
                ]
            )
            return Damage(kind, ("added file",), bundle / name, ((0, content + b"x"),), size)
    return Damage(kind, (role,), file, writes, size)


def draw_position(bundle, number):
    """Return a flipped bit in one chunk, at its first, its last or any byte; and when it is found."""
    [(file, step)] = chunked(bundle).items()
    content = file.read_bytes()
    number, which = divmod(number, 3)
    number, when = divmod(number, 3)
    start = number * step
    end = min(start + step, len(content))
    at = (start, end - 1, random.Random(number).randrange(start, end))[which]
    [role] = (role for role, each in files(bundle).items() if each == file)
    written = ((at, bytes([content[at] ^ 1])),)
    damage = Damage(f"bit flipped in chunk {number}", (role,), file, written, len(content))
    return damage, ("beside", "early", "late")[when]


def positions(bundle):
    """Return the number of examples of `draw_position`."""
    [(file, step)] = chunked(bundle).items()
    return 9 * len(range(0, file.stat().st_size, step))


@dataclass(frozen=True)
class Applied:
    """The outcome of one damage."""

    differ: frozenset[int]
    allowed: str | None


@contextlib.contextmanager
def applied(damage, *, hide=False):
    """Damage a file, and restore it; `hide` sets the times of the file back."""
    if damage.kind in OF_DIRECTORIES:
        with _applied_to_directory(damage):
            yield Applied(frozenset(), _may_pass(damage))
        return
    before, times = damage.file.read_bytes(), damage.file.stat()
    differ = frozenset(
        start + place
        for start, written in damage.writes
        for place, byte in enumerate(written)
        if before[start + place : start + place + 1] != bytes([byte])
    )
    is_same = not differ and damage.size == len(before)
    with open(damage.file, "r+b", buffering=0) as file:
        for start, written in damage.writes:
            os.pwrite(file.fileno(), written, start)
        file.truncate(damage.size)
        if hide:
            os.utime(damage.file, ns=(times.st_atime_ns, times.st_mtime_ns))
        try:
            yield Applied(differ, "same bytes" if is_same else _may_pass(damage))
        finally:  # never shorter than before: a load may still have it mapped
            os.pwrite(file.fileno(), before, 0)
            file.truncate(len(before))


def _may_pass(damage):
    """Return why a load may give tokens of a bundle that differs."""
    if all(_is_unread(role) for role in damage.roles):
        return "not read"  # a load looks at its size at most: `prejit verify` reads it
    if all(_is_unread(role) or role in LENIENT for role in damage.roles):
        return "read leniently"
    return None


def _is_unread(role):
    """Return whether no load reads a file."""
    is_other = role.startswith("other ") and role != "other manifest"
    return is_other or role.startswith(ATTACHED) or role == "added file"


@contextlib.contextmanager
def _applied_to_directory(damage):
    """Delete a file, put a link into its place, exchange it with another, or add it; then restore all."""
    file, other = damage.file, damage.other
    if damage.kind == "added":
        file.write_bytes(damage.writes[0][1])
        try:
            yield
        finally:
            file.unlink()
        return
    outside = next(each.parent for each in file.parents if (each / "blobs").is_dir())
    with tempfile.TemporaryDirectory(dir=outside) as directory:
        aside = Path(directory, "aside")
        file.rename(aside)
        try:
            if damage.kind == "linked":
                file.symlink_to(aside)
            elif other is not None:
                other.rename(file)
                aside.rename(other)
            yield
        finally:
            if other is not None:
                other.rename(aside)
                file.rename(other)
            aside.rename(file)


def judged(bundle, damage, done, found, expected, rejection):
    """Return what is wrong with a use of a damaged bundle; None: nothing is."""
    if found != expected[: len(found)]:
        return f"wrong reply: expected {expected!r}, found {found!r}"
    is_whole = len(found) == len(expected)
    if rejection is None:
        return "no error" if done.allowed is None else None if is_whole else f"too short: {found!r}"
    if done.allowed == "same bytes":
        return f"rejected without damage: {rejection[0]}"
    if is_whole:
        return f"a finished reply before the error {rejection[0]}"
    if damage.is_lenient or not rejection[1]:
        return None
    return _misleading(bundle, damage, done.differ, *rejection)


def _misleading(bundle, damage, differ, said, path):
    """Return what is wrong with the message of a rejection; None: it names file, place and sizes."""
    if path not in (str(damage.file), str(damage.other)) or path not in said:
        return f"expected {damage.file}, found: {said}"
    if damage.kind in ("cut", "appended") and f"found {damage.size}" not in said:
        return f"expected the size {damage.size}, found: {said}"
    in_place = damage.kind not in ("cut", "appended", *OF_DIRECTORIES)
    if in_place and damage.file in chunked(bundle):
        place = re.search(r"bytes (\d+) to (\d+): expected blake3 ", said)
        if place is None or not any(int(place[1]) <= at <= int(place[2]) for at in differ):
            return f"expected an offset near {min(differ)}, found: {said}"
    return None


def give_receipts(bundle):
    """Verify a sound bundle and leave receipts of every file, as a first start does after two seconds."""
    from prejit.runtime import load
    from prejit.runtime.machine import kept_files as receipts

    with mock.patch.object(receipts, "SETTLED_SECONDS", -1.0):
        load(bundle, on_mismatch="error")._open.programs.verification.finish()
    gc.collect()


def drop_receipts():
    """Remove the runtime cache, so that the next load is a first one."""
    shutil.rmtree(os.environ["PREJIT_RUNTIME_CACHE"], ignore_errors=True)


def attempt(bundle, campaign, number, expected):
    """Try an example, and return number, kind, role, mode and result."""
    if campaign == "positions":
        damage, mode = draw_position(bundle, number)
    else:
        damage = draw(bundle, random.Random(f"{campaign} {number}"))
        mode = MODES[number % len(MODES)]
    drop_receipts()
    if mode == "receipts":
        give_receipts(bundle)
    with applied(damage, hide=mode == "receipts") as done:
        problem = _audited(bundle, damage, done.allowed)
        tokens, error = _use(bundle, mode)
        problem = problem or _judged(bundle, damage, done, tokens, error, expected)
    if number % 8 == 0:
        gc.collect()  # each bundle has a client of XLA with threads
    result = "bad" if problem else "rejected" if error is not None else str(done.allowed)
    about = {"number": number, "kind": damage.kind, "role": damage.role, "mode": mode}
    return {**about, "result": result, "problem": problem}


def _judged(bundle, damage, done, tokens, error, expected):
    from prejit.runtime.errors import RejectError, UntrustedError

    if error is not None and not isinstance(error, RejectError):
        return f"expected a RejectError, found {error!r}"
    rejection = None
    if error is not None:  # a policy names what is missing now
        rejection = (str(error), "" if isinstance(error, UntrustedError) else error.path)
    return judged(bundle, damage, done, tokens, expected, rejection)


def _audited(bundle, damage, allowed):
    """Return what is wrong if `prejit verify` does not find the damage, or names another file."""
    from prejit.runtime.errors import RejectError
    from prejit.runtime.format.audit import audit
    from prejit.runtime.generation.options import check_generation

    try:
        audit(bundle, check_generation)
    except RejectError as error:
        if allowed == "same bytes":
            return f"verify rejects without damage: {error}"
        is_known = error.path in (str(damage.file), str(damage.other)) or damage.is_lenient
        return None if is_known else f"verify names another file: {error}"
    except Exception as error:
        return f"verify: expected a RejectError, found {error!r}"
    return None if allowed == "same bytes" else "verify finds nothing"


def _use(bundle, mode):
    """Load a bundle and stream a reply. Return its tokens, and the error that ended it."""
    from prejit.runtime import load
    from prejit.runtime.format import blob_hashing

    tokens = []
    late = mock.patch.object(
        blob_hashing,
        "HashingVerification",
        partial(_without_threads, blob_hashing.HashingVerification),
    )
    try:
        with late if mode == "late" else contextlib.nullcontext():
            trust = policy_of(bundle) if mode == "policy" else None
            loaded = load(bundle, on_mismatch="error", trust=trust)
        if mode == "checks":
            loaded._open.programs.verification.finish()
        while mode == "early" and not _is_over(loaded._open.programs.verification):
            time.sleep(0.001)
        for piece in loaded.stream(PROMPT, max_new_tokens=NEW_TOKENS):
            if piece.token_id is not None:
                tokens.append(piece.token_id)
    except Exception as error:
        return tokens, error.with_traceback(None)
    return tokens, None


def _without_threads(kind, jobs, **options):
    return kind(jobs, **{**options, "threads": 0})


def _is_over(verification):
    return verification.is_finished or verification._failure is not None


def try_all(given):
    """Try examples of a bundle and a campaign. Print each number first, then its outcome as JSON."""
    bundle, campaign, numbers = given
    drop_receipts()
    expected, error = _use(bundle, "beside")
    assert error is None, error
    gc.collect()
    gc.freeze()  # later collections look at the objects of one example alone
    for number in numbers:
        print(number, flush=True)
        print(json.dumps(attempt(bundle, campaign, number, expected)), flush=True)
    return 0
