"""Small random Gemma 3 with images in prompts: checkpoints, pictures and conversations. No JAX, no torch.

The reference has the names and shapes of all tensors that torch publishes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from .image_cases import ImageCase

REFERENCE = Path(__file__).parent / "sight_reference.npz"
STEPS = 24
"""Greedy tokens after each prompt."""

BEGIN, IMAGE, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_SPECIAL = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    *(BEGIN, END, IMAGE),
)
_WORDS = ("\n", "\n\n", "\n\n\n", "\n\n\n\n", " ", *"abcdefghijklmnopqrstuvwxyz", *".,?!-")
VOCABULARY = (*_WORDS, *_SPECIAL)

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] }}
{% if message['content'] is string %}{{ message['content'] | trim }}
{%- else %}{% for item in message['content'] %}
{%- if item['type'] == 'image' %}{{ '<start_of_image>' }}
{%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}
{{- '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PROMPTS = (
    (f"{BEGIN}what is this?", (0,)),
    (f"see {BEGIN} and then {BEGIN}, which is more", (1, 2)),
    (f"a text that is longer than a window, then\n{BEGIN}", (2,)),
    (f"{BEGIN}{BEGIN} both.\n\n{BEGIN}\nand these", (0, 1, 0)),
    ("no picture at all", ()),
)
"""Prompts as texts, each with the pictures of image_cases.py in it."""

MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
    {"role": "model", "content": [{"type": "text", "text": "an image"}]},
    {"role": "user", "content": [{"type": "text", "text": "like"}, {"type": "image"}]},
]
"""A conversation about the pictures 2 and 0."""


@dataclass(frozen=True)
class SightCase(ImageCase):
    """As ImageCase; `write` writes the tokenizer and the chat template, too."""

    def write(self, directory, tensors):
        super().write(directory, tensors)
        write_tokenizer(directory)
        processor = {"image_seq_length": self.config["mm_tokens_per_image"]}
        text = json.dumps({**processor, "processor_class": "Gemma3Processor"})
        (directory / "processor_config.json").write_text(text)


def write_tokenizer(directory):
    """Write a tokenizer of letters, spaces and rows of new lines, with Gemma's special tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import WordLevel

    ids = {word: number for number, word in enumerate(VOCABULARY)}
    made = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in _SPECIAL])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,4}|."), "isolated")
    made.decoder = decoders.Fuse()
    special = [("<bos>", ids["<bos>"])]
    made.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=special)
    made.save(str(directory / "tokenizer.json"))
    marks = {"boi_token": BEGIN, "eoi_token": END, "image_token": IMAGE}
    settings = {
        **{name: f"<{name[:3]}>" for name in ("pad_token", "eos_token", "bos_token", "unk_token")},
        **{"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": marks, **marks},
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def sight_cases():
    return tuple(
        SightCase(name, _config(text, vision, tokens), processor, seed)
        for seed, (name, text, vision, tokens, processor) in enumerate(_CASES, 101)
    )


def _config(text, vision, tokens):
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    return {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**_TEXT, **text},
        "vision_config": {**_VISION, **vision},
        "mm_tokens_per_image": tokens,
        "boi_token_index": ids[BEGIN],
        "eoi_token_index": ids[END],
        "image_token_index": ids[IMAGE],
    }


_TEXT = {
    **{"model_type": "gemma3_text", "vocab_size": len(VOCABULARY) + 3, "hidden_size": 20},
    **{"intermediate_size": 23, "num_hidden_layers": 3, "num_attention_heads": 5},
    **{"num_key_value_heads": 5, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 3},
    **{"query_pre_attn_scalar": 9, "max_position_embeddings": 128},
    **{f"{name}_token_id": VOCABULARY.index(f"<{name}>") for name in ("bos", "eos", "pad")},
}
_VISION = {
    **{"model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 20},
    **{"num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 7},
    "vision_use_head": False,
}


def _processor(size, **others):
    named = {"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": None}
    return {**named, "size": {"height": size, "width": size}, **others}


_CASES = (
    ("gemma3-0", {}, {}, 4, _processor(28)),
    (
        "gemma3-1",
        {"num_key_value_heads": 1, "num_hidden_layers": 4, "sliding_window": 11, "head_dim": 6},
        {"image_size": 45, "patch_size": 5, "num_attention_heads": 2, "vision_use_head": True},
        9,
        _processor(45, image_mean=[0.4, 0.5, 0.6], image_std=[0.3, 0.25, 0.2]),
    ),
    (
        "gemma3-2",
        {"hidden_size": 21, "sliding_window": 3}
        | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 3),
        {"hidden_size": 18, "image_size": 33, "patch_size": 8},
        16,
        _processor(33, image_seq_length=16),
    ),
)
