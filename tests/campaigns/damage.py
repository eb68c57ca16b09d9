"""Damage any file of a signed bundle at random, verify and use it, and say what became of it."""

import contextlib
import gc
import json
import os
import random
import re
import shutil
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from tests.layouts import blob, index_file, index_of

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
OF_DIRECTORIES = ("deleted", "linked", "exchanged", "added")
LENIENT = ("index.json", "oci-layout")
"""Files that other tools write too, so that a load takes many spellings of them."""
ATTACHED = "attached "
_MEDIA = "application/vnd.prejit."


@dataclass(frozen=True)
class Damage:
    """New bytes of damaged files, by role and path; None: the file is deleted."""

    kind: str
    roles: tuple[str, ...]
    changes: dict[Path, bytes | None]

    @property
    def role(self):
        return self.roles[0] if len(self.roles) == 1 else "two files"

    @property
    def is_lenient(self):
        return not {*self.roles}.isdisjoint(LENIENT)


def build(arguments):
    """Build a manifest, with chunks of 1 MiB: the smallest ones that a load does not wait for. Sign it."""
    from tests.quick_compiling import compile_children_quickly
    from tests.signers import key_table, signer, write_policy

    from prejit.compiler.pipeline.pack import weights_layer
    from prejit.compiler.signing.bundle_signing import sign
    from prejit.runtime.__main__ import main

    compile_children_quickly()
    weights_layer.CHUNK_BYTES = 1 << 20
    manifest, output, kept = arguments
    status = main(["build", manifest, "-o", output, "--cache", kept, "--no-measure"])
    rule = '[[rules]]\nnames = ["*"]\nkeys = ["a"]\nsbom = true\nprovenance = {}\n'
    for bundle in (each for each in Path(output).iterdir() if not status and each.is_dir()):
        sign(bundle, signer("a"))
        write_policy(policy_of(bundle), key_table("a"), rule)
    return status


def policy_of(bundle):
    return bundle.with_name("trust.toml")


@cache
def files(bundle):
    """Return every file of a bundle by its role: `other` ones are of the target that is not served."""
    from prejit.runtime import load
    from prejit.runtime.format.layout import Layout
    from prejit.runtime.format.referrers import referrers
    from prejit.runtime.format.root import read_root

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
    with Layout(bundle) as layout:
        attached = referrers(layout, read_root(layout))
    for number, each in enumerate(attached):
        kind = f"{ATTACHED}{number} {each.artifact_type.rpartition('.')[2]}"
        found[kind] = blob(bundle, each.layers[0].digest)
        found[f"{kind} manifest"] = blob(bundle, each.descriptor.digest)
        found[f"{ATTACHED}config"] = blob(bundle, each.config.digest)
    assert {file for file in bundle.rglob("*") if file.is_file()} == set(found.values())
    return found


@cache
def chunked(bundle):
    """Return the size of the chunks of each file that is read by chunks; kernels are read whole."""
    roles = files(bundle)
    chunks = json.loads(roles["config"].read_bytes())["chunks"]
    named = {name.removeprefix(_MEDIA): each["size"] for name, each in chunks.items()}
    return {roles[name]: size for name, size in named.items() if not name.startswith("kernels")}


