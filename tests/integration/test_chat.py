"""A chat from the command line: a real build with a template, its tokens, and a stop string."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prejit.runtime import load

from .conftest import Run, write_manifest

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{{ message.content }}{% if not loop.last %} {% endif %}
{% endfor %}"""


@pytest.fixture(scope="module")
def chatting(run: Run, stories: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260k with a chat template beside it."""
    directory = tmp_path_factory.mktemp("chat")
    source = directory / "model"
    shutil.copytree(stories[0], source)
    source.chmod(0o755)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    manifest = write_manifest(
        directory / "m.toml", source, name="stories", prompt=(16,), context=(128,)
    )
    run("build", manifest, "-o", directory, quick=True)
    return directory / "stories"


def test_a_message_goes_through_the_template_and_a_stop_string_ends_the_answer(
    run: Run, chatting: Path
) -> None:
    options = ("--max-new-tokens", "40", "--json", "--on-mismatch", "error")
    said = json.loads(run("generate", chatting, "--chat", "Once upon a time", *options).stdout)
    same = json.loads(run("generate", chatting, "--prompt", "Once upon a time", *options).stdout)
    # The template spells the BOS that the tokenizer adds to a prompt: it must not come twice.
    assert said["token_ids"] == same["token_ids"]
    assert said["text"] == same["text"]
    stop = said["text"][20:26]
    cut = json.loads(
        run("generate", chatting, "--chat", "Once upon a time", "--stop", stop, *options).stdout
    )
    assert cut["text"] == said["text"].partition(stop)[0]
    assert cut["finish_reason"] == "stop"
    assert len(cut["token_ids"]) < len(said["token_ids"])


def test_a_prompt_is_one_of_three_things(run: Run, chatting: Path) -> None:
    done = run("generate", chatting, "--chat", "a", "--prompt", "b", status=2)
    assert (
        "expected one of --prompt, --prompt-ids, --chat, found --prompt and --chat" in done.stderr
    )


def test_the_bundle_knows_its_template(run: Run, chatting: Path) -> None:
    loaded = load(chatting)
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": "upon"}]
    assert loaded.render_chat_template(messages) == "<s>Once upon"
    assert loaded.apply_chat_template(messages)[0] == 1
    assert "chat.v1+json" in run("inspect", chatting).stdout
    run("verify", chatting)
