"""What comes with an import: the first call's time is imports."""

import pytest

import prejit.runtime
from prejit.runtime import errors

BUILD_SIDE = {"prejit.compiler", "flax", "transformers", "pydantic", "rich"}


LIGHT = (
    *("numpy", "jax", "jaxlib", "tokenizers", "zstandard", "hashlib", "prejit.runtime.errors"),
    *("subprocess", "mmap", "typing_extensions", "jinja2", "blake3"),
)


def test_every_public_name_is_there_and_comes_when_wanted(run_python):
    run_python(
        "import sys, prejit.runtime as runtime\n"
        f"heavy = set({LIGHT!r}) & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert [m for m in sys.modules if m.startswith('prejit')] == ['prejit', 'prejit.runtime']\n"
        "assert runtime.RejectError.code == 'reject'\n"
        "assert 'numpy' not in sys.modules\n"
        "for name in runtime.__all__:\n"
        "    assert getattr(runtime, name).__name__ == name, name\n"
        "from prejit.runtime import *\n"
        "assert load.__module__ == 'prejit.runtime.loader'"
    )
    with pytest.raises(AttributeError, match=r"prejit\.runtime.*no attribute 'nothing'"):
        prejit.runtime.nothing  # noqa: B018


def test_the_errors_of_the_package_are_all_of_one_base():
    kinds = [each for each in vars(errors).values() if isinstance(each, type)]
    warnings = [each for each in kinds if issubclass(each, Warning)]
    found = [each for each in kinds if issubclass(each, Exception) and each not in warnings]
    assert all(issubclass(each, errors.PrejitWarning) for each in warnings)
    assert all(issubclass(each, errors.PrejitError) for each in found)
    assert {each.exit_code for each in found} <= {1, 2, 3, 4, 5, 6, 7, 9}
    assert len({each.code for each in found}) == len(found), "a code tells which error it is"


NOT_TO_LOAD = {
    *("tokenizers", "jinja2", "scipy", "click", "asyncio", "jax.numpy"),
    "prejit.runtime.start_report",  # a report is made when somebody asks
}


def test_loading_imports_no_build_side_and_not_all_jax(settled_dir, run_python):
    run_python(
        "import sys\n"
        "import numpy as np\n"
        "from prejit.runtime import load\n"
        f"bundle = load({str(settled_dir)!r})\n"
        "bundle.call('score', x=np.ones((2, 16), np.float32))\n"
        f"heavy = {sorted(BUILD_SIDE | NOT_TO_LOAD)!r}\n"
        "found = [m for m in sys.modules for h in heavy if m == h or m.startswith(h + '.')]\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
