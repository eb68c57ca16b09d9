"""The load of a server: when requests arrive, and what each of them asks for.

Everything is drawn from a seed, so that two runs send the same requests at the same times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import msgspec
import numpy as np

from prejit.runtime.errors import UsageError
from prejit.server.telemetry.requestlog import body_of, log_lines

Floats = np.ndarray[Any, np.dtype[np.float64]]

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}
"""The paths of OpenAI's API by the name of `--api`. Functions have `/v2/models/NAME/infer`."""

_WORDS = (
    *("time", "river", "because", "of", "seven", "stone", "the", "open", "window", "and", "light"),
    *("return", "value", "north", "paper", "small", "under", "begin", "letter", "green", "or"),
    "map",
)
"""Words of prompts: short and common, so that most tokenizers have a token for each."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request that is sent as it is.

    Attributes:
        path: its path.
        body: its body.
        headers: its headers.
        is_streamed: True if the answer is a stream of events.
    """

    path: str
    body: bytes
    headers: Mapping[str, str]
    is_streamed: bool


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens: its logarithm is uniform between two bounds.

    Attributes:
        least, most: the bounds; equal: every number is the same.
    """

    least: int
    most: int

    def draw(self, generator: np.random.Generator) -> int:
        """Return a number of tokens."""
        drawn = generator.uniform(math.log(self.least), math.log(self.most + 1))
        return min(int(math.exp(drawn)), self.most)


class Workload(Protocol):
    """A source of arrivals and requests."""

    def gaps(self, count: int, generator: np.random.Generator) -> Floats:
        """Return times between arrivals [count], whose scale does not matter."""

    def requests(self, count: int, generator: np.random.Generator) -> list[LoadRequest]:
        """Return this many requests."""


def arrival_times(gaps: Floats, rate: float) -> Floats:
    """Return when requests arrive [N], in seconds, so that the rate of the whole is exact.

    The last one arrives after N / rate seconds: a random sum would make the rate itself random, by 3 % for
    1,000 requests.
    """
    times: Floats = np.cumsum(gaps)
    times *= len(gaps) / rate / times[-1]
    return times


@final
@dataclass(frozen=True)
class DrawnLoad:
    """Requests whose arrivals and lengths are drawn.

    Attributes:
        api: a key of PATHS, or `infer`.
        model: the model of each request.
        burstiness: the shape of the gamma distribution of the gaps, as in vLLM: 1 is a Poisson process,
            less comes in bursts, more is regular.
        prompt, new: tokens of prompts and answers.
        prefix_tokens: tokens of the text that some prompts begin with.
        prefix_share: the share of prompts that begin with it.
        is_streamed: True if texts are streamed.
        words_per_token: how many words of a prompt make a token of the model.
        more: more fields of each body.
        inputs: the inputs of a function, as the Open Inference Protocol describes them.
        rows: its open sizes.
    """

    api: str
    model: str
    burstiness: float
    prompt: Lengths
    new: Lengths
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    is_streamed: bool = True
    words_per_token: float = 1.0
    more: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[Mapping[str, Any]] = ()
    rows: int = 1

    def gaps(self, count: int, generator: np.random.Generator) -> Floats:
        """Return gaps of a gamma distribution."""
        return generator.gamma(self.burstiness, size=count)

    def requests(self, count: int, generator: np.random.Generator) -> list[LoadRequest]:
        """Return requests with random words."""
        prefix = self._text(self.prefix_tokens, np.random.default_rng(0))
        return [self._request(prefix, generator) for _ in range(count)]

    def _request(self, prefix: str, generator: np.random.Generator) -> LoadRequest:
        if self.api == "infer":
            inputs = [_tensor(each, self.rows, generator) for each in self.inputs]
            return _json_request(f"/v2/models/{self.model}/infer", {"inputs": inputs})
        text = self._text(self.prompt.draw(generator), generator)
        begun = prefix if generator.random() < self.prefix_share else ""
        body: dict[str, Any] = {"model": self.model}
        if self.api == "embeddings":
            return _json_request(PATHS[self.api], body | {"input": begun + text})
        if self.api == "chat":
            roles = (("system", begun), ("user", text))
            body["messages"] = [{"role": role, "content": each} for role, each in roles if each]
        else:
            body["prompt"] = begun + text
        body |= {"max_tokens": self.new.draw(generator), "seed": int(generator.integers(1 << 31))}
        if self.is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return _json_request(PATHS[self.api], body | {**self.more})

    def _text(self, tokens: int, generator: np.random.Generator) -> str:
        count = max(1, round(tokens * self.words_per_token)) if tokens else 0
        words = generator.choice(_WORDS, count)
        return "".join(f"{word} " for word in words)


def _json_request(path: str, body: Mapping[str, Any]) -> LoadRequest:
    headers = {"Content-Type": "application/json"}
    return LoadRequest(path, json.dumps(body).encode(), headers, bool(body.get("stream")))


def _tensor(
    described: Mapping[str, Any], rows: int, generator: np.random.Generator
) -> dict[str, Any]:
    """Return a tensor of small random numbers, whose open sizes are `rows`."""
    shape = [rows if size < 0 else size for size in described["shape"]]
    datatype = described["datatype"]
    if datatype.startswith(("FP", "BF")):
        data: Any = generator.uniform(-1, 1, shape).astype(np.float32)
    else:
        data = generator.integers(0, 2, shape)
        data = data.astype(bool) if datatype == "BOOL" else data
    return {
        "name": described["name"],
        "datatype": datatype,
        "shape": shape,
        "data": data.ravel().tolist(),
    }


@final
class LoggedLoad:
    """The requests of a server's log, which arrive as they did then, or in the same pattern at another rate.

    Attributes:
        path: the log.
        rate: requests a second in it.
        is_streamed: True if all its requests ask for streams.
    """

    def __init__(self, path: str) -> None:
        """Read a log that `prejit serve --log` wrote.

        Raises:
            StoreError: it cannot be read.
            UsageError: it has fewer than two requests that were answered.
        """
        try:
            found = [
                (line["time"] - line["seconds"], _logged(line))
                for line in log_lines(path)
                if line.get("event") == "request" and line["status"] == 200 and line["calls"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: expected requests as `prejit serve` logs them, found another one: {error!r}",
                hint="time, seconds, path, status, headers, body and calls must be there",
            ) from error
        found.sort(key=lambda each: each[0])
        if len(found) < 2 or found[0][0] == found[-1][0]:
            raise UsageError(
                f"{path}: expected at least 2 answered requests at different times, found {len(found)}",
                hint="give a file that `prejit serve --log` wrote",
            )
        self._requests = [request for _, request in found]
        self.path = path
        self.is_streamed = all(request.is_streamed for request in self._requests)
        between = np.diff([time for time, _ in found])
        self.rate = float(1 / between.mean())
        # The first one comes after a gap too, when the log begins again.
        self._gaps = np.concatenate([[between.mean()], between])

    def gaps(self, count: int, generator: np.random.Generator) -> Floats:
        """Return the gaps of the log, from its beginning; behind its end it begins again."""
        return np.resize(self._gaps, count)

    def requests(self, count: int, generator: np.random.Generator) -> list[LoadRequest]:
        """Return the requests of the log, in the same way."""
        return [self._requests[at % len(self._requests)] for at in range(count)]


def _logged(line: Mapping[str, Any]) -> LoadRequest:
    body, is_streamed = body_of(line), False
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        is_streamed = bool(msgspec.json.decode(body)["stream"])
    return LoadRequest(line["path"], body, line["headers"], is_streamed)
