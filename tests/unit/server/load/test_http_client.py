"""A client that waits without end, or asks at another place than it was given, hides what a server does."""

import asyncio

from prejit.server.load.http_client import HttpClient
from prejit.server.load.workload import LoadRequest


def test_a_unix_socket_is_asked_and_an_answer_has_a_time_limit(tmp_path):
    path = tmp_path / "admin"
    heads = []

    async def answer(reader, writer):
        while head := await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            if head.startswith(b"POST /quick"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async def asked():
        client = HttpClient(f"unix:{path}")
        quick, slow = (LoadRequest(f"/{name}", b"", {}, False) for name in ("quick", "slow"))
        async with await asyncio.start_unix_server(answer, path):
            try:
                return (
                    await client.exchange_within(quick, 60),
                    await client.exchange_within(slow, 0.05),
                )
            finally:
                client.close()

    found, late = asyncio.run(asked())
    assert (found.status, found.body, found.failed) == (200, b"ok", "")
    assert late.failed == "no answer within 0.05 s"
    assert heads == [b"POST /quick HTTP/1.1\r\n", b"POST /slow HTTP/1.1\r\n"]
