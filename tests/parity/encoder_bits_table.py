"""Print what int8 and int4 cost encoders, before and after matrices get more bits.

    python -m tests.parity.encoder_bits_table STORIES TEXT

STORIES is the directory of stories260k, whose mean state is an embedding, TEXT a text with its sentences in
lines. The other encoders have random weights. Each row: encoder, dtype, the least cosine of 64 sentences that
decided nothing with all matrices in the dtype, the same as chosen, bits of a weight, matrices by dtype.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import encoder_model
from prejit.compiler.checkpoint.checkpoint import open_encoder
from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.pipeline.measure import encoder_bits, int4_inputs, model_comparison
from prejit.compiler.pipeline.model import ModelFiles, ModelSource

from .encoder_cases import cases
from .encoder_family_cases import add_pooling, wide_cases
from .test_encoder_parity import write


def row(name, directory, dtype, text=None):
    """Return a row of the table."""
    checkpoint, source = open_encoder(directory, out_in=True), config_file.load_encoder(directory)
    shape = model_registry.describe_encoder(source)
    module = model_registry.make_encoder(source, dtype, out_in=True)
    model = ModelSource(ModelFiles(directory, source.layout, True, ()), source, shape, module)
    sizes, words, most = (shape.vocab_size, shape.max_tokens), {}, encoder_bits.MOST_COST
    if text is None:
        most = encoder_bits.MOST_UNTRIED_COST
        deciding = encoder_bits.random_sentences(*sizes)
        measuring = model_comparison.random_sentences(*sizes)
    else:
        words = {**int4_inputs.round_by(model, checkpoint, None, text).words}
        deciding, measuring = (
            model_comparison.read_sentences(
                text, directory / "tokenizer.json", shape.max_tokens, deciding=decides
            )
            for decides in (True, False)
        )
    trials = encoder_bits.Trials(model, checkpoint, *deciding, words)
    places = trials.places()
    chosen = encoder_bits.choose(places, trials.cost_of, most)
    others = encoder_bits.Trials(model, checkpoint, *measuring, words)
    before, after = (
        1 - others.cost_of(dtypes).max()
        for dtypes in ({place: each.dtypes[0] for place, each in places.items()}, chosen)
    )
    stored = model_registry.make_encoder(source, dtype, out_in=True, chosen=chosen)
    return f"{name} | {dtype} | {before:.5f} | {after:.5f} | {quantizing.described(stored)}"


def main(stories, text):
    """Print the table."""
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        encoder_model.make(at / "MiniLM")
        models = [("MiniLM's sizes", at / "MiniLM", None)]
        for wide in wide_cases():
            write(wide, at / wide.name)
            models.append((f"wide {wide.name}", add_pooling(at / wide.name), None))
        for case in cases():
            if case.name == "bert-04":  # which loses most in int8
                (at / case.name).mkdir()
                case.write(at / case.name)
                models.append((case.name, at / case.name, None))
        shutil.copytree(stories, at / "stories")
        config = json.loads((at / "stories" / "config.json").read_text())
        config["architectures"] = ["LlamaModel"]
        (at / "stories" / "config.json").write_text(json.dumps(config))
        models.append(("stories260k", add_pooling(at / "stories"), text))
        for name, model, given in models:
            for dtype in ("int8", "int4"):
                print(row(name, model, dtype, given), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
