"""Choose the next token on the device, in every program of a decoder that returns tokens.

The logits are changed in this order (transformers, generation/logits_process.py and the order of
generation/utils.py; vLLM, v1/sample/sampler.py, for steps that transformers does not have):

1. Repetition penalty (CTRL, arXiv:1909.05858, section 4.1; RepetitionPenaltyLogitsProcessor), for tokens of
   the prompt and generated ones: positive logits are divided by it, negative ones multiplied.
2. Frequency and presence penalty (OpenAI's API reference), for generated tokens only:
   `count * frequency + (count > 0) * presence` is subtracted.
3. Bias is added: OpenAI's logit_bias, and token masks as -inf.
4. Greedy rows take the largest logit. The others apply temperature, top-k, top-p and min-p
   (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper), then draw.

Tokens of equal logits all stay, where transformers may keep some of them. The best token always stays. There
is no sort, because XLA:CPU needs more time for one than for the whole decode step of a small model: bisection
over the 2**32 float values finds the smallest logit that stays, exactly. A step that no row needs is skipped.
On CPUs with kernels one of them does 3 and 4: XLA wakes its threads for such passes, on the helpers' cores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from prejit.compiler.models.layers import kernel_calls
from prejit.compiler.models.layers.attention import each_row

TOP_LOGPROBS = 20
"""Number of most likely tokens returned with their log-probabilities; all if the vocabulary is smaller."""

_PADDED_TO = 128
_LARGEST_FLOAT = float(jnp.finfo(jnp.float32).max)


class SamplingInputs(NamedTuple):
    """The sampling options of each row: arguments of a program, in this order.

    Attributes:
        temperature: float32 [B]; 0 takes the most likely token.
        top_k: int32 [B]; 0 keeps all.
        top_p: float32 [B]; 1 keeps all.
        min_p: float32 [B], 0 to 1, relative to the probability of the most likely token; 0 keeps all.
        repetition_penalty: float32 [B], more than 0; 1 is none.
        presence_penalty: float32 [B]; 0 is none.
        frequency_penalty: float32 [B]; 0 is none.
        seed: uint32 [B, 2]; a threefry key for each row.
        bias: float32 [B, V], added to the logits; -inf forbids a token.
        logprobs: int32 [B]; 0 if log-probabilities are not needed.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array
    bias: jax.Array
    logprobs: jax.Array


class Chosen(NamedTuple):
    """The next token of each row; n is TOP_LOGPROBS, or V if that is smaller.

    Log-probabilities are those of the model's own logits, before penalties, bias and temperature (vLLM's
    default). If no row needs them, they and the top tokens are 0.

    Attributes:
        token: int32 [B]; -1 if the row's bias forbids every token, a logit is NaN, or the largest logit is
            infinite.
        logprob: float32 [B], of the token; -inf if the bias forbids every token.
        top_tokens: int32 [B, n], the most likely first.
        top_logprobs: float32 [B, n].
    """

    token: jax.Array
    logprob: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array


def sampling_shapes(batch: int, vocab: int) -> SamplingInputs:
    """Return shapes and dtypes of the arguments."""

    def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *sizes), dtype)

    return SamplingInputs(
        temperature=shape(jnp.float32),
        top_k=shape(jnp.int32),
        top_p=shape(jnp.float32),
        min_p=shape(jnp.float32),
        repetition_penalty=shape(jnp.float32),
        presence_penalty=shape(jnp.float32),
        frequency_penalty=shape(jnp.float32),
        seed=shape(jnp.uint32, 2),
        bias=shape(jnp.float32, vocab),
        logprobs=shape(jnp.int32),
    )


def sample(
    logits: jax.Array, sampling: SamplingInputs, history: jax.Array, position: jax.Array
) -> Chosen:
    """Choose the next token of each row.

    Args:
        logits: float32 [B, V], from the model.
        sampling: the options of each row.
        history: int32 [B, V], twice the number of times that the token was generated, plus 1 if it is in the
            prompt.
        position: int32 [B], the position of the new token. Position and seed decide the random numbers, so a
            token depends neither on its batch nor on the chunks of its prompt.
    """
    return _sample(logits, sampling, lambda: history, position)


