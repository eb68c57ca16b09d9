"""A chat from the command line: a real build with a template, its tokens, and a stop string."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prejit.runtime import __main__, load

from .conftest import Run


def test_a_message_goes_through_the_template_and_a_stop_string_ends_the_answer(
    run: Run, stories_dir: Path
) -> None:
    options = ("--max-new-tokens", "40", "--json", "--on-mismatch", "error")
    chat = ("generate", stories_dir, "--chat", "Once upon a time", *options)
    said = json.loads(run(*chat).stdout)
    bundle = load(stories_dir, on_mismatch="error")
    same = bundle.generate("Once upon a time", max_new_tokens=40)
    # The template spells the BOS that the tokenizer adds to a prompt: it must not come twice.
    assert (said["token_ids"], said["text"]) == ([*same.token_ids], same.text)
    stop = said["text"][20:26]
    cut = json.loads(run(*chat, "--stop", stop).stdout)
    assert (cut["text"], cut["finish_reason"]) == (said["text"].partition(stop)[0], "stop")
    assert len(cut["token_ids"]) < len(said["token_ids"])


def test_the_bundle_knows_its_template(
    stories_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load(stories_dir)
    messages = [{"role": "user", "content": "Once"}, {"role": "assistant", "content": " upon"}]
    assert loaded.render_chat_template(messages) == "<s>Once upon"
    assert loaded.apply_chat_template(messages)[0] == 1
    assert __main__.main(["inspect", str(stories_dir)]) == 0
    assert "chat.v1+json" in capsys.readouterr().out
    assert __main__.main(["verify", str(stories_dir)]) == 0
    assert __main__.main(["generate", str(stories_dir), "--chat", "a", "--prompt", "b"]) == 2
    error = capsys.readouterr().err
    assert "expected one of --prompt, --prompt-ids, --chat, found --prompt and --chat" in error
