import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from prejit.compiler.models.torch_tensors import torch_tensors
from prejit.runtime.errors import CheckpointError

HEADS = Path(__file__).parents[3] / "torch_heads"


def rewritten(path, name, content, method=zipfile.ZIP_STORED):
    """Copy a file of torch.save, with another content of an entry."""
    old, new = zipfile.ZipFile(HEADS / "colbert_linear.pt"), zipfile.ZipFile(path, "w", method)
    with old, new:
        for entry in old.infolist():
            is_other = entry.filename.endswith(name)
            new.writestr(entry.filename, content if is_other else old.read(entry))
    return path


class Runs:
    """Pickled, it names a function that writes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_tensors_are_those_that_torch_saved():
    found = torch_tensors(HEADS / "colbert_linear.pt")
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        "weight": ((8, 12), "float16"),
        "bias": ((8,), "float16"),
    }
    values = found["weight"].read()
    assert 0.4 < np.abs(values.astype(np.float32)).max() < 3
    np.testing.assert_array_equal(found["weight"].read(slice(2, 4)), values[2:4])


def test_a_pickle_runs_nothing(tmp_path):
    written = tmp_path / "written"
    file = rewritten(tmp_path / "a.pt", "data.pkl", pickle.dumps(Runs(written)))
    with pytest.raises(CheckpointError, match=r"it names .*(touch|Path|getattr)"):
        torch_tensors(file)
    assert not written.exists()


def pickled(start, shape, state=b""):
    """Return a pickle of a tensor of the storage 0, with which a state is built."""
    sizes = "".join(f"L{each}L\n" for each in shape)
    return (
        b"(dS'weight'\nctorch._utils\n_rebuild_tensor_v2\n((S'storage'\nctorch\nHalfStorage\nS'0'\nS'cpu'\n"
        + f"I96\ntQL{start}L\n({sizes}t({sizes}tI00\nNtR".encode()
        + state
        + b"s."
    )


def test_a_tensor_that_no_storage_holds_is_refused_before_it_is_read(tmp_path):
    for start, shape in ((-3, (1,)), (0, (-5,)), (2**70, (1,)), (0, (10**30,))):
        file = rewritten(tmp_path / "a.pt", "data.pkl", pickled(start, shape))
        with pytest.raises(CheckpointError, match="a tensor begins at"):
            torch_tensors(file)
    file = rewritten(tmp_path / "b.pt", "data.pkl", pickled(0, (1,)))
    assert torch_tensors(file)["weight"].shape == (1,)
    state = b"(dS'path'\nS'/another'\nsb"  # would replace an attribute
    with pytest.raises(CheckpointError, match="__dict__"):
        torch_tensors(rewritten(file, "data.pkl", pickled(0, (1,), state)))


def test_what_is_no_dict_of_tensors_or_is_compressed_is_refused(tmp_path):
    whole = (HEADS / "colbert_linear.pt").read_bytes()
    for number, content in enumerate((whole[:-200], pickle.dumps({"weight": 1}), b"")):
        (tmp_path / f"{number}.pt").write_bytes(content)
    for file, told in (
        *((tmp_path / f"{number}.pt", "expected a dict of tensors") for number in range(3)),
        (rewritten(tmp_path / "c.pt", "byteorder", b"big"), "byteorder"),
        (rewritten(tmp_path / "d.pt", "data.pkl", pickle.dumps([1])), "expected a dict"),
        (tmp_path / "none.pt", "expected a file, found none"),
    ):
        with pytest.raises(CheckpointError, match=told):
            torch_tensors(file)
    large = rewritten(tmp_path / "a.pt", "data/0", bytes(2**20), zipfile.ZIP_DEFLATED)
    for file, told in (
        (rewritten(tmp_path / "e.pt", "data/0", b"123"), r"e\.pt"),
        (large, "expected values that are not compressed"),
    ):
        found = torch_tensors(file)
        with pytest.raises(CheckpointError, match=told):
            found["weight"].read()
    damaged = tmp_path / "f.pt"
    shutil.copy(HEADS / "colbert_linear.pt", damaged)
    found = torch_tensors(damaged)
    at = whole.index(found["weight"].read().tobytes())
    damaged.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    with pytest.raises(CheckpointError, match="CRC"):
        found["weight"].read()
