"""GPT-2 from a snapshot of a hub, in plain JAX: what an empty server does without prejit.

    peers/hub_child.py REPOSITORY                32 tokens in, 64 out
    peers/hub_child.py REPOSITORY --tokenizer    the same, with a text in, and transformers' tokenizer

`HF_ENDPOINT` names the hub, and `HF_HOME` where the snapshot goes.
"""

from __future__ import annotations

import sys

from huggingface_hub import snapshot_download

from benchmarks.harness import workload
from benchmarks.peers import jax_baseline

TEXT = "A text of thirty-two tokens, each of which is a pair of letters."


def main(repository: str, *options: str) -> None:
    """Run the job of the module's docstring."""
    prompts = workload.prompts(workload.PROMPT_TOKENS, 1)
    if options:
        from transformers import AutoTokenizer

        path = snapshot_download(repository)
        ids = AutoTokenizer.from_pretrained(path)(TEXT).input_ids
        prompts = [ids[: workload.PROMPT_TOKENS]]
        assert len(prompts[0]) == workload.PROMPT_TOKENS, len(ids)
    else:
        path = snapshot_download(repository)
    weights = jax_baseline.load_weights(f"{path}/model.safetensors")
    tokens = jax_baseline.generate(weights, prompts, workload.NEW_TOKENS)
    workload.say_last(**workload.stream(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
