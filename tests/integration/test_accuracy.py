"""Trained models lose at most 1 % of perplexity with the int8 and bfloat16 weights that a build packs."""

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest
from tests.extent import cases
from tests.manifests import write_manifest

from .conftest import ROOT

pytestmark = pytest.mark.thorough

STORY = """\
One day, a boy named Tom went to the park with his mom. Tom had a big red ball. He liked to kick the
ball and run after it. "Look, Mom!" he said. "I can kick it very far!" His mom smiled and clapped
her hands.

Tom kicked the ball again. It went up, up, up, and it got stuck in a tall tree. Tom was sad. He did
not know what to do. He wanted to cry. "My ball is in the tree," he said. "I can not get it."

Then a little bird came. The bird saw that Tom was sad. "Why are you sad?" asked the bird. "My ball
is stuck in the tree," said Tom. "I can help you," said the bird. The bird flew up to the top of the
tree and pushed the ball. The ball fell down, and Tom was very happy. "Thank you, little bird!" he
said.

The next day, Tom came back to the park. He had some bread in his hand. He gave the bread to the
bird. "This is for you," he said. "You are my friend." The bird ate the bread and sang a pretty
song. From that day on, Tom and the bird played together every day. They learned that it is good to
help each other.

Lily and her brother Max lived in a small house near the forest. One morning, Lily found a shiny box
under her bed. She wanted to open it, but the box was locked. "Max, can you help me open the box?"
she asked. Max looked at the box. He tried to pull it and push it, but it did not open. "We need a
key," he said.

They looked for the key in the kitchen. They looked for the key in the garden. At last, Lily saw
something shiny near a flower. It was the key! She was so excited. She ran to the box and put the
key in it. The box opened, and inside there was a soft blue scarf and a note. The note said, "I love
you. Grandma." Lily hugged the scarf. She was warm and happy. Max was happy too. They went to visit
Grandma and gave her a big hug.
"""


def held_out_python(characters=12_000):
    """Files of the standard library that manifests/demo-model/train.py did not train on, by its rule."""
    library = Path(sysconfig.get_path("stdlib"))
    texts, found = [], 0
    for path in sorted(library.glob("*.py")):
        digest = hashlib.sha256(f"0:{path.name}".encode()).digest()
        if int.from_bytes(digest[:8], "big") % 100 < 5:
            texts.append(path.read_text(encoding="utf-8"))
            found += len(texts[-1])
    assert found >= characters, "another library than the model was trained on"
    return "".join(texts)[-characters:]


def rise(run, at, source, text, dtype, cache_dtype):
    """By how much the perplexity rises on a text: 0.01 for 1 %."""
    (at / "held.txt").write_text(text, encoding="utf-8")
    name = f"{dtype}-{cache_dtype}"
    model = f'dtype = "{dtype}"\nevaluation = "held.txt"'
    more = {"model": model, "generate": f'cache_dtype = "{cache_dtype}"'}
    sizes = {"prompt": (4,), "context": (16,)}
    manifest = write_manifest(at / f"{name}.toml", source, name=name, **sizes, **more)
    [told] = json.loads(run("build", manifest, "-o", at, "--json", quick=True).stdout)
    accuracy = told["accuracy"]
    assert (accuracy["weights"], accuracy["text"]) == (dtype, "held.txt")
    assert accuracy["tokens"] > 500
    (target,) = json.loads(run("inspect", at / name, "--json").stdout)["targets"]
    assert target["config"]["accuracy"].items() <= accuracy.items()
    ratio = accuracy["perplexity_millionths"] / accuracy["float32_perplexity_millionths"]
    return ratio - 1


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    cases(
        [("int8", "int8")],  # both round at once
        others=[("int8", "bfloat16"), ("float32", "int8"), ("bfloat16", "float32")],
    ),
)
def test_python_is_no_more_than_one_percent_less_likely(run, tmp_path, dtype, cache_dtype):
    source = ROOT / "manifests" / "demo-model"
    assert rise(run, tmp_path, source, held_out_python(), dtype, cache_dtype) <= 0.01