def sample_each(
    logits: jax.Array,
    sampling: SamplingInputs,
    tokens: jax.Array,
    history: jax.Array,
    start: jax.Array,
) -> Chosen:
    """Return what `sample` would choose after each of several tokens.

    Args:
        logits: float32 [B, T, V], after each token.
        sampling: the options of each row.
        tokens: int32 [B, T].
        history: int32 [B, V], before the first of these tokens.
        start: int32 [B], the position of the first of these tokens.

    Returns:
        Arrays whose first axes are [T, B].
    """
    rows, count, vocab = logits.shape

    def repeated(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, count, axis=0)

    def with_tokens() -> jax.Array:
        counted = jax.nn.one_hot(tokens, vocab, dtype=jnp.int32)
        return (history[:, None] + 2 * jnp.cumsum(counted, 1)).reshape(-1, vocab)

    chosen = _sample(
        logits.reshape(-1, vocab),
        jax.tree.map(repeated, sampling),
        with_tokens,
        (start[:, None] + jnp.arange(1, count + 1)).reshape(-1),
    )
    return jax.tree.map(
        lambda values: values.reshape(rows, count, *values.shape[1:]).swapaxes(0, 1), chosen
    )


def _sample(
    logits: jax.Array,
    sampling: SamplingInputs,
    history: Callable[[], jax.Array],
    position: jax.Array,
) -> Chosen:
    """Do what `sample` does, computing the history only if a row has penalties."""
    penalised = jnp.any(
        (sampling.repetition_penalty != 1)
        | (sampling.presence_penalty != 0)
        | (sampling.frequency_penalty != 0)
    )

    # Both branches use the logits: one that returned them unchanged would copy them.
    def adjusted(use: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        return lax.cond(
            penalised,
            lambda: use(_penalised(logits, sampling, history()), sampling.bias),
            lambda: use(logits, sampling.bias),
        )

    if kernel_calls.has_kernels():
        options = (*sampling[:4], sampling.seed)
        token = adjusted(lambda values, bias: kernel_calls.choose(values, bias, options, position))
    else:
        token = _choose(adjusted(jnp.add), sampling, position)

    number = min(TOP_LOGPROBS, logits.shape[1])
    rows = len(logits)

    def measured() -> tuple[jax.Array, jax.Array, jax.Array]:
        total = jax.nn.logsumexp(logits, -1)
        logprob = jnp.where(token < 0, -jnp.inf, _at(logits, jnp.maximum(token, 0)) - total)
        values, tokens = lax.top_k(logits, number)
        return logprob, tokens.astype(jnp.int32), values - total[:, None]

    def nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        return (
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((rows, number), jnp.int32),
            jnp.zeros((rows, number), jnp.float32),
        )

    return Chosen(token, *lax.cond(jnp.any(sampling.logprobs > 0), measured, nothing))


def _choose(allowed: jax.Array, sampling: SamplingInputs, position: jax.Array) -> jax.Array:
    """Return the token of each row, or -1, from logits after penalties and bias: kernels/choose.h in XLA."""
    greedy, vocab = _first_largest(allowed), allowed.shape[1]

    def draw() -> jax.Array:
        # XLA:CPU does not vectorize a loop over one row of odd size: 50257 logits take 3.9 ms, padded 0.8.
        padding = -vocab % _PADDED_TO
        padded = jnp.pad(allowed, ((0, 0), (0, padding)), constant_values=-jnp.inf)
        noise = _gumbel(sampling.seed, position, padded.shape[1])
        drawn = _first_largest(_kept(padded, sampling) + noise)
        return jnp.where((sampling.temperature > 0) & (greedy < vocab), drawn, greedy)

    token = lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: greedy)
    return jnp.where(token >= vocab, -1, token)


def record(history: jax.Array, token: jax.Array, live: jax.Array) -> jax.Array:
    """Return the history with each live row's token counted once more, in place if it is donated.

    Args:
        history: int32 [B, V], as in `sample`.
        token: int32 [B]; -1 stands for no token.
        live: int32 or bool [B].
    """
    counted = (live != 0) & (token >= 0)

    def count(row: int | jax.Array, history: jax.Array) -> jax.Array:
        at = (row, jnp.maximum(token[row], 0))
        found = lax.dynamic_slice(history, at, (1, 1)) + jnp.where(counted[row], 2, 0)
        return lax.dynamic_update_slice(history, found, at)

    # XLA:CPU compiles a scatter to a loop, which costs more.
    return each_row(len(history), count, history)


def _penalised(logits: jax.Array, sampling: SamplingInputs, history: jax.Array) -> jax.Array:
    """Return logits [B, V] after penalties."""
    repetition = sampling.repetition_penalty[:, None]
    scaled = jnp.where(logits < 0, logits * repetition, logits / repetition)
    # Infinity would forbid a token, or all others. Rows without the penalty keep every bit.
    scaled = jnp.clip(scaled, -_LARGEST_FLOAT, _LARGEST_FLOAT)
    logits = jnp.where((history > 0) & (repetition != 1), scaled, logits)
    count = history >> 1
    logits = logits - count * sampling.frequency_penalty[:, None]
    return logits - jnp.where(count > 0, sampling.presence_penalty[:, None], 0)


