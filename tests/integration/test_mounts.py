"""Other clients take a bundle's image, and its files, which cannot be written, serve the first token."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.processes import ran

from prejit.runtime.__main__ import main
from prejit.runtime.format.audit import audit
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
    if missing := [each for each in ("skopeo", "umoci") if shutil.which(each) is None]:
        pytest.skip(f"Debian has {missing}, which are not installed")
    assert main(["push", str(demo), f"{registry.url}:image", "--image"]) == 0
    image = f"docker://{registry.url.removeprefix('oci://')}:image"
    skopeo = ("skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false")
    ran(*skopeo, image, f"oci:{tmp_path}/layout:image")
    ran("umoci", "unpack", "--image", f"{tmp_path}/layout:image", f"{tmp_path}/unpacked")
    files = tmp_path / "unpacked" / "rootfs"
    assert audit(files / "models", check_generation) == audit(demo, check_generation)
    refused, said = below_a_root(files, tmp_path)
    assert (refused, said) == ("Read-only file system", first_token(demo)[-1])
