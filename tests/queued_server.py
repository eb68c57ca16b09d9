"""A server of OpenAI's API whose speed is known exactly: some workers, each with one request at a time."""

import argparse
import asyncio
import heapq
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def queued_server(*options):
    command = [sys.executable, "-m", "tests.queued_server", *map(str, options)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Queue:
    def __init__(self, workers, service, pause):
        self._free = [0.0] * workers
        self._service = service
        self._pause = pause
        self._first = None

    def take(self, now, parts):
        """Return when the parts of a text are ready that is asked for now."""
        self._first = now if self._first is None else self._first
        begun = max(self._worked(now), heapq.heappop(self._free))
        heapq.heappush(self._free, begun + self._service)
        return [self._wall(begun + self._service * part / parts) for part in range(1, parts + 1)]

    def _worked(self, now):
        """Return a time of a clock that stands still during the pause."""
        if self._pause is None or self._first is None:
            return now
        at, seconds = self._first + self._pause[0], self._pause[1]
        return now if now < at else max(at, now - seconds)

    def _wall(self, worked):
        if self._pause is None or self._first is None or worked <= self._first + self._pause[0]:
            return worked
        return worked + self._pause[1]


async def serve(queue):
    loop = asyncio.get_running_loop()

    def chunk(text):
        content = text.encode()
        return b"%x\r\n%s\r\n" % (len(content), content)

    async def answer(writer, body):
        tokens = int(body["max_tokens"])
        times = queue.take(loop.time(), tokens)
        usage = {"prompt_tokens": len(str(body["prompt"]).split()), "completion_tokens": tokens}
        if not body.get("stream"):
            await asyncio.sleep(times[-1] - loop.time())
            whole(writer, {"choices": [{"text": "a" * tokens}], "usage": usage})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at in times:
            await asyncio.sleep(at - loop.time())
            writer.write(chunk('data: {"choices":[{"text":"a"}]}\n\n'))
        end = json.dumps({"choices": [], "usage": usage})
        writer.write(chunk(f"data: {end}\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")

    def whole(writer, value, status="200 OK"):
        content = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)

    async def handle(reader, writer):
        while line := await reader.readline():
            path, length = line.split()[1], 0
            while (header := (await reader.readline()).strip().lower()) != b"":
                if header.startswith(b"content-length:"):
                    length = int(header.partition(b":")[2])
            body = await reader.readexactly(length)
            if path == b"/v1/completions":
                await answer(writer, json.loads(body))
            elif path == b"/v1/models":
                whole(writer, {"data": [{"id": "queue"}]})
            else:
                whole(writer, {"error": {"message": "unknown"}}, "404 Not Found")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--service-ms", type=float, default=40)
    parser.add_argument("--pause", type=float, nargs=2)
    given = parser.parse_args()
    queue = Queue(given.workers, given.service_ms / 1e3, given.pause)
    asyncio.run(serve(queue))
