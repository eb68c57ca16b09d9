"""uvicorn as this project runs it."""

import asyncio
import signal
import subprocess
import sys

from prejit.server.gate.server_settings import Settings
from prejit.server.http.app import make_app
from prejit.server.http.uvicorn_server import _Server, configure
from prejit.server.served.served import Models


def test_an_idle_server_rests_and_ends_at_once_when_it_is_stopped():
    """uvicorn's own loop wakes ten times a second, and takes that time from a model that decodes."""
    models, settings = Models(), Settings()

    async def count_until_stopped():
        server = _Server(configure(make_app(models, settings)), models, settings, lambda: None)
        ticks = []
        on_tick = server.on_tick

        async def counted(counter):
            ticks.append(counter)
            return await on_tick(counter)

        server.on_tick = counted
        running = asyncio.create_task(server.main_loop())
        await asyncio.sleep(0.5)
        seen = len(ticks)
        assert server.server_state.default_headers[0][0] == b"date"
        server.stop()
        await asyncio.wait_for(running, 60)
        return seen

    assert asyncio.run(count_until_stopped()) == 1


ENDING = """
import os, signal, socket, time
from types import SimpleNamespace
from prejit.server.gate.server_settings import Settings
from prejit.server.http.uvicorn_server import run
from prejit.server.served.served import Models

def send(number):
    os.kill(os.getpid(), number)

models = Models()
models.close = lambda: (send(signal.SIGINT), time.sleep(60))  # as an engine whose step takes long
loading = SimpleNamespace(answers=lambda: send(signal.SIGTERM), when_failed=lambda call: None)
listening = socket.create_server(("127.0.0.1", 0))
run(models, Settings(), listening, loading, admin=None, reopen=None, look_again=None)
"""


def test_a_second_signal_ends_a_server_at_once_whose_loop_waits_for_an_engine():
    ended = subprocess.run([sys.executable, "-c", ENDING], stderr=subprocess.PIPE, timeout=30)
    assert ended.returncode == 128 + signal.SIGINT
    assert b"SIGINT came again: ending at once" in ended.stderr
