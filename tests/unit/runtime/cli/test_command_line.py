"""One command line: all commands in one listing, one style of help, one name for one thing."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version

import click
import pytest

from prejit.runtime.cli.command_options import byte_count
from prejit.runtime.cli.commands import HOUSES, commands
from prejit.runtime.errors import StoreError

TOP = click.Context(commands, **commands.context_settings)


LEAVES = {}
for name in commands.commands:
    _, command, _ = commands.resolve_command(TOP, [name])
    if isinstance(command, click.Group):
        LEAVES |= {f"{name} {inner}": each for inner, each in command.commands.items()}
    else:
        LEAVES[name] = command


def test_help_and_versions_are_listed(said):
    printed = said("--help")
    _, *parts = re.split(r"^Commands that .*:$", printed, flags=re.MULTILINE)
    for part, house in zip(parts, HOUSES.values(), strict=True):
        assert re.findall(r"^  ([a-z-]+)  ", part, re.MULTILINE) == [*house.commands]
    assert "Commands that serve bundles (pip install 'prejit[server]'):" in printed
    assert "Commands that build and compare (pip install 'prejit[compiler]'):" in printed
    python = ".".join(map(str, sys.version_info[:3]))
    packages = [f"{name} {version(name)}" for name in ("prejit", "jax", "jaxlib")]
    assert said("--version").splitlines() == [*packages, f"python {python}"]


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_help_with_examples_that_it_takes(name, said, monkeypatch):
    monkeypatch.setenv("PREJIT_TRUST", "")  # --trust changes it
    printed = said(*name.split(), "-h")
    assert printed.startswith(f"Usage: prejit {name} [OPTIONS]")
    _, examples = printed.split("\n  Examples:\n")
    found = re.findall(rf"^    prejit {name}(?: (.*))?$", examples, re.MULTILINE)
    assert found
    for example in found:
        LEAVES[name].make_context(name, shlex.split(example.partition(">")[0]), TOP).close()
    for parameter in LEAVES[name].params:
        assert isinstance(parameter, click.Argument | click.Option)
        assert re.fullmatch(r"[A-Z].*\.", parameter.help or ""), parameter.name


def test_a_name_means_one_thing_in_all_commands_and_no_path_is_checked_early():
    kinds = {}
    parameters = [each for command in LEAVES.values() for each in command.params]
    for option in (each for each in parameters if isinstance(each, click.Option)):
        kind = re.sub("(integer|float)( range)?", "number", option.type.name)
        for spelling in option.opts:
            kinds.setdefault(spelling, set()).add((kind, option.is_flag, option.multiple))
    # A key of `sign` is one; a channel has several. An adapter of `generate` needs no name, and its images
    # are files, where `push` makes one of a container.
    several = {spelling for spelling, found in kinds.items() if len(found) > 1}
    assert several <= {"--key", "--adapter", "--image"}
    # A forbidden file is an error of whoever opens it, and no wrong usage.
    paths = [each.type for each in parameters if isinstance(each.type, click.Path)]
    assert paths
    assert not [each for each in paths if each.readable]


@pytest.mark.parametrize(
    "argv",
    [
        *([], ["unknown"], ["inspect"], ["generate", "b"], ["call", "b", "p"]),
        *(["inspect", "b", "--nonsense"], ["channel"], ["build"], ["build", "--jobs", "0", "m"]),
        ["generate", "b", "--prompt", "x", "--prompt-ids", "1"],
        ["generate", "b", "--prompt", "x", "--max-new-tokens", "many"],
        ["bench", "b", "--tolerance", "nan"],
        ["sign", "b"],
        ["push", "b", "oci://h/r:v1", "--image", "--modelpack"],
    ],
)
def test_wrong_usage_ends_with_2(argv, ran):
    printed = ran(*argv, status=2)
    assert printed.out == ""
    assert printed.err.startswith(("Usage: prejit", "error[usage]: "))


def test_a_size_is_read_as_dd_reads_it_or_refused():
    sizes = {"0": 0, "1000": 1000, "512M": 512 << 20, "2k": 2048, "1.5TiB": 3 << 39}
    sizes |= {"10GB": 10**10, "1.5kB": 1500}
    assert {text: byte_count(text) for text in sizes} == sizes
    for text in ("", "-1", "G", "1X", "1iB", "1e3", "0x10", "9" * 16, "many"):
        with pytest.raises(click.BadParameter, match="expected a number of bytes or a size such"):
            byte_count(text)


@pytest.mark.parametrize("option", ["bench b -o", "gate a b --markdown", "load b --page"])
@pytest.mark.parametrize("place", ["missing/file", "."])
def test_a_result_that_cannot_be_written_is_an_error_before_the_work(
    option, place, tmp_path, monkeypatch, ran
):
    monkeypatch.chdir(tmp_path)
    printed = ran(*option.split(), place, status=6).err
    assert printed.startswith(f"error[store]: {place}: cannot write: ")
    assert not list(tmp_path.iterdir())


def test_an_earlier_result_and_a_pipe_without_a_reader_stay(tmp_path, ran):
    (tmp_path / "file").write_text("earlier")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "file", tmp_path / "pipe"):
        assert "missing: cannot open a bundle" in ran("bench", "missing", "-o", place, status=6).err
    assert (tmp_path / "file").read_text() == "earlier"


def test_a_removed_current_directory_is_named(tmp_path):
    command = f"{sys.executable} -m prejit.runtime check-model model:model"
    script = f"mkdir gone && cd gone && rmdir ../gone && exec {command}"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == StoreError.exit_code
    assert "current directory: No such file or directory" in done.stderr


def test_a_registry_without_its_scheme_is_no_path(ran):
    for command in ("pull", "ls", "rm", "copy"):
        place = "registry.example.com/demo:v1"
        more = ["x"][: command == "copy"]
        assert f"give oci://{place}" in ran(command, place, *more, status=2).err
