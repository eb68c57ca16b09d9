"""The options of a generation, each defined once: name, type, default, check and help text.

The fields of `Sampling` and `Request` are the definitions; the metadata of a field has its check and its help
text. Everything else follows from them:

    OPTIONS    all options by name, for `resolve` and for the flags of the command line
    Defaults   those that a model's generation_config.json may set (`defaults`)
    Options    the same names and types again, because type checkers need them spelled out; a test compares

This module imports no NumPy, so that the command line can build its flags before anything heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from prejit.runtime.base import arguments
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.records import dataclass, field, fields

if TYPE_CHECKING:
    from prejit.runtime.generation.shared_prefix import Prefix

Prompt = str | Sequence[int]
"""A prompt is text or a list of token ids."""

Namespace = tuple[str, ...]
"""Whose texts share caches. How long a prompt takes says how much of it a cache has, so those who must not
guess each other's prompts have different namespaces."""

TokenMask = Callable[[Sequence[int]], Any]
"""A token mask takes the token ids generated so far. It returns bool [V], true for each token that may come
next, or None if all may."""

MAX_LOGPROBS = 20
"""Maximum number of alternatives per token whose log-probabilities a program returns."""

Check = Callable[[str, Any], Any]
"""A check takes the name and the value of an option. It returns the value in the type that the code computes
with, or raises UsageError."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a generation.

    Attributes:
        name: the keyword argument; the flag of the command line is the same with dashes.
        default: the value if neither the call nor the bundle gives one.
        check: checks and converts a value.
        help: what the command line shows.
        flag: the type of the value on the command line (bool: no value; list: a text, repeatable); None if
            the command line does not have the option, because its value is a Python object.
        published: whether a model's generation_config.json may set it.
    """

    name: str
    default: Any
    check: Check
    help: str = ""
    flag: type | None = None
    published: bool = False


def _option(default: Any, check: Check, text: str = "", **more: Any) -> Any:
    """Return a field that is an option. Its metadata are the attributes of its `Option`."""
    return field(default=default, metadata={"check": check, "help": text, **more})


def _number(expected: str, holds: Callable[[float], bool]) -> Check:
    return lambda name, value: arguments.number(name, value, expected, holds)


def _integer(least: int, *most: int) -> Check:
    return lambda name, value: arguments.integer(name, value, least, *most)


