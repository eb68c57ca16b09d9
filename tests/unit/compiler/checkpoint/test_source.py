"""Which files of a repository of the Hub are fetched. The Hub itself cannot be reached from here."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from prejit.compiler.checkpoint.source import resolve_source

USED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "LICENSE.md"),
    *("1_Pooling/config.json", "model.safetensors.index.json"),
)


@pytest.mark.parametrize("weights", [True, False])
def test_all_files_that_a_build_reads_are_fetched(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()
    asked: list[list[str]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repository, revision) == ("org/name", "v1")
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_source("hf://org/name@v1", Path(), weights=weights) == tmp_path
    [patterns] = asked

    def fetched(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in patterns)

    assert all(map(fetched, USED))
    assert not any(map(fetched, ["pytorch_model.bin", "flax_model.msgpack", "tf_model.h5"]))
    assert all(fetched(f"model{of}.safetensors") == weights for of in ("", "-00001-of-00002"))
