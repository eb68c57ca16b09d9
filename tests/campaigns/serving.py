"""Clients of a server, and a view of its process. Some clients leave early; each has a seed."""

import contextlib
import http.client
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

ANSWER_SECONDS = 90.0
"""How long a client waits for the next bytes. It is longer than any time that the server allows."""
SERVED = frozenset({200, 429, 504})
"""The statuses of a request that a busy server may refuse or end."""
MIB = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ("abc ", "bc", "true", "null ", "12", "name", "é", "[1", "\n ", "ab", "  ", "false")
SHARED = "".join(WORDS) * 4  # what many prompts begin with
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
KEYS = ("first-key-0123456789", "second-key-0123456789", "third-key-0123456789")
"""The keys of the clients: each is a client of its own for fair shares."""


class Tally:
    """Results of all clients, and a random sample of at most `most_samples` answered requests."""

    def __init__(self, most_samples):
        self.most_samples, self._seen = most_samples, 0
        self.statuses, self.abandoned = Counter(), Counter()
        self.failures, self.samples = [], []
        self.texts = self.new_tokens = 0
        self.lock = threading.Lock()

    def got(self, sample, new_tokens, generator):
        with self.lock:
            self.texts += len(sample.texts)
            self.new_tokens += new_tokens
            self._seen += 1
            if len(self.samples) < self.most_samples:
                self.samples.append(sample)
            elif (place := generator.randrange(self._seen)) < self.most_samples:
                self.samples[place] = sample


class Client(threading.Thread):
    def __init__(self, port, number, until, tally, *, pause):
        super().__init__(name=f"client {number}")
        self._port, self._number, self._until = port, number, until
        self._tally, self._pause = tally, pause
        self.random = random.Random(number)
        self._sent = 0
        self._kind = ""

    def run(self):
        while time.monotonic() < self._until:
            [kind] = self.random.choices([*KINDS], [*KINDS.values()])
            self.send(kind)
            time.sleep(self.random.uniform(0, self._pause))

    def send(self, kind):
        self._kind = kind
        self._sent += 1
        try:
            if kind in TEXTS:
                self._text(TEXTS[kind](self) | self._maybe_stream())
            elif kind in REFUSED:
                self._refused(*REFUSED[kind](self))
            else:
                getattr(self, kind)()
        except TimeoutError:
            self._fail(f"no answer for {ANSWER_SECONDS:g} seconds")
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, problem):
        self._tally.failures.append(f"{self._kind} {self._number}-{self._sent}: {problem}")

    def follows_a_schema(self):
        schema = {"name": "answer", "schema": SCHEMA, "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
        body = self.conversation() | {"max_tokens": 60, "response_format": form}
        answer = self._text(body, is_sample=False)
        if answer is not None and answer.reasons == ("stop",):
            found = json.loads(answer.texts[0])
            assert found.keys() == {"name", "ok"}, found
            assert isinstance(found["ok"], bool), found

    def cancels(self):
        with self._asked(self.completion(450) | {"stream": True}) as answer:
            self._expect(answer.status, SERVED)
            for _ in range(self.random.randint(0, 40)):
                if not answer.readline():
                    break
            self._leave()

    def closes(self):
        """Goes while it waits for the whole answer, in order or with a reset."""
        body = self.completion(450) | {"n": self.random.randint(1, 3)}
        with self._connected() as connection:
            connection.request("POST", COMPLETIONS, json.dumps(body), self._headers())
            time.sleep(self.random.uniform(0, 0.2))
            if self.random.random() < 0.5:
                lingering = struct.pack("ii", 1, 0)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, lingering)
            self._leave()

    def _leave(self):
        with self._tally.lock:
            self._tally.abandoned[self._kind] += 1

    def looks(self):
        paths = ("/metrics", "/health/ready", "/health/live", "/v1/models", "/openapi.json", "/")
        with self._connected() as connection:
            connection.request("GET", self.random.choice(paths), headers=self._headers())
            answer = connection.getresponse()
            answer.read()
            self._expect(answer.status, {200})

    def tokenizes(self):
        text = self.words(20)
        with self._connected() as connection:
            tokens = self._exchange(connection, "/tokenize", {"prompt": text})["tokens"]
            # The same connection again: most clients keep theirs.
            found = self._exchange(connection, "/detokenize", {"tokens": tokens}, "-again")
            assert found["prompt"] == text, f"expected {text!r}, found {found['prompt']!r}"

    def responds(self):
        body = {"model": "decoder", "input": self._prompt(), "max_output_tokens": 12}
        with self._asked(body | self._maybe_stream(), path="/v1/responses") as answer:
            content = answer.read()
            self._expect(answer.status, SERVED)
            if answer.status == 200:
                assert b'"status":"' in content, content[-300:]

    def _maybe_stream(self):
        return {"stream": self.random.random() < 0.5}

    def words(self, count):
        return "".join(self.random.choices(WORDS, k=count))

    def _prompt(self):
        words = self.words(self.random.randint(1, 12))
        return (SHARED if self.random.random() < 0.3 else "") + words

    def _sampling(self, most_tokens):
        options = {
            "model": "decoder",
            "max_tokens": self.random.randint(1, most_tokens),
            "seed": self.random.getrandbits(32),
            "temperature": self.random.choice([0, 0, 0.7, 1, 1.5]),
            "priority": self.random.choice([0, 0, 0, 1, 2]),
            "user": f"user {self.random.randrange(4)}",
        }
        for name, value in {"top_p": 0.9, "frequency_penalty": 0.5}.items():
            if self.random.random() < 0.2:
                options[name] = value
        return options

    def completion(self, most_tokens=40):
        return {**self._sampling(most_tokens), "prompt": self._prompt()}

    def conversation(self):
        return {**self._sampling(40), "messages": [{"role": "user", "content": self._prompt()}]}

    def _headers(self, more=""):
        return {
            "Content-Type": "application/json",
            "X-Request-Id": f"{self._number}-{self._sent}{more}",
            "Authorization": f"Bearer {KEYS[self._number % len(KEYS)]}",
        }

    def _connected(self):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        return contextlib.closing(connection)

    @contextlib.contextmanager
    def _asked(self, body, *, path=COMPLETIONS):
        with self._connected() as connection:
            connection.request("POST", path, json.dumps(body), self._headers())
            with connection.getresponse() as answer:
                yield answer

    def _exchange(self, connection, path, body, more=""):
        content = json.dumps(body | {"model": "decoder"})
        connection.request("POST", path, content, self._headers(more))
        answer = connection.getresponse()
        self._expect(answer.status, {200})
        return json.loads(answer.read())

    def _expect(self, status, expected):
        with self._tally.lock:
            self._tally.statuses[status] += 1
        if status not in expected:
            self._fail(f"expected {sorted(expected)}, found {status}")

    def _refused(self, body, status, path=COMPLETIONS):
        with self._asked(body | self._maybe_stream(), path=path) as answer:
            content = answer.read()
            self._expect(answer.status, {status})
        assert json.loads(content)["error"]["message"], "an error without a message"

    def _text(self, body, *, is_sample=True):
        """Ask for texts; return them, or None if the server refused or ended the request."""
        is_streamed = body.get("stream", False)
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        path = CHAT if "messages" in body else COMPLETIONS
        with self._asked(body, path=path) as answer:
            content = answer.read()
        self._expect(answer.status, SERVED)
        if answer.status != 200:
            return None
        chunks = [json.loads(content)] if not is_streamed else _events(content)
        if chunks is None:
            return None  # its time was over in the middle of the stream
        texts, reasons, new_tokens = _texts(chunks, body.get("n", 1))
        about = {"id": f"{self._number}-{self._sent}", "body": body}
        sample = SimpleNamespace(**about, texts=texts, reasons=reasons)
        if is_sample:
            self._tally.got(sample, new_tokens, self.random)
        return sample


