"""Other clients take a bundle's image and its artifact, and what they mount serves the first token."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

import pytest
from oras.client import OrasClient
from tests.processes import ran
from tests.waiting import wait_for

from prejit.compiler.pipeline.layout_writing import EMPTY, Part, attach
from prejit.runtime.__main__ import main
from prejit.runtime.format.audit import audit
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PARTS_MEDIA_TYPE
from prejit.runtime.format.root import read_root
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
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


def has(*programs):
    for each in programs:
        if shutil.which(each) is None:
            pytest.skip(f"{each} is not installed (Debian has it)")


def first_token(path):
    command = [sys.executable, "-W", "ignore", "-c", FIRST_TOKEN, str(path)]
    done = ran(*command)
    return done.stdout.splitlines()


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
    env = {"PATH": os.environ["PATH"], "HOME": "/tmp"}
    done = ran(*command, env=env)
    return done.stdout.splitlines()


def pushed(bundle, at, form, capsys):
    assert main(["push", str(bundle), at, f"--{form}", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["digest"])


@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts")
def test_umoci_unpacks_the_image_and_its_root_serves_the_first_token(
    demo, registry, tmp_path, capsys
):
    has("skopeo", "umoci")
    pushed(demo, f"{registry.url}:image", "image", capsys)
    place = registry.url.removeprefix("oci://")
    skopeo = ["skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false"]
    subprocess.run([*skopeo, f"docker://{place}:image", f"oci:{tmp_path}/layout:image"], check=True)
    umoci = ["umoci", "unpack", "--image", f"{tmp_path}/layout:image", f"{tmp_path}/unpacked"]
    subprocess.run(umoci, check=True)
    files = tmp_path / "unpacked" / "rootfs"
    assert audit(files / "models", check_generation) == audit(demo, check_generation)
    refused, said = below_a_root(files, tmp_path)
    assert refused == "Read-only file system"
    assert said == first_token(demo)[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: buildah mounts what it unpacks")
def test_buildah_mounts_the_image(demo, registry, tmp_path, capsys):
    has("buildah")
    pushed(demo, f"{registry.url}:image", "image", capsys)
    place = registry.url.removeprefix("oci://")
    stores = ["--root", tmp_path / "images", "--runroot", tmp_path / "run"]
    buildah = ["buildah", *map(str, stores), "--storage-driver", "vfs"]
    name = subprocess.check_output(
        [*buildah, "from", "-q", "--tls-verify=false", f"{place}:image"], text=True
    )
    at = Path(subprocess.check_output([*buildah, "mount", name.strip()], text=True).strip())
    try:
        assert audit(at / "models", check_generation) == audit(demo, check_generation)
        assert first_token(at / "models")[-1] == first_token(demo)[-1]
    finally:
        subprocess.run([*buildah, "rm", "--all"], check=True, capture_output=True)
        subprocess.run([*buildah, "rmi", "--all"], check=True, capture_output=True)


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


@pytest.mark.skipif(not can_mount(), reason="needs root, and mounts")
def test_containerd_mounts_the_image_and_unpacks_the_weights_of_two_versions_once(
    demo, registry, ctr, tmp_path, capsys
):
    second = Path(shutil.copytree(demo, tmp_path / "second"))
    with Layout(second) as layout:
        subject = read_root(layout).subject
    parts = Part(PARTS_MEDIA_TYPE, b'{"bomFormat":"CycloneDX"}')
    attach(second, subject, PARTS_MEDIA_TYPE, EMPTY, [parts], {})
    counts, place = [], registry.url.removeprefix("oci://")
    for name, bundle in {"one": demo, "two": second}.items():
        pushed(bundle, f"{registry.url}:{name}", "image", capsys)
        pull = [*ctr, "images", "pull", "--plain-http", f"{place}:{name}"]
        subprocess.run(pull, check=True, capture_output=True)
        snapshots = subprocess.check_output([*ctr, "snapshots", "ls"], text=True)
        counts.append(len(snapshots.splitlines()))
    assert counts[1] == counts[0] + 1  # the layer of small files
    at = tmp_path / "mounted"
    at.mkdir()
    subprocess.run([*ctr, "images", "mount", f"{place}:two", str(at)], check=True, stdout=DEVNULL)
    try:
        refused, said = first_token(at / "models")
        assert audit(at / "models", check_generation) == audit(second, check_generation)
    finally:
        subprocess.run(["umount", str(at)], check=True)
    assert (refused, said) == ("Read-only file system", first_token(demo)[-1])


def test_oras_puts_the_files_of_the_artifact_side_by_side(demo, registry, tmp_path, capsys):
    pushed(demo, f"{registry.url}:pack", "modelpack", capsys)
    client = OrasClient(insecure=True)
    files = client.pull(
        f"{registry.url.removeprefix('oci://')}:pack", outdir=str(tmp_path / "flat")
    )
    assert {str(Path(each).parent) for each in files} == {str(tmp_path / "flat")}
    assert audit(tmp_path / "flat", check_generation) == audit(demo, check_generation)
    assert first_token(tmp_path / "flat")[-1] == first_token(demo)[-1]


@pytest.mark.skipif(
    "KSERVE_STORAGE" not in os.environ,
    reason="needs a Python of which KSERVE_STORAGE is the path, with the package kserve-storage",
)
def test_the_storage_initializer_of_kserve_takes_the_image(demo, registry, tmp_path, capsys):
    pushed(demo, f"{registry.url}:image", "image", capsys)
    code = "import sys; from kserve_storage import Storage; Storage.download(*sys.argv[1:])"
    command = [os.environ["KSERVE_STORAGE"], "-c", code, f"{registry.url}:image"]
    env = {**os.environ, "KSERVE_OCI_INSECURE_REGISTRY": "true"}
    subprocess.run([*command, str(tmp_path / "models")], check=True, env=env, capture_output=True)
    assert audit(tmp_path / "models", check_generation) == audit(demo, check_generation)
