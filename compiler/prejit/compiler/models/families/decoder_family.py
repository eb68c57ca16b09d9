"""Differences between the families of decoders, as data (see decoders.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import jax
from flax import nnx

from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.attention import LayerCache, NewTokens
from prejit.compiler.models.layers.experts import ExpertGate, Routing
from prejit.compiler.models.layers.layer_config import Split, require, unsupported
from prejit.compiler.models.layers.linear import RMSNorm


@dataclass(frozen=True)
class DecoderNames:
    """How a family publishes its parts, Llama by default. Names from `attention_norm` on begin at the block.

    Attributes:
        positions: table of learned positions; empty: the family has none.
        attention_norm, mlp_norm: norms of what is read; empty: none.
        state, state_output: of a layer with a state, and of its last product.
        attention: what latent attention's parts are in.
        qkv: query, keys and values; one name if one matrix holds all.
        head_norms: norms of queries and keys; empty: none.
        attention_gate: of a gate of attention's results that is a matrix of its own; empty: none.
        after_attention, after_mlp: norms of what is added; empty: none.
        up: gate and up; one name if one matrix holds both, or if the MLP has no gate.
        shared_up, shared_down: of the MLP beside experts; shared_gate: of its share; empty: none.
        experts_norm: of the norm of what experts read, where `mlp_norm` is of the MLP beside them, and their
            router reads x itself; after_experts, after_shared: norms of what both give; empty: none.
        block_scale: of the factor of a block's results; empty: none.
        sinks: scores of each query head for no position at all; empty: none.
        router, experts_up, experts_down: of a mixture of experts; one matrix holds gate and up of an expert.
        latent_in, latent_out: of the products around experts that work on a shorter vector.
        activation: of an activation with parameters; empty: it has none.
    """

    model: str = "model"
    embedding: str = "embed_tokens"
    positions: str = ""
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    head_norms: tuple[str, ...] = ()
    attention_gate: str = ""
    output: str = "self_attn.o_proj"
    after_attention: str = ""
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    state: str = "mamba"
    state_output: str = "mamba.out_proj"
    after_mlp: str = ""
    sinks: str = ""
    router: str = ""
    experts_up: str = ""
    experts_down: str = ""
    latent_in: str = ""
    latent_out: str = ""
    activation: str = ""
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""
    experts_norm: str = ""
    after_experts: str = ""
    after_shared: str = ""
    block_scale: str = ""

    @property
    def split(self) -> Split:
        """The layers that a mesh splits."""

        def last(*names: str) -> tuple[str, ...]:
            return tuple(name.rpartition(".")[2] for name in names)

        return Split(
            outputs=last(*self.qkv, *self.up),
            inputs=last(self.output, self.down),
            vocabulary=(self.embedding, self.head),
        )


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a family. A text is a key of config.json.

    Attributes:
        count: key of the number of experts.
        inner: key of the width inside an expert.
        chosen: key of the number of experts for each token, or what returns it.
        is_normalized: whether the shares of a token's experts add up to 1.
        has_biases: whether router and experts have biases.
        swiglu: keys of alpha and limit of an ExpertGate, each with what a missing key means; empty: none.
        shared: returns the width of an MLP beside the experts, 0 for none; None: there is none.
        routing: returns how the router chooses, for families that do more than the fields above say.
        layers: returns whether a layer has experts; the others have an MLP.
        is_gated: whether experts have a gate.
        averages: returns whether the results are the mean of the experts' and those of the MLP beside them.
        norms_router: whether the router is a NormedRouter.
        latent: returns the width of what experts read and give; None: the model's.
    """

    count: str = "num_local_experts"
    inner: str = "intermediate_size"
    chosen: str | Callable[[Any], int] = "num_experts_per_tok"
    is_normalized: bool | str = True
    has_biases: bool = False
    swiglu: tuple[tuple[str, float], ...] = ()
    shared: Callable[[Any], int] | None = None
    routing: Callable[[Any], Routing] | None = None
    layers: Callable[[Any, int], bool] = lambda config, layer: True
    is_gated: bool = True
    averages: Callable[[Any], bool] = lambda config: False
    norms_router: bool = False
    latent: Callable[[Any], int | None] = lambda config: None

    def of_token(self, config: Any) -> int:
        """Return the number of experts for each token."""
        chosen = self.chosen
        return int(getattr(config, chosen) if isinstance(chosen, str) else chosen(config))

    def require_enough(self, config: Any) -> None:
        """Check that there are as many experts as a token has."""
        count, chosen = getattr(config, self.count), self.of_token(config)
        if chosen > count:
            key = self.chosen if isinstance(self.chosen, str) else "the experts for each token"
            raise unsupported(
                config, f"{key}: expected at most {self.count} = {count}, found {chosen}"
            )


