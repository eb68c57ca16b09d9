"""deploy/systemd: systemd verifies the units; one of the test's own starts and restarts a server by them."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.processes import ran
from tests.waiting import wait_for

from .test_serve import INFER

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
SYSTEMD = Path("/lib/systemd/systemd")
EXPOSURE = 20
"""Most exposure that `systemd-analyze security` may see, in tenths. A unit without settings has 96."""
BOOT = """
mount --make-rprivate /
for each in /run /etc/systemd/system /opt /srv /var/cache /var/lib /var/tmp; do
    mount -t tmpfs tmpfs "$each"
done
mkdir -p /opt/prejit/bin /opt/python /opt/packages /opt/runtime /opt/server /srv/models/demo
mount --bind "$BASE" /opt/python
mount --bind "$PACKAGES" /opt/packages
mount --bind "$ROOT/runtime" /opt/runtime
mount --bind "$ROOT/server" /opt/server
mount --bind "$BUNDLE" /srv/models/demo
cp "$ROOT"/deploy/systemd/* /etc/systemd/system/
cat > /opt/prejit/bin/prejit <<END
#!/bin/sh
export PYTHONPATH=/opt/runtime:/opt/server:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/$PYTHON -m prejit.runtime "\\$@"
END
chmod 755 /opt/prejit/bin/prejit
cd /etc/systemd/system
mkdir 'prejit@demo.socket.d'
printf '[Socket]\\nListenStream=\\nListenStream=127.0.0.1:%s\\n' "$PORT" > 'prejit@demo.socket.d/port.conf'
mkdir 'prejit@demo.service.d'
printf '[Service]\\nStandardError=append:/run/printed\\n' > 'prejit@demo.service.d/printed.conf'
for each in sysinit basic sockets network shutdown; do
    printf '[Unit]\\nDefaultDependencies=no\\n' > "$each.target"
done
printf '[Unit]\\nDefaultDependencies=no\\nRequires=prejit@demo.socket\\n' > default.target
mount -t tmpfs tmpfs /tmp
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
exec env --ignore-environment container=test SYSTEMD_UNIT_PATH=/etc/systemd/system \\
    "$SYSTEMD" --system --log-target=null
"""
"""Starts a systemd that can write to no file of this machine and has no units of Debian, which empty /tmp."""


def can_boot():
    if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("unshare") is None:
        return False
    if Path("/proc/1/comm").read_text() == "systemd\n":  # two would share its control groups
        return False
    return ran("unshare", "-pfmC", "--mount-proc", "true", status=None).returncode == 0


@pytest.fixture
def units(tmp_path):
    """The units as instances: systemd-analyze reads no templates."""
    for each in UNITS.iterdir():
        shutil.copy(each, tmp_path / each.name.replace("@", "@demo"))
    service = tmp_path / "prejit@demo.service"
    service.write_text(service.read_text().replace("/opt/prejit/bin/prejit", "/bin/true"))
    return tmp_path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units_and_sees_little_exposure(units):
    files = [units / f"prejit@demo.{kind}" for kind in ("service", "socket")]
    assert ran("systemd-analyze", "verify", *files).stderr == ""
    ran("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", files[0])


@dataclass(frozen=True)
class Booted:
    pid: int
    port: int

    def child(self):
        """Return the process id of systemd itself, below that of `unshare`."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return children.split()[0]

    def control(self, *arguments):
        return ran("nsenter", "-t", self.child(), "-a", "systemctl", *arguments).stdout.strip()

    def printed(self):
        file = Path(f"/proc/{self.child()}/root/run/printed")
        return file.read_text() if file.exists() else ""


@pytest.fixture
def booted(bundle_dir):
    port = free_port()
    env = {
        **{"PATH": os.environ["PATH"], "ROOT": str(ROOT), "BUNDLE": str(bundle_dir)},
        **{"BASE": sys.base_prefix, "PACKAGES": sysconfig.get_path("purelib"), "PORT": str(port)},
        **{"PYTHON": Path(os.path.realpath(sys.executable)).name, "SYSTEMD": str(SYSTEMD)},
    }
    command = ["unshare", "-pfmC", "--mount-proc", "--kill-child", "sh", "-ec", BOOT]
    process = subprocess.Popen(command, env=env)
    try:
        yield Booted(process.pid, port)
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
@pytest.mark.skipif(not can_boot(), reason="needs root, namespaces and systemd")
def test_a_request_starts_the_hardened_server_and_a_restart_refuses_none(booted):
    url = f"http://127.0.0.1:{booted.port}/v2/models/score/infer"
    statuses = []

    def ask():
        statuses.append(httpx.post(url, json=INFER, timeout=60).status_code)
        return statuses[-1]

    listens = f":{booted.port:04X} 00000000:0000 0A "
    wait_for(lambda: listens in Path("/proc/net/tcp").read_text())
    wait_for(lambda: ask() == 200)
    before = booted.control("show", "-P", "MainPID", "prejit@demo.service")
    is_over = threading.Event()

    def go_on():
        while not is_over.is_set():
            ask()

    asking = threading.Thread(target=go_on)
    asking.start()
    try:
        booted.control("restart", "prejit@demo.service")
        wait_for(lambda: booted.printed().count("ready in") == 2)
    finally:
        is_over.set()
        asking.join()
    assert booted.control("show", "-P", "MainPID", "prejit@demo.service") != before
    # The server that ends and the one that loads answer 503; between them requests wait in the queue.
    assert set(statuses) <= {200, 503}
    assert ask() == 200
    assert booted.control("show", "-P", "NRestarts", "prejit@demo.service") == "0"


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd")
@pytest.mark.parametrize("is_datagram", [False, True])
def test_another_socket_of_systemd_is_refused(bundle_dir, is_datagram):
    port = free_port()
    other = "--datagram" if is_datagram else f"--listen=127.0.0.1:{free_port()}"
    activate = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", other]
    serve = [sys.executable, "-m", "prejit.runtime", "serve", str(bundle_dir)]
    with subprocess.Popen([*activate, *serve], stderr=subprocess.PIPE, text=True) as process:
        printed = process.stderr.readline()
        kind = socket.SOCK_DGRAM if is_datagram else socket.SOCK_STREAM
        with socket.socket(socket.AF_INET, kind) as client:
            client.connect(("127.0.0.1", port))
            client.send(b"x")
            printed += process.stderr.read()
    assert process.returncode == 6, printed
    assert ("does not listen at a TCP port" if is_datagram else "expected 1 socket") in printed
    assert "hint: give the .socket unit one ListenStream=" in printed
