"""Which tests `make check` chooses, on a small made-up repository."""

import subprocess
from pathlib import Path

import pytest

from scripts.changed_tests import changed_files, choose_tests

RUNTIME = Path("runtime", "prejit", "runtime")


@pytest.fixture
def repository(tmp_path):
    for name, text in {
        "unit/runtime/store/test_receipts.py": "",
        "unit/runtime/store/test_other.py": "from prejit.runtime.store import cache",
        "unit/runtime/store/conftest.py": "",
        "unit/runtime/text/test_stop.py": "from prejit.runtime.store.receipts import x",
        "unit/compiler/store/test_receipts.py": "",
    }.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def chosen(repository, *changed):
    return [str(path.relative_to("tests/unit")) for path in choose_tests(changed, repository)]


def test_a_module_runs_the_test_of_its_name_in_its_room_and_then_those_that_import_it(repository):
    assert chosen(repository, RUNTIME / "store" / "receipts.py") == [
        "runtime/store/test_receipts.py",
        "runtime/text/test_stop.py",
    ]
    assert chosen(repository, RUNTIME / "store" / "cache.py") == ["runtime/store/test_other.py"]


def test_a_module_that_no_test_imports_runs_the_tests_of_its_room(repository):
    assert chosen(repository, RUNTIME / "text" / "chat.py") == ["runtime/text/test_stop.py"]


def test_a_test_runs_when_it_changes_itself_and_when_what_its_directory_shares_does(repository):
    changed = Path("tests", "unit", "runtime", "text", "test_stop.py")
    assert chosen(repository, changed) == ["runtime/text/test_stop.py"]
    shared = Path("tests", "unit", "runtime", "store", "conftest.py")
    assert chosen(repository, shared) == [
        "runtime/store/test_other.py",
        "runtime/store/test_receipts.py",
    ]


def test_a_page_and_a_test_that_is_gone_run_nothing(repository):
    assert chosen(repository, Path("README.md"), Path("tests", "unit", "test_gone.py")) == []


def test_changes_are_those_of_the_working_tree_or_of_the_last_commit(tmp_path):
    def git(*command):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *command], check=True)

    git("init", "--quiet")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
        git("add", name)
        git("commit", "--quiet", "-m", name)
    assert changed_files(tmp_path) == [Path("b.py")]
    (tmp_path / "a.py").write_text("x = 2\n")
    (tmp_path / "c.py").write_text("x = 1\n")
    assert changed_files(tmp_path) == [Path("a.py"), Path("c.py")]