def _optional(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _token_ids(name: str, value: Any) -> frozenset[int]:
    return frozenset(arguments.integers(name, value, sets=True))


def _prefix(name: str, value: Any) -> Prefix:
    from prejit.runtime.generation.shared_prefix import Prefix  # imports NumPy, see above

    return arguments.instance(name, value, Prefix)


def _adapter(name: str, value: Any) -> Any:
    if not hasattr(value, "digest"):  # of what a bundle has read, which imports what few need
        arguments.refuse(name, "a loaded adapter" if name == "adapter" else "read images", value)
    return value


def _source(name: str, value: Any) -> Any:
    from prejit.runtime.generation.source_check import as_source  # imports NumPy, see above

    return as_source(name, value)


def _check_fields(options: Sampling | Request) -> None:
    """Replace each option of a frozen dataclass by its checked value."""
    for each in fields(options):
        if (check := each.metadata.get("check")) is not None:
            object.__setattr__(options, each.name, check(each.name, getattr(options, each.name)))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep only the k most likely tokens; 0: all.
        top_p: keep only the smallest set of tokens that has this much probability; 1: all.
        seed: 0 to 2**64 - 1. The tokens of a request depend on its seed, not on the other rows of its batch.
        min_p: keep only tokens with at least this fraction of the most likely token's probability; 0: all.
        repetition_penalty: divides positive and multiplies negative logits of tokens that are in the prompt
            or were generated; 1: no penalty (transformers, RepetitionPenaltyLogitsProcessor).
        presence_penalty: -2 to 2, subtracted from the logits of generated tokens; 0: no penalty (OpenAI).
        frequency_penalty: -2 to 2, subtracted once for each time a token was generated; 0: no penalty
            (OpenAI).
        logit_bias: a number to add to the logit of a token id; -inf forbids the token. Stored as pairs,
            ordered by token id.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = _option(
        0.0,
        _number("0 or more", lambda value: value >= 0),
        "divide the logits by this; 0 takes the most likely token",
        flag=float,
        published=True,
    )
    top_k: int = _option(
        0,
        _integer(0, 2**31 - 1),
        "keep only the N most likely tokens; 0 keeps all",
        flag=int,
        published=True,
    )
    top_p: float = _option(
        1.0,
        _number("more than 0 and at most 1", lambda value: 0 < value <= 1),
        "keep the smallest set of tokens with this probability; 1 keeps all",
        flag=float,
        published=True,
    )
    seed: int = _option(0, _integer(0, 2**64 - 1), "seed of the random numbers", flag=int)
    min_p: float = _option(
        0.0,
        _number("0 to 1", lambda value: 0 <= value <= 1),
        "keep tokens with at least this fraction of the best token's probability; 0 keeps all",
        flag=float,
        published=True,
    )
    repetition_penalty: float = _option(
        1.0,
        _number("more than 0", lambda value: value > 0),
        "make tokens of the prompt and the answer less likely; 1 is no penalty",
        flag=float,
        published=True,
    )
    presence_penalty: float = _option(
        0.0,
        _number("-2 to 2", lambda value: -2 <= value <= 2),
        "subtract this from the logits of generated tokens; 0 is no penalty",
        flag=float,
    )
    frequency_penalty: float = _option(
        0.0,
        _number("-2 to 2", lambda value: -2 <= value <= 2),
        "subtract this for each time a token was generated; 0 is no penalty",
        flag=float,
    )
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = _option((), arguments.pairs)

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def needs_history(self) -> bool:
        """True if a penalty is on, so that the programs need counts of the tokens so far."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to generate from it.

    Attributes:
        prompt: token ids, at least one.
        sampling: how tokens are chosen.
        max_new_tokens: stop after this many tokens; None: at a stop token or when the longest context is
            full.
        stop_token_ids: stop at any of these; None: at those of the model's generation config.
        logprobs: return the log-probability of each new token and of this many of the most likely tokens, 0
            to 20; None: none at all.
        token_mask: called before every token with the token ids generated so far. Returns bool [V], true for
            each token that may come next, or None for all. Decoding then takes one step per call.
        prompt_lookup: draft tokens by prompt lookup and verify several in one pass, if the bundle has
            `draft_tokens`. The tokens are the same; text that repeats itself comes faster.
        draft: let the bundle's draft model, if it has one, guess tokens while this request is the only one
            of its batch. The tokens are the same. Prompt lookup takes its place.
        prefix: a computed beginning of the prompt, from `Bundle.prefix` of the same bundle.
        source: what an encoder-decoder reads: token ids [N], or an array such as a spectrogram [80, N].
        min_new_tokens: no stop token comes, and no stop string ends the text, before this many tokens.
            Decoding takes one step per call until then.
        adapter: an adapter of the bundle (`Bundle.adapters`), by name; None: none.
        images: what `Generator.resolve` read of those in the prompt; None: there are none.
        namespace: the prompt begins with what a cache has of earlier texts of this namespace only.
        begin_suppress_tokens: token ids that are never the first new token; no vocabulary need have them.

    Raises:
        UsageError: a value has the wrong type or is out of range.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = _option(
        None,
        _optional(_integer(1)),
        "stop after N tokens; without it, at a stop token or at the end of the longest context",
        flag=int,
        published=True,
    )
    stop_token_ids: Collection[int] | None = _option(None, _optional(_token_ids))
    logprobs: int | None = _option(
        None,
        _optional(_integer(0, MAX_LOGPROBS)),
        "with --json: print the log-probability of each token and of the N most likely ones, "
        f"0 to {MAX_LOGPROBS}",
        flag=int,
    )
    token_mask: TokenMask | None = _option(None, arguments.function)
    prompt_lookup: bool = _option(
        False,
        arguments.flag,
        "draft tokens from the text so far; the same tokens, sooner where the text repeats itself",
        flag=bool,
    )
    draft: bool = _option(True, arguments.flag)
    prefix: Prefix | None = _option(None, _optional(_prefix))
    source: Any = _option(
        None,
        _optional(_source),
        "what an encoder-decoder reads: a text, or the path of a .npy file",
        flag=str,
    )
    min_new_tokens: int = _option(
        0,
        _integer(0),
        "no stop token and no stop text ends the answer before N tokens",
        flag=int,
        published=True,
    )
    adapter: Any = _option(
        None,
        _optional(_adapter),
        "the directory of an adapter of PEFT, for a bundle that takes some",
        flag=str,
    )
    images: Any = _option(None, _optional(_adapter))
    namespace: Namespace = ()
    begin_suppress_tokens: Collection[int] | None = _option(
        None, _optional(_token_ids), published=True
    )

    def __post_init__(self) -> None:
        for what, own in (("an adapter", self.adapter), ("images", self.images)):
            if own is not None and self.prefix is not None:
                raise UsageError(f"prefix: expected none beside {what}: others are computed")
            if hasattr(own, "digest"):  # what was computed with it is of no use to others
                object.__setattr__(self, "namespace", (f"{what} {own.digest}", *self.namespace))
        prompt = arguments.integers("prompt", self.prompt, "a list of token ids")
        object.__setattr__(self, "prompt", prompt)
        arguments.instance("sampling", self.sampling, Sampling)
        _check_fields(self)
        if self.images is not None:
            self.images.ends(prompt)  # raises what is wrong with them


def _defined(kind: type) -> list[Option]:
    return [Option(f.name, f.default, **f.metadata) for f in fields(kind) if f.metadata]


OPTIONS = {
    option.name: option
    for option in (
        *_defined(Sampling),
        *_defined(Request),
        Option("stop", (), arguments.strings, "stop before this text; may be repeated", list),
    )
}
"""All options of a generation by name. `stop` is the only one that is not a field: a batch knows no text."""

SAMPLING_OPTIONS = tuple(option.name for option in _defined(Sampling))
"""Names of the options that are fields of `Sampling`."""


class Options(TypedDict, total=False):
    """The options that every generating method of a bundle takes.

    An option that is missing or None takes the value in the bundle's `defaults`, or else its own default.

    Attributes:
        source: what an encoder-decoder reads: text, token ids, or an array; see `Request`.
        adapter: the name of a loaded adapter (`Bundle.adapters`).
        images: those of the prompt, in order, each as `Bundle.embed_images` takes it.
        stop: stop before any of these strings.
        others: see `Sampling` and `Request`.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_new_tokens: int | None
    min_new_tokens: int
    stop_token_ids: Collection[int] | None
    begin_suppress_tokens: Collection[int] | None
    stop: str | Sequence[str]
    logprobs: int | None
    token_mask: TokenMask | None
    prompt_lookup: bool
    draft: bool
    prefix: Prefix | None
    source: Any
    adapter: Any
    images: Any


class Resolved(NamedTuple):
    """The options of a call after defaults were filled in; everything of a request but its prompt.

    Attributes:
        sampling: how tokens are chosen.
        common: the other fields of a `Request` that were given.
        stop: strings to stop before.
    """

    sampling: Sampling
    common: dict[str, Any]
    stop: tuple[str, ...] = ()

    def request(self, prompt: Sequence[int]) -> Request:
        """Return the request for a prompt.

        Raises:
            UsageError: an option has the wrong type or is out of range.
        """
        return Request(prompt, self.sampling, **self.common)


def resolve(options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Resolved:
    """Fill in the options of a call. The value None means that an option is not given.

    Raises:
        UsageError: there is no such option, or a value has the wrong type or is out of range.
    """
    if unknown := options.keys() - OPTIONS.keys():
        from prejit.runtime.base.wording import did_you_mean

        raise UsageError(
            f"expected options of {', '.join(OPTIONS)}; found {min(unknown)!r}"
            + did_you_mean(min(unknown), OPTIONS)
        )
    given = dict(defaults or {})
    suppressed = given.get("logit_bias", {})
    given |= {name: value for name, value in options.items() if value is not None}
    if suppressed:
        given["logit_bias"] = suppressed | dict(arguments.pairs("logit_bias", given["logit_bias"]))
    stop = arguments.strings("stop", given.pop("stop", ()))
    sampling = {name: given.pop(name) for name in SAMPLING_OPTIONS if name in given}
    return Resolved(Sampling(**sampling), given, stop)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Options of a bundle's decoder for requests that do not give their own.

    Names and meanings are those of transformers' GenerationConfig. None: the file does not have the option.
    Its stop tokens are in the bundle's program table instead. Everything else in the file is ignored,
    `max_length` included, because it counts the prompt too.

    Attributes:
        do_sample: whether tokens are drawn at random. If not, temperature is 0; if so, it is 1 by default.
        temperature, top_k, top_p, min_p, repetition_penalty: see `Sampling`.
        max_new_tokens, min_new_tokens, begin_suppress_tokens: see `Request`.
        suppress_tokens: token ids that never come, unless a `logit_bias` of the request says otherwise.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    suppress_tokens: tuple[int, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return these as options of `Bundle.generate`, without those that change nothing."""
        found = {name: getattr(self, name) for name in _PUBLISHED}
        if not self.do_sample:
            del found["temperature"]
        elif self.temperature is None:
            found["temperature"] = 1.0
        found["logit_bias"] = dict.fromkeys(self.suppress_tokens, float("-inf")) or None
        return {name: value for name, value in found.items() if value is not None}


_PUBLISHED = tuple(field.name for field in fields(Defaults) if field.name in OPTIONS)
"""Names of the options that generation_config.json may set; a test compares them with `OPTIONS`."""


def check_generation(content: bytes, path: str) -> Defaults:
    """12. Check that a decoder's generation config is JSON and that the options in it can be used.

    Raises:
        RejectError: the layer is damaged.
    """
    try:
        return parse_defaults(content)
    except ValueError as error:
        raise RejectError(path, str(error)) from error


def parse_defaults(content: bytes) -> Defaults:
    """Read a generation_config.json.

    Raises:
        ValueError: the content is no JSON object, or a value has a wrong type or is out of range.
    """
    try:
        config = json.loads(content)
    except RecursionError:
        raise ValueError("expected JSON, found objects nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"expected a JSON object, found {type(config).__name__}")
    names = ("do_sample", *_PUBLISHED)
    found = {name: config[name] for name in names if config.get(name) is not None}
    if not isinstance(found.get("do_sample", False), bool):
        raise ValueError(f"do_sample: expected true or false, found {found['do_sample']!r:.80}")
    try:
        for name in found.keys() - {"do_sample"}:
            OPTIONS[name].check(name, found[name])
        suppressed = arguments.integers("suppress_tokens", config.get("suppress_tokens") or ())
    except UsageError as error:
        raise ValueError(f"{error!s:.200}") from error
    return Defaults(**found, suppress_tokens=tuple(each for each in suppressed if each >= 0))