TEXTS = {
    "text": lambda c: c.completion(),
    "chat": lambda c: c.conversation(),
    "several": lambda c: c.completion(12) | {"n": c.random.randint(2, 6)},
    "stops": lambda c: c.completion() | {"stop": ["a", "tr", '":'][: c.random.randint(1, 3)]},
    "long_prompt": lambda c: (
        c.completion(16) | {"prompt": SHARED + c.words(c.random.randint(30, 90))}
    ),
    "to_the_end": lambda c: c.completion() | {"max_tokens": 4000, "ignore_eos": True},
    # The time of a request may not be enough for it, behind all others.
    "too_slow": lambda c: c.completion(450) | {"n": 10, "priority": 5, "ignore_eos": True},
}
WRONG = ({"temperature": -3}, {"stop": {"a": 1}}, {"seed": 2**70})
REFUSED = {
    "wrong": lambda c: (c.completion() | c.random.choice(WRONG), 400),
    "too_long": lambda c: (
        {**c.completion(), "prompt": "name " * c.random.randint(600, 3000)},
        400,
    ),
    "full_queue": lambda c: (c.completion(30) | {"n": 100}, 400),
    "unknown_path": lambda c: ({}, 404, "/v1/none"),
}
KINDS = {
    **{"text": 40, "chat": 20, "several": 5, "stops": 8, "long_prompt": 6},
    **{"to_the_end": 1, "too_slow": 0.5, "follows_a_schema": 3, "cancels": 6},
    **{"closes": 4, "wrong": 5, "too_long": 2, "full_queue": 1, "unknown_path": 1},
    **{"looks": 4, "tokenizes": 4, "responds": 4},
}
"""How often a client sends each kind of request, relative to the others."""


def _events(content):
    """Return the chunks of a stream; None: it says that the time of the request was over."""
    lines = [line[6:] for line in content.split(b"\n\n") if line.startswith(b"data: ")]
    found = [json.loads(line) for line in lines if line != b"[DONE]"]
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        assert errors[0]["code"] == "deadline", errors
        return None
    assert lines[-1] == b"[DONE]", f"a stream that ends with {content[-200:]!r}"
    return found


def _texts(chunks, count):
    """Return the texts of an answer, why each ended, and how many tokens they have."""
    texts, reasons = [""] * count, [""] * count
    usage = {}
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            part = choice.get("message") or choice.get("delta") or choice
            texts[choice["index"]] += part.get("content") or part.get("text") or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert all(reasons), f"a text without an end: {reasons}"
    return tuple(texts), tuple(reasons), usage["completion_tokens"]


class Watcher(threading.Thread):
    def __init__(self, process, kept_bytes, every):
        super().__init__(name="watcher")
        self._process, self._kept_bytes, self._every = process, kept_bytes, every
        self._ends = threading.Event()
        self._begun = time.monotonic()
        self.looks = []

    def run(self):
        while not self._ends.wait(self._every):
            self.looks.append(self.look())

    def look(self):
        """Return what a process has now: its memory without what it keeps of prompts on purpose."""
        kept = self._kept_bytes()
        at = Path("/proc") / str(self._process)
        pages = int((at / "statm").read_text().split()[1])
        resident = pages * resource.getpagesize() - kept
        files, threads = (len(os.listdir(at / name)) for name in ("fd", "task"))
        found = {"resident_bytes": resident, "files": files, "threads": threads}
        return SimpleNamespace(seconds=time.monotonic() - self._begun, **found)

    def end(self):
        self._ends.set()
        self.join()


def metric(text, name, label=""):
    """Return the sum of the values of a metric, of those lines that have this label."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, f"no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)