class StateLayer(Protocol):
    """A layer that keeps a state of the text, in place of keys and values, without its last product.

    Attributes:
        outputs: the width of its results.
    """

    outputs: int

    def make_cache(self, rows: int) -> LayerCache:
        """Return the state of texts without a token: float32 arrays [B, ...]."""
        ...

    def __call__(
        self, x: jax.Array, new: NewTokens, layer: LayerCache, *, last: bool
    ) -> tuple[jax.Array, LayerCache]:
        """Map x [B, T, D] to [B, T, outputs], or to [B, 1, outputs] if `last`.

        Returns:
            the results, and the state after the valid tokens.
        """
        ...


@dataclass(frozen=True)
class States:
    """The layers of a family that keep a state. A text is a key of config.json.

    Attributes:
        make: returns the layer, an nnx.Module.
        layers: returns whether a layer has a state.
        bias: whether its last product has a bias.
    """

    make: Callable[[Any], StateLayer]
    layers: Callable[[Any, int], bool] = lambda config, layer: True
    bias: bool | str = False


@dataclass(frozen=True)
class Factors:
    """Factors of what the parts of a block read and add.

    Attributes:
        attention, state, mlp: of what each adds.
        attended: of what attention reads.
        key: of keys.
        gate: of the MLP's gate, before the activation.
    """

    attention: float = 1.0
    state: float = 1.0
    mlp: float = 1.0
    attended: float = 1.0
    key: float = 1.0
    gate: float = 1.0


_KINDS_OF_LAYERS = {"by type": "layer_types", "by layer": "layer_rope_theta"}
"""The keys that say of each layer how its heads turn."""


