"""Other clients take a bundle's image and its artifact, and what they mount serves the first token."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

import pytest
from tests.layouts import subject_of
from tests.processes import ran
from tests.waiting import wait_for

from prejit.compiler.pipeline.pack.bundle_writing import Part, attach
from prejit.runtime.__main__ import main
from prejit.runtime.format.audit import audit
from prejit.runtime.format.names import PARTS_MEDIA_TYPE
from prejit.runtime.generation.options import check_generation

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


def has(*programs):
    for each in programs:
        if shutil.which(each) is None:
            pytest.skip(f"{each} is not installed (Debian has it)")


def first_token(path):
    return ran(sys.executable, "-W", "ignore", "-c", FIRST_TOKEN, path).stdout.splitlines()


def is_whole(path, bundle):
    return audit(path, check_generation) == audit(bundle, check_generation)


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


def pushed(bundle, registry, form="image", tag="image"):
    """Push a bundle in a form, and return its place without `oci://`."""
    assert main(["push", str(bundle), f"{registry.url}:{tag}", f"--{form}"]) == 0
    return f"{registry.url.removeprefix('oci://')}:{tag}"


@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts")
def test_umoci_unpacks_the_image_and_its_root_serves_the_first_token(demo, registry, tmp_path):
    has("skopeo", "umoci")
    skopeo = ("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false")
    ran(*skopeo, f"docker://{pushed(demo, registry)}", f"oci:{tmp_path}/layout:image")
    ran("umoci", "unpack", "--image", f"{tmp_path}/layout:image", f"{tmp_path}/unpacked")
    files = tmp_path / "unpacked" / "rootfs"
    assert is_whole(files / "models", demo)
    refused, said = below_a_root(files, tmp_path)
    assert (refused, said) == ("Read-only file system", first_token(demo)[-1])


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: buildah mounts what it unpacks")
def test_buildah_mounts_the_image(demo, registry, tmp_path):
    has("buildah")
    stores = ("--root", tmp_path / "images", "--runroot", tmp_path / "run")
    buildah = ("buildah", *stores, "--storage-driver", "vfs")
    name = ran(*buildah, "from", "-q", "--tls-verify=false", pushed(demo, registry)).stdout.strip()
    at = Path(ran(*buildah, "mount", name).stdout.strip())
    try:
        assert is_whole(at / "models", demo)
        assert first_token(at / "models")[-1] == first_token(demo)[-1]
    finally:
        ran(*buildah, "rm", "--all")
        ran(*buildah, "rmi", "--all")


@pytest.fixture
def ctr(tmp_path):
    """The client of a containerd of this test's own."""
    has("containerd", "ctr")
    socket = tmp_path / "containerd.sock"
    (tmp_path / "containerd.toml").write_text(
        f'version = 2\nroot = "{tmp_path}/root"\nstate = "{tmp_path}/state"\n'
        f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{socket}"\n'
    )
    client = ["ctr", "--address", str(socket)]
    with (tmp_path / "containerd.log").open("wb") as log:
        command = ["containerd", "--config", str(tmp_path / "containerd.toml")]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: subprocess.call([*client, "version"], stdout=DEVNULL, stderr=DEVNULL) == 0)
        yield client
    finally:
        server.kill()
        server.wait()


@pytest.mark.thorough
@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts")
def test_containerd_mounts_the_image_and_unpacks_shared_weights_once(demo, registry, ctr, tmp_path):
    second = Path(shutil.copytree(demo, tmp_path / "second"))
    parts = Part(PARTS_MEDIA_TYPE, b'{"bomFormat":"CycloneDX"}')
    attach(second, subject_of(second), PARTS_MEDIA_TYPE, [parts], {})
    counts = []
    for name, bundle in {"one": demo, "two": second}.items():
        ran(*ctr, "images", "pull", "--plain-http", image := pushed(bundle, registry, tag=name))
        counts.append(len(ran(*ctr, "snapshots", "ls").stdout.splitlines()))
    assert counts[1] == counts[0] + 1  # the layer of small files
    at = tmp_path / "mounted"
    at.mkdir()
    ran(*ctr, "images", "mount", image, at)
    try:
        refused, said = first_token(at / "models")
        assert is_whole(at / "models", second)
    finally:
        ran("umount", at)
    assert (refused, said) == ("Read-only file system", first_token(demo)[-1])


@pytest.mark.thorough
def test_oras_puts_the_files_of_the_artifact_side_by_side(demo, registry, tmp_path):
    from oras.client import OrasClient  # imports requests, which no other test does

    flat = tmp_path / "flat"
    files = OrasClient(insecure=True).pull(pushed(demo, registry, "modelpack"), outdir=str(flat))
    assert {Path(each).parent for each in files} == {flat}
    assert is_whole(flat, demo)
    assert first_token(flat)[-1] == first_token(demo)[-1]


@pytest.mark.skipif(
    "KSERVE_STORAGE" not in os.environ,
    reason="needs a Python of which KSERVE_STORAGE is the path, with the package kserve-storage",
)
def test_the_storage_initializer_of_kserve_takes_the_image(demo, registry, tmp_path):
    code = "import sys; from kserve_storage import Storage; Storage.download(*sys.argv[1:])"
    env = {**os.environ, "KSERVE_OCI_INSECURE_REGISTRY": "true"}
    source = f"oci://{pushed(demo, registry)}"
    ran(os.environ["KSERVE_STORAGE"], "-c", code, source, tmp_path / "models", env=env)
    assert is_whole(tmp_path / "models", demo)