def draw(bundle, generator, kinds=(*IN_PLACE, *OF_DIRECTORIES)):
    """Draw the damage of one file: in a third of all cases, of one with chunks."""
    roles = files(bundle)
    large = [role for role, file in roles.items() if file in chunked(bundle)]
    role = generator.choice(large if generator.random() < 1 / 3 else list(roles))
    content, changed = roles[role].read_bytes(), bytearray(roles[role].read_bytes())
    size = len(content)
    at = generator.randrange(size)
    length = generator.randrange(1, min(MOST_BYTES, size) + 1)
    kind = generator.choice(kinds)
    match kind:
        case "bit flipped":
            changed[at] ^= 1 << generator.randrange(8)
        case "byte written":
            changed[at] = generator.randrange(256)
        case "range zeroed":
            start = min(at, size - length)
            changed[start : start + length] = bytes(length)
        case "ranges swapped":
            length = min(length, size // 2)
            one = generator.randrange(size - 2 * length + 1)
            other = generator.randrange(one + length, size - length + 1)
            changed[one : one + length] = content[other : other + length]
            changed[other : other + length] = content[one : one + length]
        case "cut":
            del changed[at:]
        case "appended":
            changed += generator.choice((generator.randbytes(length), bytes(length)))
        case "exchanged":
            second = generator.choice([each for each in roles if each != role])
            others = {roles[role]: roles[second].read_bytes(), roles[second]: content}
            return Damage(kind, (role, second), others)
        case "added":
            names = ("notes.txt", "index.json.bak", ".index.json.1.0badcafe.tmp", "blobs/x")
            hex_digest = generator.randbytes(32).hex()
            names += ("blobs/sha256/x", f"blobs/sha256/{hex_digest}")
            new = generator.choice((content, generator.randbytes(length))) + b"x"
            return Damage(kind, ("added file",), {bundle / generator.choice(names): new})
    is_gone = kind in ("deleted", "linked")
    return Damage(kind, (role,), {roles[role]: None if is_gone else bytes(changed)})


def draw_position(bundle, number):
    """Return a flipped bit in one chunk, at its first, its last or any byte; and when it is found."""
    [(file, step)] = chunked(bundle).items()
    content = bytearray(file.read_bytes())
    number, which = divmod(number, 3)
    number, when = divmod(number, 3)
    start = number * step
    end = min(start + step, len(content))
    content[(start, end - 1, random.Random(number).randrange(start, end))[which]] ^= 1
    [role] = (role for role, each in files(bundle).items() if each == file)
    damage = Damage(f"bit flipped in chunk {number}", (role,), {file: bytes(content)})
    return damage, ("beside", "early", "late")[when]


def positions(bundle):
    [(file, step)] = chunked(bundle).items()
    return 9 * len(range(0, file.stat().st_size, step))


@contextlib.contextmanager
def applied(damage, *, hide=False):
    """Damage files, and restore them; yields the bytes that differ, and why a load may give tokens."""
    with contextlib.ExitStack() as ends:
        differ = set()
        for file, new in damage.changes.items():
            if not file.exists():
                ends.callback(file.unlink)
                file.write_bytes(new)
                differ.add(0)
            elif new is None:
                aside = next(each.parent for each in file.parents if (each / "blobs").is_dir())
                aside = aside / f"aside {file.name}"
                file.rename(aside)
                ends.callback(aside.rename, file)
                if damage.kind == "linked":
                    file.symlink_to(aside)
                differ.add(0)
            else:
                before, times = file.read_bytes(), file.stat()
                one, other = (np.frombuffer(each, np.uint8) for each in (before, new))
                size = min(len(before), len(new))
                differ |= {*np.flatnonzero(one[:size] != other[:size])[: 2 * MOST_BYTES].tolist()}
                differ |= {size} if len(before) != len(new) else set()
                ends.callback(_overwrite, file, before)
                _overwrite(file, new)
                if hide:  # as if nothing had been written
                    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        yield SimpleNamespace(differ=differ, allowed=_may_pass(damage) if differ else "same bytes")


def _overwrite(file, content):
    """Write a file in place, which is never shorter meanwhile: a load may still have it mapped."""
    with open(file, "r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), content, 0)
        opened.truncate(len(content))


def _may_pass(damage):
    """Return why a load may give tokens of a bundle that differs."""

    def is_unread(role):  # a load looks at its size at most: `prejit verify` reads it
        is_other = role.startswith("other ") and role != "other manifest"
        return is_other or role.startswith(ATTACHED) or role == "added file"

    if all(map(is_unread, damage.roles)):
        return "not read"
    is_lenient = all(is_unread(role) or role in LENIENT for role in damage.roles)
    return "read leniently" if is_lenient else None


def judged(bundle, damage, done, found, expected, rejection):
    """Return what is wrong with a use that `found` a reply or a rejection: its message, and file or ""."""
    if found != expected[: len(found)]:
        return f"wrong reply: expected {expected!r}, found {found!r}"
    is_whole = len(found) == len(expected)
    if rejection is None:
        return "no error" if done.allowed is None else None if is_whole else f"too short: {found!r}"
    said, path = rejection
    if done.allowed == "same bytes":
        return f"rejected without damage: {said}"
    if is_whole:
        return f"a finished reply before the error {said}"
    if damage.is_lenient or not path:
        return None
    if path not in map(str, damage.changes) or path not in said:
        return f"expected {[*damage.changes]}, found: {said}"
    [*_, (file, new)] = damage.changes.items()
    if damage.kind in ("cut", "appended"):
        return None if f"found {len(new)}" in said else f"expected {len(new)} bytes, found: {said}"
    if damage.kind not in OF_DIRECTORIES and file in chunked(bundle):
        place = re.search(r"bytes (\d+) to (\d+): expected blake3 ", said)
        if place is None or not any(int(place[1]) <= at <= int(place[2]) for at in done.differ):
            return f"expected an offset near {min(done.differ)}, found: {said}"
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
    """Try an example of `random` or of `positions`; `problem` says what is wrong with its result."""
    from prejit.runtime.errors import RejectError, UntrustedError

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
    rejection = None
    if isinstance(error, RejectError):  # a policy names what is missing now
        rejection = (str(error), "" if isinstance(error, UntrustedError) else error.path)
    elif error is not None:
        problem = problem or f"expected a RejectError, found {error!r}"
    problem = problem or judged(bundle, damage, done, tokens, expected, rejection)
    if number % 8 == 0:
        gc.collect()  # each bundle has a client of XLA with threads
    result = "bad" if problem else "rejected" if error is not None else str(done.allowed)
    about = {"number": number, "kind": damage.kind, "file": damage.role, "mode": mode}
    return {**about, "result": result, "problem": problem}


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
        is_known = error.path in map(str, damage.changes) or damage.is_lenient
        return None if is_known else f"verify names another file: {error}"
    except Exception as error:
        return f"verify: expected a RejectError, found {error!r}"
    return None if allowed == "same bytes" else "verify finds nothing"


def _use(bundle, mode):
    """Load a bundle and stream a reply. Return its tokens, and the error that ended it."""
    from prejit.runtime import load
    from prejit.runtime.format import blob_hashing

    kind = blob_hashing.HashingVerification
    threads = {"threads": 0} if mode == "late" else {}
    tokens = []
    try:
        with mock.patch.object(blob_hashing, "HashingVerification", partial(_made, kind, threads)):
            trust = policy_of(bundle) if mode == "policy" else None
            loaded = load(bundle, on_mismatch="error", trust=trust)
        verification = loaded._open.programs.verification
        if mode == "checks":
            verification.finish()
        while mode == "early" and not (verification.is_finished or verification._failure):
            time.sleep(0.001)
        for piece in loaded.stream(PROMPT, max_new_tokens=NEW_TOKENS):
            if piece.token_id is not None:
                tokens.append(piece.token_id)
    except Exception as error:
        return tokens, error.with_traceback(None)
    return tokens, None


def _made(kind, changed, jobs, **options):
    return kind(jobs, **{**options, **changed})


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
