"""Records what transformers' torch models say of the encoder cases, in float32: the definition of correct.

python -m tests.parity.encoder_record      # needs torch, transformers, safetensors; writes the .npz files

Modules that follow the transformer are written here in torch, from the definitions of sentence-transformers
(sentence_transformers/models/Pooling.py, Dense.py, Normalize.py), which need not be installed.
"""

import tempfile
from pathlib import Path

import numpy as np

from . import encoder_cases, encoder_family_cases


def torch_result(case, directory):
    """Hidden states float32 [ROWS, TOKENS, D], zero behind each row's length; or embeddings [ROWS, D']."""
    import torch
    from transformers import AutoModel

    case.write(directory)
    model, loading = AutoModel.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    missing = [name for name in loading["missing_keys"] if "pooler" not in name]
    assert not missing, missing
    mask = _mask(case)
    with torch.no_grad():
        hidden = model.eval()(
            torch.from_numpy(case.tokens).long(), attention_mask=mask
        ).last_hidden_state
        wanted = (
            _embedding(case, directory, hidden, mask) if case.pooling else hidden * mask[..., None]
        )
    return wanted.numpy()


def _embedding(case, directory, hidden, mask):
    import torch
    from safetensors.torch import load_file

    weight = mask[..., None].float()
    total, count = (hidden * weight).sum(1), weight.sum(1)
    places = torch.arange(1, hidden.shape[1] + 1)[None, :, None] * weight
    last = mask.sum(1) - 1
    modes = {
        "cls_token": hidden[:, 0],
        "max_tokens": hidden.masked_fill(mask[..., None] == 0, -1e9).max(1)[0],
        "mean_tokens": total / count,
        "mean_sqrt_len_tokens": total / count.sqrt(),
        "weightedmean_tokens": (hidden * places).sum(1) / places.sum(1),
        "lasttoken": hidden[torch.arange(len(hidden)), last],
    }
    x = torch.cat([modes[mode] for mode in modes if mode in case.pooling], 1)
    for place, (_, _, bias, activation) in enumerate(case.dense):
        tensors = load_file(directory / f"{place + 2}_Dense" / "model.safetensors")
        x = x @ tensors["linear.weight"].T + (tensors["linear.bias"] if bias else 0)
        x = getattr(torch.nn, activation.rpartition(".")[2])()(x)
    return torch.nn.functional.normalize(x, p=2, dim=1) if case.normalize else x


def _mask(case):
    import torch

    return (torch.arange(case.longest) < torch.from_numpy(case.lengths)[:, None]).long()


def family_result(case):
    """Hidden states float32 [ROWS, TOKENS, D], zero behind each row's length; or scores [ROWS, labels]."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

    config = CONFIG_MAPPING[case.config["model_type"]].from_dict(case.config)
    kind = AutoModelForSequenceClassification if case.scores else AutoModel
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    prefix = f"{model.base_model_prefix}."
    values = {
        name: torch.from_numpy(case.values(name.removeprefix(prefix), tuple(tensor.shape)))
        for name, tensor in model.state_dict().items()
    }
    model.load_state_dict(values)
    mask = _mask(case)
    given = {} if case.segments is None else {"token_type_ids": torch.tensor(case.segments).long()}
    with torch.no_grad():
        found = model(torch.from_numpy(case.tokens).long(), attention_mask=mask, **given)
    wanted = found.logits if case.scores else found.last_hidden_state * mask[..., None]
    return wanted.numpy()


def main():
    """Writes the references: of wide cases the means of valid tokens."""
    cases, families = encoder_cases.cases(), encoder_family_cases
    with tempfile.TemporaryDirectory() as directory:
        plain = {case.name: torch_result(case, Path(directory, case.name)) for case in cases}
    more = {case.name: family_result(case) for case in families.family_cases()}
    wide = {
        case.name: family_result(case).sum(1) / case.lengths[:, None]
        for case in families.wide_cases()
    }
    for file, found in (
        (encoder_cases.REFERENCE, plain),
        (families.REFERENCE, more),
        (families.WIDE_REFERENCE, wide),
    ):
        np.savez_compressed(file, **found)  # type: ignore[arg-type]
        print(f"{file}: {len(found)} cases, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
