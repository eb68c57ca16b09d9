"""uvicorn as this project runs it."""

import asyncio

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
