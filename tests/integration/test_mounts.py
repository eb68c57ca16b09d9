"""Other clients copy a bundle, and a bundle's image, whose files serve the first token."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from oras.layout.layout import Layout, NewLayoutFromRegistry
from oras.provider import Registry
from tests.extent import one_in
from tests.processes import ran

from prejit.runtime.__main__ import main
from prejit.runtime.format.audit import audit
from prejit.runtime.generation.options import check_generation
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

ROOT = Path(__file__).parents[2]
FIRST_TOKEN = """
import os, sys
from prejit.runtime import load
try:
    os.close(os.open(f"{sys.argv[1]}/index.json", os.O_RDWR))
    print("it can be written")
except OSError as error:
    print(error.strerror)
bundle = load(sys.argv[1], on_mismatch="error")
print(bundle.digest, *bundle.generate("def read_lines", max_new_tokens=1).token_ids)
"""
SYSTEM = ("/usr", "/lib", "/lib64", "/bin")


def can_mount():
    has_rights = os.geteuid() == 0 and shutil.which("unshare") is not None
    return has_rights and ran("unshare", "-m", "true", status=None).returncode == 0


def first_token(path):
    return ran(sys.executable, "-W", "ignore", "-c", FIRST_TOKEN, path).stdout.splitlines()


def below_a_root(files, work):
    """The first token in a read-only root of an image's files, in which this machine's Python is mounted."""
    top, root = work / "top", work / "root"
    kept = [*SYSTEM, *{str(ROOT), sys.base_prefix, sys.prefix}]
    shown = [each for each in kept if Path(each).is_dir()]
    for each in (*shown, "/proc", "/dev", "/tmp"):
        (top / each.lstrip("/")).mkdir(parents=True, exist_ok=True)
    root.mkdir()
    mounts = [f"mount -t overlay overlay -o ro,lowerdir={files}:{top} {root}"]
    mounts += [f"mount --bind -o ro {each} {root}{each}" for each in sorted(shown)]
    mounts += [f"mount -t proc proc {root}/proc", f"mount --bind /dev {root}/dev"]
    mounts += [f"mount -t tmpfs tmpfs {root}/tmp", f'exec chroot {root} "$@"']
    python = [sys.executable, "-W", "ignore", "-c", FIRST_TOKEN, "/models"]
    command = ["unshare", "-m", "sh", "-ec", "\n".join(mounts), "sh", *python]
    return ran(*command, env={"PATH": os.environ["PATH"], "HOME": "/tmp"}).stdout.splitlines()


@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts")
def test_umoci_unpacks_the_image_and_its_root_serves_the_first_token(demo, registry, tmp_path):
    assert main(["push", str(demo), f"{registry.url}:image", "--image"]) == 0
    image = f"docker://{registry.url.removeprefix('oci://')}:image"
    skopeo = ("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false")
    run_here(*skopeo, image, f"oci:{tmp_path}/layout:image")
    run_here("umoci", "unpack", "--image", f"{tmp_path}/layout:image", f"{tmp_path}/unpacked")
    files = tmp_path / "unpacked" / "rootfs"
    assert audit(files / "models", check_generation) == audit(demo, check_generation)
    refused, said = below_a_root(files, tmp_path)
    assert (refused, said) == ("Read-only file system", first_token(demo)[-1])


FLEET = Path(__file__).parents[1] / "format" / "v1" / "fleet"
TARGET = "cpu-x86-64-v3"


@pytest.fixture
def place(registry):
    """A repository of a registry, without `oci://`."""
    return registry.url.removeprefix("oci://")


def run_here(*words):
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed (Debian has it)")
    ran(*words)


def moved(source, target, *targets):
    return ship(parse_reference(str(source)), parse_reference(str(target)), targets).digest


def by_skopeo(place, work):
    tls = ("--src-tls-verify=false", "--dest-tls-verify=false")
    copy = ("skopeo", "--insecure-policy", "copy", "--all", *tls)
    run_here(*copy, f"docker://{place}:ours", f"oci:{work}/copy:fleet")
    run_here(*copy, f"oci:{work}/copy:fleet", f"docker://{place}:theirs")


def by_oras(place, work):
    copy = ("oras", "copy")
    run_here(*copy, "--from-plain-http", f"{place}:ours", "--to-oci-layout", f"{work}/copy:x")
    run_here(*copy, "--from-oci-layout", f"{work}/copy:x", "--to-plain-http", f"{place}:theirs")


def by_oras_of_python(place, work):
    provider = Registry(insecure=True, tls_verify=False)
    NewLayoutFromRegistry(f"{work}/copy", provider, f"{place}:ours", tag="fleet")
    to = {"provider": provider, "target": f"{place}:theirs", "tag": "fleet"}
    Layout(f"{work}/copy").push_to_registry(**to)


CLIENTS = {"skopeo": by_skopeo, "oras": by_oras, "oras of Python": by_oras_of_python}


@pytest.mark.parametrize("copy", one_in(3, CLIENTS.values()), ids=CLIENTS)
def test_what_a_client_copies_within_a_registry_is_the_same_bundle(copy, place, tmp_path):
    (tmp_path / "work").mkdir()
    moved(FLEET, f"oci://{place}:ours")
    copy(place, tmp_path / "work")
    expected = audit(FLEET, check_generation)
    assert moved(f"oci://{place}:theirs", tmp_path / "back") == expected.digest
    assert audit(tmp_path / "back", check_generation) == expected
    if (layout := tmp_path / "work" / "copy").exists():
        assert audit(layout, check_generation).target_count == expected.target_count


def test_a_layout_of_one_target_in_which_umoci_tags_and_collects(place, tmp_path):
    """umoci knows no index of several targets (it says that its tag is ambiguous)."""
    digest = moved(FLEET, f"oci://{place}:one", TARGET)
    layout = tmp_path / "layout"
    moved(f"oci://{place}:one", layout)
    run_here("umoci", "tag", "--image", f"{layout}:{TARGET}", "other")
    run_here("umoci", "gc", "--layout", layout)
    assert audit(layout, check_generation).digest == digest
    assert moved(layout, f"oci://{place}:two") == digest
