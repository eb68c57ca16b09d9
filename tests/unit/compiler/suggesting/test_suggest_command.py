"""`prejit suggest`: what it prints."""

from prejit.compiler.manifest.reading import read_manifest
from prejit.runtime.cli.commands import run

MANIFEST = """
[bundle]
name = "chat"
[model]
source = "model"
[generate]
batch = [1]
prompt = [16, 64]
context = [64, 128]
[[target]]
name = "cpu-host"
[[target]]
name = "cpu-x86-64-v3"
"""


def test_the_suggested_lines_can_be_pasted_into_the_manifest(tmp_path, capsys):
    lengths, manifest = tmp_path / "lengths.csv", tmp_path / "chat.toml"
    lengths.write_text("prompt_tokens,new_tokens\n" + "21,5\n" * 9 + "60,60\n")
    manifest.write_text(MANIFEST)
    (tmp_path / "model").mkdir()
    assert run(["suggest", str(lengths), "--manifest", str(manifest)]) == 0
    printed = capsys.readouterr().out
    pasted = printed[printed.index("[generate]") :]
    before, _, rest = MANIFEST.partition("[generate]")
    manifest.write_text(before + pasted + rest[rest.index("[[target]]") :])
    sizes = read_manifest(manifest).generate
    assert (sizes.batch, sizes.prompt, sizes.context) == ((1,), (24, 64), (32, 128))
    assert "the batches are those of today" in printed