@dataclass(frozen=True)
class DecoderFamily:
    """Differences between families. The defaults are Llama's. A text is a key of config.json.

    Attributes:
        names: names of the tensors.
        norm: makes a norm from its width and epsilon.
        epsilon: key of the epsilon of norms, or itself.
        activation: key of the MLP's activation; empty: silu.
        inner: key of the width inside the MLP, or what returns it for a layer; where it is null, the width
            is four times the model's.
        is_gated: whether the MLP has a gate.
        bias, output_bias, mlp_bias: of query, keys and values, of attention's output (None: as `bias`), and
            of the MLP.
        head_bias: whether the language-model head has a bias.
        is_parallel: whether attention and the MLP read the same x. Without a norm of its own the MLP reads
            what attention reads.
        has_qkv_by_head: whether one matrix holds the queries that share the first head of keys, that head and
            its values, then those of the next.
        key_heads: returns the number of heads of keys and values; None: `num_key_value_heads` says it.
        layer_heads: returns the number of those heads in a layer, and the size of all its heads; None: layers
            are alike.
        key_source: returns the earlier layer whose keys and values a layer reads; None: those of its own. No
            layer behind the first such has keys of its own.
        has_values: returns whether a layer has a matrix of values; else they are its keys, before norms.
        norms_values: whether values have a norm without scales.
        norms_turned: returns whether turned queries and keys of a layer have one.
        unused_positions: rows of the table of positions before the first one.
        norms_heads: what the norms of queries and keys see: each head before it turns, each after it turned,
            all heads as one vector, or each before it turns, with scales of its own.
        clip: key of the bound, from both sides, of queries, keys and values; empty: there is none.
        turns: whether heads turn with the position: each as a whole, a part of each, by the layer's type, or
            by the layer's `layer_rope_theta`, which is 0 where they do not.
        rotary: returns how heads of a size turn; None: `rope_parameters` says it.
        growth: returns how the queries of layers grow whose heads do not turn; None: they do not.
        turns_back: whether heads turn in the other direction.
        turns_layer: returns whether heads of a layer turn.
        is_interleaved: whether components 2i and 2i + 1 of a head turn together, rather than i and i + P.
        rope_extra: what else the family reads of `rope_parameters`.
        windows: the layers with a `sliding_window`: none, each, or by the layer's type; or what returns the
            window of a layer.
        chunks: returns the length of the parts of a text whose tokens see none of another part, in a layer;
            None: it has no parts.
        scale: returns the factor of scores of a layer; None: 1 / sqrt(H).
        score_cap, logit_cap: keys of soft bounds of scores and logits; empty: there is none.
        norms_embeddings: whether the norm of the last block's results is one of embeddings, too.
        embedding_scale, logit_scale: return the factor of embeddings and of logits; None: there is none.
        experts: what takes the place of the MLP; None: nothing does.
        states: the layers with a state; None: there are none.
        attends: returns whether a layer has attention; None: those without a state have.
        feeds: returns whether a layer has an MLP or experts.
        factors: returns the factors of what the parts of a block read and add.
        is_latent: whether attention is that of latent_attention.py.
        gates_attention: whether each head of queries has a gate of its results, beside it in one matrix.
        gates_heads: whether the gate that is a matrix of its own has one number for each head.
        layer_embeddings: returns the width of what each layer adds of a token's embedding for this layer
            (decoder_parts.py); 0: there are none.
    """

    names: DecoderNames = DecoderNames()
    norm: Callable[[Any, float], nnx.Module] = RMSNorm
    epsilon: str | float = "rms_norm_eps"
    activation: str = "hidden_act"
    inner: str | Callable[[Any, int], int] = "intermediate_size"
    is_gated: bool = True
    bias: bool | str = False
    output_bias: bool | str | None = None
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    is_parallel: bool | str = False
    has_qkv_by_head: bool = False
    key_heads: Callable[[Any], int] | None = None
    layer_heads: Callable[[Any, int], tuple[int, int]] | None = None
    key_source: Callable[[Any, int], int | None] = lambda config, layer: None
    has_values: Callable[[Any, int], bool] = lambda config, layer: True
    norms_values: bool = False
    norms_turned: Callable[[Any, int], bool] = lambda config, layer: False
    unused_positions: int = 0
    norms_heads: Literal["each", "turned", "all", "own"] = "each"
    clip: str = ""
    turns: Literal["", "whole", "part", "by type", "by layer"] = "whole"
    rotary: Callable[[Any, int], rope.Rotary] | None = None
    growth: Callable[[Any], rope.Rotary | None] = lambda config: None
    turns_back: bool = False
    turns_layer: Callable[[Any, int], bool] = lambda config, layer: True
    is_interleaved: bool | str = False
    rope_extra: rope.Extra = ""
    windows: Literal["", "each", "by type"] | Callable[[Any, int], int | None] = ""
    chunks: Callable[[Any, int], int | None] = lambda config, layer: None
    scale: Callable[[Any, int], float] | None = None
    score_cap: str = ""
    logit_cap: str = ""
    norms_embeddings: bool = False
    embedding_scale: Callable[[Any], float] | None = None
    logit_scale: Callable[[Any], float] | None = None
    experts: Experts | None = None
    states: States | None = None
    attends: Callable[[Any, int], bool] | None = None
    feeds: Callable[[Any, int], bool] = lambda config, layer: True
    factors: Callable[[Any], Factors] = lambda config: Factors()
    is_latent: bool = False
    gates_attention: bool = False
    gates_heads: bool = False
    layer_embeddings: Callable[[Any], int] = lambda config: 0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of config.json that the fields name."""
        found: list[Any] = [
            *(self.epsilon, self.activation, self.inner, self.score_cap, self.logit_cap),
            *(self.bias, self.output_bias, self.mlp_bias, self.head_bias),
            *(self.is_parallel, self.is_interleaved, self.clip),
        ]
        found += [] if self.states is None else [self.states.bias]
        if (mixture := self.experts) is not None:
            found += [key for key, _ in mixture.swiglu]
            found += [mixture.count, mixture.inner, mixture.chosen, mixture.is_normalized]
        return tuple(key for key in found if isinstance(key, str) and key)

    def inner_width(self, config: Any, layer: int) -> int:
        """Return the width inside the MLP of a layer."""
        inner = self.inner
        found = getattr(config, inner) if isinstance(inner, str) else inner(config, layer)
        return int(found or 4 * config.hidden_size)

    def of(self, config: Any, value: bool | float | str) -> Any:
        """Return a value of this family: that of its key in a configuration, or itself."""
        return getattr(config, value) if isinstance(value, str) else value

    def has_state(self, config: Any, layer: int) -> bool:
        """Return whether a layer has a state."""
        return self.states is not None and self.states.layers(config, layer)

    def has_attention(self, config: Any, layer: int) -> bool:
        """Return whether a layer has attention."""
        if self.attends is not None:
            return self.attends(config, layer)
        return not self.has_state(config, layer)

    def heads(self, config: Any, context: int | None = None) -> list[Heads]:
        """Return the heads of each layer, in programs for contexts up to `context`.

        Raises:
            CheckpointError: a window or a kind of rotary positions is not supported.
        """
        count = config.num_hidden_layers
        if self.experts is not None and any(self.experts.layers(config, n) for n in range(count)):
            self.experts.require_enough(config)
        attends = [self.has_attention(config, layer) for layer in range(count)]
        if not any(attends):
            return [NO_HEADS] * count
        queries = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // queries
        windows: list[int | None] = [None] * count
        if callable(self.windows):
            windows = [self.windows(config, layer) for layer in range(count)]
        elif self.windows == "each":
            windows = [_window(config)] * count
        elif self.windows:
            windows = _windows_by_type(config, attends)
        kinds: list[Any] = [None] * count
        if self.turns in _KINDS_OF_LAYERS:
            kinds = getattr(config, _KINDS_OF_LAYERS[self.turns])[:count]
        turned = [self.turns_layer(config, layer) for layer in range(count)]
        keys = getattr(config, "num_key_value_heads", None) or queries
        keys = keys if self.key_heads is None else self.key_heads(config)
        sizes = [(keys, size)] * count
        if self.layer_heads is not None:
            sizes = [self.layer_heads(config, layer) for layer in range(count)]
        ways = [(kind, size) for kind, (_, size) in zip(kinds, sizes, strict=True)]
        of_heads = dict.fromkeys(way for way, there in zip(ways, attends, strict=True) if there)
        rotary = {way: self._rotary(config, *way, context) for way in of_heads}
        if self.is_latent:  # all heads attend to the same latents
            require(config, "num_key_value_heads", config.num_key_value_heads, [queries])
            sizes = [(1, config.kv_lora_rank + size)] * count
        return [
            Heads(
                queries,
                *sizes[layer],
                rotary[way] if turned[layer] else self.growth(config),
                sizes[layer][1] ** -0.5 if self.scale is None else self.scale(config, layer),
                window,
                getattr(config, self.score_cap) if self.score_cap else None,
                self._chunk(config, layer, context),
            )
            if attends[layer]
            else NO_HEADS
            for layer, (way, window) in enumerate(zip(ways, windows, strict=True))
        ]

    def _chunk(self, config: Any, layer: int, context: int | None) -> int | None:
        """Return the length of the parts of a text; None if texts of the context have one."""
        chunk = self.chunks(config, layer)
        return None if chunk is None or (context is not None and context <= chunk) else chunk

    def _rotary(self, config: Any, kind: Any, size: int, context: int | None) -> rope.Rotary | None:
        """Return how the heads of a kind of layers turn; None: they do not."""
        if self.rotary is not None:
            return self.rotary(config, size)
        if not self.turns or kind == 0:
            return None
        found = rope.frequencies(
            config,
            size,
            context=context,
            layer_type=kind if self.turns == "by type" else None,
            partial=self.turns == "part",
            interleaved=bool(self.of(config, self.is_interleaved)),
            extra=self.rope_extra,
            theta=kind if self.turns == "by layer" else None,
        )
        back = tuple(-each for each in found.frequencies)
        return replace(found, frequencies=back) if self.turns_back else found


@dataclass(frozen=True)
class MixtureSettings:
    """How the router of a layer chooses experts, their gate, and `Experts.averages`."""

    routing: Routing
    gate: ExpertGate
    averages: bool


@dataclass(frozen=True)
class Heads:
    """The heads of a layer.

    Attributes:
        queries: N.
        keys: K, which divides N.
        size: H.
        rotary: how they turn with the position; None: they do not.
        scale: factor of the scores.
        window: number of tokens that each one sees, itself included; None for all up to its own.
        cap: soft bound of the scores; None for no bound.
        chunk: length of the parts of a text whose tokens see none of another part; None: it has no parts.
    """

    queries: int
    keys: int
    size: int
    rotary: rope.Rotary | None
    scale: float
    window: int | None = None
    cap: float | None = None
    chunk: int | None = None


NO_HEADS = Heads(0, 0, 0, None, 1.0)
"""The heads of a layer without attention."""


def _window(config: Any) -> int | None:
    size: int | None = config.sliding_window
    if size is not None and size < 1:
        raise unsupported(config, f"sliding_window: expected null or at least 1, found {size}")
    return size


def _windows_by_type(config: Any, attends: list[bool]) -> list[int | None]:
    """Return the window of each layer, by `layer_types`; `attends` says which have attention."""
    kinds = config.layer_types
    for kind in itertools.compress(kinds, attends):
        require(config, "layer_types", kind, ["full_attention", "sliding_attention"])
    if "sliding_attention" not in kinds:
        return [None] * len(kinds)
    size = _window(config)
    if size is None:
        raise unsupported(
            config,
            'sliding_window: expected a number, as layer_types has "sliding_attention", found null',
        )
    return [size if kind == "sliding_attention" else None for kind in kinds]
