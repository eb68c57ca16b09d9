"""Records what transformers' torch models say of the cases of encoder families, in float32.

python -m tests.parity.encoder_family_record      # needs torch, transformers; writes the .npz
"""

import numpy as np

from .encoder_family_cases import (
    REFERENCE,
    TOKENS,
    WIDE_REFERENCE,
    family_cases,
    wide_cases,
)


def torch_result(case):
    """Hidden states float32 [ROWS, TOKENS, D], zero behind each row's length; or scores [ROWS, labels]."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

    config = CONFIG_MAPPING[case.config["model_type"]].from_dict(case.config)
    kind = AutoModelForSequenceClassification if case.scores else AutoModel
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    prefix = f"{model.base_model_prefix}."
    model.load_state_dict(
        {
            name: torch.from_numpy(case.values(name.removeprefix(prefix), tuple(tensor.shape)))
            for name, tensor in model.state_dict().items()
        }
    )
    lengths = torch.from_numpy(case.lengths).long()
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    given = {} if case.segments is None else {"token_type_ids": torch.tensor(case.segments).long()}
    with torch.no_grad():
        found = model(torch.from_numpy(case.tokens).long(), attention_mask=mask, **given)
    wanted = found.logits if case.scores else found.last_hidden_state * mask[..., None]
    return wanted.numpy()


def main():
    """Writes the references: of wide cases the means of valid tokens."""
    recorded = {case.name: torch_result(case) for case in family_cases()}
    wide = {case.name: torch_result(case).sum(1) / case.lengths[:, None] for case in wide_cases()}
    for file, found in ((REFERENCE, recorded), (WIDE_REFERENCE, wide)):
        np.savez_compressed(file, **found)  # type: ignore[arg-type]
        print(f"{file}: {len(found)} cases, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