def _kept(adjusted: jax.Array, sampling: SamplingInputs) -> jax.Array:
    """Return the logits [B, V] to draw from: the largest is 0, and -inf cannot be drawn."""
    # The largest becomes 0 first, so that no temperature makes two logits infinite and equal. Rows that may
    # choose nothing become NaN, and the filters keep none of them; so do greedy rows, which do not draw.
    shifted = adjusted - jnp.max(adjusted, -1, keepdims=True)
    scaled = shifted / sampling.temperature[:, None]
    return _filter(scaled, sampling.top_k, sampling.top_p, sampling.min_p)


def _first_largest(values: jax.Array) -> jax.Array:
    """Return the index of the largest value of each row, int32 [B]: the first of equal ones.

    It is V if a value is NaN, the largest is infinite, or all are -inf. XLA:CPU does not vectorize
    jnp.argmax: for 50257 values it takes 0.25 ms, these passes 0.09. Its maximum of wide rows may lose NaN.
    """
    number = values.shape[1]
    largest = jnp.max(values, -1, keepdims=True)
    is_nan = jnp.any(jnp.isnan(values), -1, keepdims=True)
    at_largest = (values == largest) & jnp.isfinite(largest) & ~is_nan
    return jnp.min(jnp.where(at_largest, lax.iota(jnp.int32, number), number), -1)


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    """Return the value of each row's token, [B], from values [B, V]."""
    return jnp.take_along_axis(values, token[:, None], 1, mode="clip")[:, 0]


def _gumbel(seed: jax.Array, position: jax.Array, number: int) -> jax.Array:
    """Return noise [B, V] for the Gumbel-max trick (Gumbel 1954): the largest sum is a softmax draw."""
    bits = _threefry(
        (seed[:, :1], seed[:, 1:]),
        (position[:, None].astype(jnp.uint32), lax.iota(jnp.uint32, number)[None]),
    )
    # The midpoints of 2**23 equal intervals: never 0, never 1.
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
    return -jnp.log(-jnp.log(uniform))


def _threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Return the first word of Threefry-2x32 with 20 rounds, uint32 (Salmon et al. 2011).

    It equals jax.random's, which loops over the rounds on CPUs. Unrolled, all noise is one kernel: that saves
    85 of the 776 kB of a program, and a third of the time.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = x ^ (y << turn | y >> (32 - turn))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x


def _filter(logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Logits with -inf for every token that top-k, of what is left top-p, or min-p takes away.

    `logits` is float32 [B, V], and the largest of each row is 0. For the others see SamplingInputs.
    """
    order, rows = _sortable(logits), len(logits)

    def above_k() -> jax.Array:
        found = _largest(lambda low: jnp.sum(order >= low[:, None], -1) >= top_k, rows)
        return jnp.where(top_k > 0, found, 0)

    # Every key is at least 0, so a lowest key of 0 keeps all tokens.
    everything = jnp.zeros(rows, jnp.uint32)
    low = lax.cond(jnp.any(top_k > 0), above_k, lambda: everything)
    logits = jnp.where(order >= low[:, None], logits, -jnp.inf)

    def above_p() -> jax.Array:
        weight = jnp.exp(logits)
        enough = top_p * jnp.sum(weight, -1)
        found = _largest(
            lambda low: jnp.sum(weight, -1, where=order >= low[:, None]) >= enough, rows
        )
        # The best token's key: a top-p that rounds to 0 would take this token away too.
        return jnp.where(top_p < 1, jnp.minimum(found, _sortable(jnp.float32(0))), 0)

    low = lax.cond(jnp.any(top_p < 1), above_p, lambda: everything)
    # The best token has weight 1, so min-p asks for this weight; its logarithm is -inf for 0.
    kept = (order >= low[:, None]) & (logits >= jnp.log(min_p)[:, None])
    return jnp.where(kept, logits, -jnp.inf)


def _sortable(values: jax.Array) -> jax.Array:
    """Return uint32 keys in the order of float32 values: sign bit flipped, negative values mirrored."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Return the largest uint32 [B] for which `holds`, which is true up to some value and false above.

    It sets one bit after another, the highest first: 32 passes over the rows.
    """

    def set_bit(place: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (jnp.uint32(1 << 31) >> place.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, found)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(rows, jnp.uint32))
