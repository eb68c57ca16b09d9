"""deploy/hpc: a Slurm of the test's own runs the script; the recipe of Apptainer is checked as shell."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.processes import ran
from tests.waiting import wait_for

from .test_serve import INFER

ROOT = Path(__file__).parents[2]
HPC = ROOT / "deploy" / "hpc"
SHELLCHECK = ROOT / ".venv-tools" / "bin" / "shellcheck"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "squeue")
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=4096 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SMALL = ("--cpus-per-task=1", "--mem=2G")
"""What the node of the test has."""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of one node, which is this machine."""
    missing = [each for each in PROGRAMS if shutil.which(each) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root and Debian's slurmctld, slurmd and slurm-client; missing: {missing}"
        )
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    settings = tmp_path / "slurm.conf"
    ports = {"controller": free_port(), "node": free_port()}
    settings.write_text(SETTINGS.format(host=socket.gethostname(), place=tmp_path, **ports))
    monkeypatch.setenv("SLURM_CONF", str(settings))
    running = []
    try:
        with (tmp_path / "log").open("wb") as log:
            for daemon in (["slurmctld", "-D"], ["slurmd", "-D"]):
                running.append(subprocess.Popen(daemon, stdout=log, stderr=log))
        wait_for(lambda: "idle" in command("sinfo", "--noheader", "--format=%t"))
        yield
    finally:
        for each in reversed(running):
            each.terminate()
            each.wait()


def command(*arguments):
    done = ran(*arguments, status=None)
    return done.stdout + done.stderr


def state(job):
    return command("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


@pytest.mark.thorough
def test_a_job_serves_until_the_signal_before_its_end(
    slurm, bundle_dir, tmp_path, monkeypatch, programs
):
    port = free_port()
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("BUNDLE", str(bundle_dir))
    monkeypatch.setenv("PORT", str(port))
    script = HPC / "serve.sbatch"
    assert "to start at" in command("sbatch", "--test-only", *SMALL, script)
    printed = tmp_path / "printed"
    job = command("sbatch", "--parsable", f"--output={printed}", *SMALL, script).strip()
    assert job.isdecimal(), job
    wait_for(lambda: printed.exists() and "ready in" in printed.read_text())
    assert printed.read_text().startswith(f"http://{socket.gethostname()}:{port}\n")
    found = httpx.post(f"http://127.0.0.1:{port}/v2/models/score/infer", json=INFER, timeout=60)
    assert found.status_code == 200
    assert state(job) == "RUNNING"
    command("scancel", "--signal=TERM", "--batch", job)  # as --signal=B:TERM@120 does it
    wait_for(lambda: state(job) not in ("RUNNING", "COMPLETING"))
    assert state(job) == "COMPLETED", printed.read_text()


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="no .venv-tools")
def test_shellcheck_accepts_the_script_and_the_recipe(tmp_path):
    sections = re.split(r"^%(\w+)\n", (HPC / "prejit.def").read_text(), flags=re.MULTILINE)
    recipe = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name in ("post", "environment", "runscript"):
        (tmp_path / f"{name}.sh").write_text(f"#!/bin/sh\n{recipe[name]}")
    scripts = [HPC / "serve.sbatch", *tmp_path.glob("*.sh")]
    ran(SHELLCHECK, *scripts)
    # Its image is that of the Containerfile, which benchmarks/ship/container_start.py builds and runs.
    (install,) = re.findall(r"pip --python .*", recipe["post"])
    containerfile = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    joined = re.sub(r"\s*\\\n\s*", " ", containerfile)
    assert install in joined
