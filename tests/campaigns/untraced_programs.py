"""Start public JAX programs without tracing, and compare what they print with plain starts."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import time

from . import campaign
from .campaign import ROOT, setting

PROGRAMS = sorted((ROOT / "benchmarks" / "programs").glob("*.py")) + sorted(
    (ROOT / "benchmarks" / "studies" / "recorded_programs").glob("*.py")
)
PREJIT = (sys.executable, "-m", "prejit.runtime")
WAYS = ("imports", "plain", "warm cache", "traced", "untraced")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowerings",
    "/jax/core/compile/backend_compile_duration": "compiles",
}
COUNTER = f"""
import atexit, json, os, sys
if "PREJIT_HOOK" in os.environ:  # the program's process, not that of `prejit run`
    import jax
    found = dict.fromkeys({[*EVENTS.values()]}, 0)
    def count(event, seconds, **details):
        if event in {EVENTS}:
            found[{EVENTS}[event]] += 1
    jax.monitoring.register_event_duration_secs_listener(count)
    atexit.register(lambda: open(FILE, "w").write(json.dumps(found)))
"""
"""A `sitecustomize` that counts events. It imports jax, as every program does."""


def ran(command, directory, environment=()):
    """Run a command to its end. Return its output, errors, and seconds of wall and CPU time."""
    unwanted = ("JAX_", "XLA_FLAGS", "PREJIT_HOOK")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    if not setting("UNTRACED_TIMES", 1):  # compiling is most of the work
        kept["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    kept |= {"PYTHONHASHSEED": "0", "PREJIT_RUNTIME_CACHE": str(directory / "unpacked")}
    began, before = time.monotonic(), os.times()
    options = {"cwd": directory, "env": kept | dict(environment)}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    after = os.times()
    cpu = after.children_user + after.children_system
    return {
        "status": done.returncode,
        "output": done.stdout,
        "errors": done.stderr,
        "seconds": round(time.monotonic() - began, 2),
        "cpu": round(cpu - before.children_user - before.children_system, 2),
    }


def imports_of(program):
    """Return the statements of a program that import, and its libraries with their versions."""
    body = ast.parse(program.read_text()).body
    nodes = [each for each in body if isinstance(each, (ast.Import, ast.ImportFrom))]
    modules = [n.module if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    owners = importlib.metadata.packages_distributions()
    names = {name.split(".")[0] for name in modules} - {"jax", "numpy"}
    found = sorted({owners[name][-1] for name in names if name in owners})
    versions = [f"{name} {importlib.metadata.version(name)}" for name in found]
    return "\n".join(map(ast.unparse, nodes)), versions


def run_program(program, directory):
    """Run a program in all ways. Return and print its figures, with what is wrong about it."""
    directory.mkdir()
    command = (sys.executable, str(program))
    if "sys.argv" in program.read_text():
        command += (str(directory / "checkpoint"),)
        ran(command, directory)
    statements, libraries = imports_of(program)
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    bundle = str(directory / "bundle")
    record = (*PREJIT, "record", "--untraced", "-o", bundle, "--", *command)
    report, events = directory / "report", directory / "events"
    start = (*PREJIT, "run", bundle, "--report")
    site = directory / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(COUNTER.replace("FILE", repr(str(events))))
    ways = {
        "plain": (command, cache),
        "recording": (record, {}),
        "second recording": (record, {}),
        "untraced": ((*start, "-o", str(report), "--", *command), {"PYTHONPATH": str(site)}),
        "imports": ((sys.executable, "-c", statements), {}),
        "warm cache": (command, cache),
        "traced": ((*start, "--check-traces", "100", "--", *command), {}),
    }
    if not setting("UNTRACED_TIMES", 1):
        ways = dict(list(ways.items())[:4])
    found = {}
    for way, (line, environment) in ways.items():
        found[way] = ran(line, directory, environment)
        if found[way]["status"] != 0:
            break
    told = json.loads(report.read_text()) if report.exists() else {}
    figures = {
        "libraries": libraries,
        "wrong": wrongs(found),
        "untraced": told.get("untraced"),
        "traced": told.get("traced"),
        "compiled": told.get("missed"),
        "events": json.loads(events.read_text()) if events.exists() else None,
        "seconds": {way: found[way]["seconds"] for way in WAYS if way in found},
        "cpu seconds": {way: found[way]["cpu"] for way in WAYS if way in found},
    }
    print(program.stem, json.dumps(figures), flush=True)
    return figures


def wrongs(found):
    plain = found["plain"]["output"]
    lines = []
    for way, each in found.items():
        if each["status"] != 0:
            lines.append(f"{way}: status {each['status']}: {each['errors'].strip()[-500:]}")
        if way != "imports" and each["output"] != plain:
            lines.append(f"{way}: prints other results than the plain start")
        told = [line for line in each["errors"].splitlines() if line.startswith("prejit: ")]
        lines += [f"{way}: {line}" for line in told]
    return lines


def table(figures):
    head = ("program", "libraries", "untraced")
    head += ("traces, lowerings, compiles", "traced, and why", "wrong")
    rows = [(*head, *(f"{way}, s (CPU s)" for way in WAYS)), ("---",) * (len(head) + len(WAYS))]
    for name, each in figures.items():
        events = "?" if each["events"] is None else ", ".join(map(str, each["events"].values()))
        reasons = (each["traced"] or {}).items()
        why = "; ".join(f"{', '.join(names[:3])}: {reason[:160]}" for reason, names in reasons)
        wrong = "; ".join(line[:120] for line in each["wrong"])
        wall, cpu = each["seconds"], each["cpu seconds"]
        times = (f"{wall[way]:.1f} ({cpu[way]:.1f})" if way in wall else "" for way in WAYS)
        libraries = ", ".join(each["libraries"])
        rows.append((name, libraries, str(each["untraced"]), events, why, wrong, *times))
    clean = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in clean)


def main():
    known = {each.stem: each for each in PROGRAMS}
    chosen = [known[name] for name in sys.argv[1:] or known]
    before = campaign.machine_facts()
    with campaign.scratch_directory() as root:
        figures = {each.stem: run_program(each, root / each.stem) for each in chosen}
    print(table(figures))
    file = campaign.figures_file("untraced_programs")
    kept = json.loads(file.read_text())["programs"] if file.exists() else {}
    programs = dict(sorted({**kept, **figures}.items()))
    made = {**campaign.facts("jax", "jaxlib", "kernel"), **before, "programs": programs}
    campaign.write_figures("untraced_programs", made)


if __name__ == "__main__":
    main()
