"""Streams of one request all end when one fails, is refused, or nobody reads; log-probabilities by text."""

import asyncio

import pytest

from prejit.runtime.errors import NumbersError, QueueFullError
from prejit.runtime.generation.generate import Piece
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.server.engine.fair_queue import NO_LIMITS, Limits
from prejit.server.gate.http_errors import ApiError
from prejit.server.openai.engine_calls import TextCall, pieces
from prejit.server.openai.logprobs import CompletionLogprobLists, TokenNames


class Stream:
    """A stream of given pieces, which waits forever after them."""

    def __init__(self, found):
        self.found = found
        self.closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.found:
            await asyncio.sleep(3600)
        return self.found.pop(0)

    async def aclose(self):
        self.closed = True


class Engine:
    queue_size = 4

    def __init__(self, *streams):
        self.left = list(streams)
        self.seeds = []

    def stream(self, prompt, **options):
        if not self.left:
            raise QueueFullError("full", retry_after=1)
        self.seeds.append(options["seed"])
        return self.left.pop(0)


def call(engine, choices, limits=NO_LIMITS):
    return TextCall(engine, [1], {"seed": 2**64 - 1}, choices, None, {"limits": limits})


async def take(calls, count):
    found = []
    async with pieces(calls) as given:
        async for place, piece in given:
            found.append((place, piece.text))
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("choices", [1, 2])
def test_streams_are_closed_when_nobody_reads_further_or_their_logits_are_no_numbers(choices):
    streams = [Stream([Piece(1, str(place))]) for place in range(choices)]
    engine = Engine(*streams)
    found = asyncio.run(take([call(engine, choices)], choices))
    assert sorted(found) == [(place, str(place)) for place in range(choices)]
    assert engine.seeds == [2**64 - 1, 0][:choices]
    odd = [Stream([Piece(None, "", "nan")]), Stream([])][:choices]
    with pytest.raises(NumbersError):
        asyncio.run(take([call(Engine(*odd), choices)], 1))
    assert all(stream.closed for stream in (*streams, *odd))


def test_streams_are_closed_when_a_later_one_is_refused():
    streams = Stream([]), Stream([])
    first, second = map(Engine, streams)
    with pytest.raises(QueueFullError):
        asyncio.run(take([call(first, 1), call(second, 2)], 1))
    assert all(stream.closed for stream in streams)


def test_more_texts_than_may_wait_are_refused_for_ever():
    """QueueFullError would say to try again."""
    for choices, limits, message in (
        ((2, 3), NO_LIMITS, r"n: expected at most 4 .*, found 5"),
        ((3,), Limits(waiting=2), r"at most 2 .* requests of this key .*, found 3"),
    ):
        engine = Engine(*(Stream([]) for _ in range(5)))
        with pytest.raises(ApiError, match=message) as error:
            asyncio.run(take([call(engine, count, limits) for count in choices], 1))
        assert error.value.status == 400
        assert engine.seeds == []


@pytest.mark.parametrize(
    ("prompt", "new", "text", "offsets"),
    [
        # A special token that the text does not have, and one that it spells out.
        ([3, 2], [0, 1, 2], "aéa", [0, 0, 1, 1, 2]),
        ([3, 2], [2], "<s>aa", [0, 3, 4]),
        # The text does not begin with the tokenizer's space.
        ([4, 4], [3, 2], "a aa", [0, 1, 3, 3]),
        ([4, 4], [], " a a", [0, 2]),
        ([2], [2, 4], "", [0, 1, 2]),
        ([2], [1, 0, 0, 2], "", [0, 1, 2, 3, 4]),  # bytes that are no characters
        ([], [4, 0, 1, 2], " aéa", [0, 2, 2, 3]),
    ],
)
def test_offsets_lead_into_the_text(prompt, new, text, offsets):
    names = TokenNames((b"\xc3", b"\xa9", b"a", b"<s>", b" a"), {"<s>": 3}.get)
    lists, found = CompletionLogprobLists(names, 0), [Logprob(each, 0.0, ()) for each in prompt[1:]]
    answered = [Logprob(each, 0.0, ()) for each in new]
    got = lists.take(found + answered[:1], prompt, text).text_offset
    for each in answered[1:]:
        got = got + lists.take([each]).text_offset
    assert got == offsets


def test_tokens_of_one_text_keep_the_log_probability_of_the_most_likely():
    names = TokenNames((b"\xc3", b"\xa9", b"a"))  # the first two are parts of a character
    found = Logprob(1, -2.0, ((0, -0.5), (1, -2.0), (2, -3.0)))
    [likely] = CompletionLogprobLists(names, 3).take([found]).top_logprobs
    assert likely == {"\ufffd": -0.5, "a": -3.0}
