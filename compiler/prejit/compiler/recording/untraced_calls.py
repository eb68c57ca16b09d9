"""Make the files by which `prejit run` starts programs without traces of what recorded processes wrote.

A file holds the calls of one command, and the inputs of its process. Two recordings confirm a call: what they
do not agree on is traced.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.runtime.recorded.hook.input_facts import OF_PREJIT, identity_of, is_of_library
from prejit.runtime.recorded.hook.process_inputs import INPUT_KINDS, calls_file, file_digest

UNCONFIRMED = (
    "one recording has it: record once more, and what both agree on starts without a trace"
)


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of one process.

    Attributes:
        file: the name of the file in a bundle.
        content: the file, as JSON.
    """

    file: str
    content: dict[str, Any]

    @classmethod
    def of(cls, file: str, encoded: bytes) -> RecordedCalls:
        """Return the calls of a file in a bundle."""
        return cls(file, json.loads(encoded))

    def encoded(self) -> bytes:
        """Return the bytes of the file."""
        return json.dumps(self.content, sort_keys=True, separators=(",", ":")).encode()

    def count(self, *, confirmed: bool) -> int:
        """Return the number of calls that are confirmed, or that are not."""
        return sum((each["reason"] is None) == confirmed for each in self.content["calls"].values())

    def reasons(self) -> dict[str, list[str]]:
        """Return the names of functions that are traced, by the reason."""
        found: dict[str, list[str]] = {}
        for each in self.content["calls"].values():
            if each["reason"] is not None:
                found.setdefault(each["reason"], []).append(each["name"])
        return found


def read_calls(directory: Path) -> tuple[RecordedCalls, ...]:
    """Return the calls that processes wrote into a directory, of commands that one process ran.

    Several processes of one command, such as workers, cannot be told apart and are left out.
    """
    found: dict[str, list[RecordedCalls]] = {}
    for path in sorted(directory.glob("*.jsonl")):
        calls = _read(path)
        if calls is not None:
            found.setdefault(calls.file, []).append(calls)
    return tuple(each[0] for each in found.values() if len(each) == 1)


def _read(path: Path) -> RecordedCalls | None:
    command: list[str] | None = None
    prefix = ""
    initial: dict[str, str] = {}
    modules: dict[str, str | None] = {}
    inputs: dict[str, list[list[Any]]] = {name: [] for name in INPUT_KINDS}
    calls: dict[str, dict[str, Any]] = {}
    failure: str | None = None
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # of a process that was killed
            continue
        if "command" in line:
            command, initial, prefix = line["command"], line["environment"], line["prefix"]
        modules |= line.get("modules", {})
        failure = line.get("failure", failure)
        for kind, name, found in line.get("read", ()):
            if not (kind == "variables" and name.startswith(OF_PREJIT)):
                inputs[kind].append([name, line["index"], found])
        if "called" in line:
            _add(calls, line["called"])
    if command is None or not calls:
        return None
    if failure is not None:  # what the process has read is not known
        for each in calls.values():
            each["reason"] = f"{UNCONFIRMED}; prejit could not watch this one: {failure}"
    names = {*filter(is_of_library, initial), *(name for name, *_ in inputs["variables"])}
    digest = functools.cache(_digest)  # of files that several traces have read
    files = [
        [name, index, identity, digest(name, identity and tuple(identity))]
        for name, index, identity in inputs["files"]
    ]
    return RecordedCalls(
        calls_file(command),
        {
            "command": command,
            "inputs": {
                "environment": {name: initial.get(name) for name in sorted(names)},
                **inputs,
                "files": files,
                "modules": modules,
                "prefix": prefix,
            },
            "calls": calls,
            "recordings": 1,
        },
    )


def _add(calls: dict[str, dict[str, Any]], line: dict[str, Any]) -> None:
    """Add a call. Calls of one signature must give one program."""
    signature, index = line.pop("signature"), line.pop("index")
    there = calls.setdefault(signature, {**line, "indices": []})
    there["indices"].append(index)
    if there["reason"] is None and _result(there) != _result(line):
        there["reason"] = line["reason"] or "calls that look alike give several programs"


def _result(call: dict[str, Any]) -> tuple[Any, ...]:
    return call["program"], call.get("executable"), call.get("results")


def _digest(path: str, identity: tuple[int, ...] | None) -> str | None:
    """Return the digest of a file that has not changed since it was read; None: it has, or there was none."""
    digest = None if identity is None else file_digest(path)
    return digest if identity_of(path) == (identity and [*identity]) else None


def confirmed(before: RecordedCalls | None, now: RecordedCalls) -> RecordedCalls:
    """Return the calls of a new recording, confirmed by the one before if that had the same inputs."""
    difference = None if before is None else _difference(before, now)
    if before is None or difference is not None:
        reason = UNCONFIRMED + (f"; before, {difference}" if difference else "")
        calls = {
            signature: {**each, "reason": each["reason"] or reason}
            for signature, each in now.content["calls"].items()
        }
        return RecordedCalls(now.file, {**now.content, "calls": calls, "recordings": 1})
    calls = {}
    for signature, each in now.content["calls"].items():
        other = before.content["calls"].get(signature)
        reason = each["reason"]
        if reason is None and other is None:
            reason = UNCONFIRMED
        elif reason is None and _result(other) != _result(each):
            reason = "two recordings gave several programs"
        elif reason is None and not (other["reason"] or UNCONFIRMED).startswith(UNCONFIRMED):
            reason = other["reason"]
        calls[signature] = {**each, "reason": reason}
        if other is not None:
            number = min(len(each["indices"]), len(other["indices"]))
            calls[signature]["indices"] = each["indices"][:number]
    recordings = before.content["recordings"] + 1
    return RecordedCalls(now.file, {**now.content, "calls": calls, "recordings": recordings})


def _difference(before: RecordedCalls, now: RecordedCalls) -> str | None:
    """Return an input in which two recordings differ; None: in none that decides."""
    earlier, later = _inputs(before), _inputs(now)
    modules = [each.content["inputs"]["modules"] for each in (before, now)]
    for inputs, files in zip((earlier, later), modules, strict=True):
        inputs["module"] = {name: files[name] for name in modules[0].keys() & modules[1].keys()}
    for kind in later:
        for name in sorted(earlier[kind].keys() | later[kind].keys()):
            if name not in earlier[kind] or name not in later[kind]:
                read = "was not read" if name not in earlier[kind] else "was read, now not"
                return f"the {kind} {name} {read}"
            if earlier[kind][name] != later[kind][name]:
                return f"the {kind} {name} was another"
    return None


def _inputs(calls: RecordedCalls) -> dict[str, dict[str, Any]]:
    """Return the inputs of a recording by kind and name, without what may differ where they are the same."""
    found = calls.content["inputs"]
    return {
        "environment variable": found["environment"],
        "file": {path: digest for path, _, _, digest in found["files"]},
        "directory": {path: digest for path, _, digest in found["listings"]},
        "order of directory": {path: digest for path, _, digest in found["orders"]},
        "packages": {path: digest for path, _, digest in found["packages"]},
        "path": {path: kind for path, _, kind in found["kinds"]},
        "link": {path: target for path, _, target in found["links"]},
    }
