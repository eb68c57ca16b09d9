"""A value or an argument that a file of deploy/ names and prejit refuses stops a pod or a job."""

import os
import re
import subprocess
from pathlib import Path

import click
import yaml

from prejit.runtime.cli.commands import commands

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_values_of_the_chart_name_choices_of_the_server():
    text = (DEPLOY / "kubernetes" / "chart" / "values.yaml").read_text()
    _, serve, _ = commands.resolve_command(click.Context(commands), ["serve"])
    [option] = [each for each in serve.params if each.name == "on_mismatch"]
    [other] = re.findall(r"^onMismatch: .*# or (\w+):", text, re.MULTILINE)
    assert {yaml.safe_load(text)["onMismatch"], other} == set(option.type.choices)


def test_a_job_binds_the_files_of_its_image_and_no_reference(tmp_path):
    apptainer = tmp_path / "apptainer"
    apptainer.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    apptainer.chmod(0o755)

    def arguments(**settings):
        given = {"IMAGE": "a.sif", "SLURM_JOB_ID": "5", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        script = ["bash", str(DEPLOY / "hpc" / "serve.sbatch")]
        done = subprocess.run(
            script, env=given | settings, check=True, text=True, capture_output=True
        )
        _, *found = done.stdout.splitlines()  # the address is first
        return found[: found.index("serve") + 2]

    remote, here = "oci://host/demo:v1", str(tmp_path)
    assert arguments(BUNDLE=remote) == ["run", "a.sif", "serve", remote]
    assert arguments(BUNDLE=here) == ["run", "--bind", here, "a.sif", "serve", here]
    bound = ["--bind", "keys.txt"]
    assert arguments(BUNDLE=remote, KEYS="keys.txt") == ["run", *bound, "a.sif", "serve", remote]
