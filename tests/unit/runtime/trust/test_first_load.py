"""Where a policy says so, code that crashes ends a child process and never this one."""

import json
import shutil
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.kernel_bundles import TOY_KERNELS, built_kernels, with_library
from tests.layouts import GOLDEN
from tests.signers import write_policy

from prejit.runtime import load
from prejit.runtime.__main__ import main
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import ExecutableError, RejectError, UntrustedError
from prejit.runtime.format.names import KERNELS_MEDIA_TYPE
from prejit.runtime.recorded.recorded_bundle import open_recorded
from prejit.runtime.trust import first_load

RULE = '[[rules]]\nnames = ["*"]\nlevel = "skip"\n'
X = np.arange(5, dtype=np.float32)
CONSTRUCTOR = """
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

__attribute__((constructor)) static void Begin() {
  const char* how = std::getenv("TEST_FIRST_LOAD");
  if (how == nullptr) return;
  if (const char* log = std::getenv("TEST_FIRST_LOADS")) {  // a byte for each process
    FILE* file = std::fopen(log, "a");
    std::fputc('x', file);
    const bool later = std::ftell(file) > 1;
    std::fclose(file);
    if (later && std::getenv("TEST_FIRST_LOAD_ONCE") != nullptr) return;
  }
  if (!std::strncmp(how, "SIG", 3)) raise(std::atoi(how + 3));  // as from outside
  if (!std::strcmp(how, "abort")) std::abort();

  if (!std::strcmp(how, "write")) *reinterpret_cast<volatile int*>(8) = 1;
  if (!std::strcmp(how, "hang")) sleep(600);
  if (!std::strcmp(how, "exit")) _exit(0);
}
"""


@pytest.fixture
def policy(tmp_path):
    return write_policy(tmp_path / "trust.toml", RULE + 'first_load = "child"')


@pytest.fixture
def sound(kernel_recipe, tmp_path):
    return kernel_recipe.write(tmp_path / "sound")


@pytest.fixture(scope="session")
def crashing_kernels(build_cache, tmp_path_factory):
    directory = shutil.copytree(TOY_KERNELS, tmp_path_factory.mktemp("sources") / "kernels")
    with open(directory / "toy.cc", "a") as file:
        file.write(CONSTRUCTOR)
    return built_kernels("cpu-x86-64-v2", directory, build_cache)[1]


@pytest.fixture
def crashing(kernel_recipe, crashing_kernels, tmp_path):
    """A bundle whose library does what `TEST_FIRST_LOAD` says as soon as it is loaded."""
    return with_library(kernel_recipe, crashing_kernels).write(tmp_path / "crashing")


@pytest.fixture
def one_try(monkeypatch):
    """One crash is proof enough, which takes half of the processes."""
    monkeypatch.setattr(first_load, "_TRIES", 1)


def refused(bundle, policy):
    with pytest.raises(UntrustedError) as raised:
        load(bundle, trust=policy)
    assert (raised.value.case, raised.value.exit_code) == ("first-load", 5)
    return raised.value


def runs(bundle, policy):
    with load(bundle, trust=policy) as loaded:
        assert loaded.matched
        np.testing.assert_array_equal(loaded.call("scale", x=X), X * np.float32(2.5))


def forbid_processes(monkeypatch):
    monkeypatch.setattr(first_load, "CHILD_MODULE", "prejit.no_such_module")


def test_a_crash_ends_the_child_and_is_kept_until_a_command_forgets_it(
    crashing, policy, monkeypatch, runtime_cache, capsys, one_try
):
    for how, ending in (("write", "SIGSEGV"), ("abort", "SIGABRT")):
        cache = runtime_cache / how
        monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(cache))
        monkeypatch.setenv("TEST_FIRST_LOAD", how)
        found = refused(crashing, policy)
        assert f"there the bundle ended the process by {ending}" in str(found)
    [kept] = (cache / "first-loads" / "v1").iterdir()
    assert str(kept) in str(found.hint)
    assert f"`prejit verify --forget {crashing}`" in str(found.hint)
    monkeypatch.delenv("TEST_FIRST_LOAD")  # now it would not crash
    with monkeypatch.context() as patch:
        forbid_processes(patch)
        assert ending in str(refused(crashing, policy))
    assert main(["verify", "--forget", str(crashing)]) == 0
    assert not kept.exists()
    assert f"removed {kept}" in capsys.readouterr().out
    runs(crashing, policy)
    assert main(["verify", "--forget", str(crashing)]) == 0
    assert kept.exists()  # that it was loaded is nothing against it
    assert "this machine holds nothing against the bundle" in capsys.readouterr().out


def test_an_end_from_outside_is_nothing_against_it(crashing, policy, monkeypatch, runtime_cache):
    monkeypatch.setenv("TEST_FIRST_LOAD", f"SIG{signal.SIGKILL:d}")
    assert "ended by SIGKILL from outside" in str(refused(crashing, policy))
    assert not (runtime_cache / "first-loads").exists()
    monkeypatch.delenv("TEST_FIRST_LOAD")
    runs(crashing, policy)


def test_a_crash_is_no_proof(crashing, policy, monkeypatch):
    processes = policy.with_name("processes")
    monkeypatch.setenv("TEST_FIRST_LOADS", str(processes))
    monkeypatch.setenv("TEST_FIRST_LOAD", "write")
    monkeypatch.setenv("TEST_FIRST_LOAD_ONCE", "1")
    runs(crashing, policy)
    assert processes.read_text().startswith("xx")  # this process may have the library already


def test_a_library_that_hangs_or_ends_quietly_is_refused(crashing, policy, monkeypatch, one_try):
    monkeypatch.setenv("TEST_FIRST_LOAD", "exit")
    assert "ended the process with status 0" in str(refused(crashing, policy))
    monkeypatch.setenv("TEST_FIRST_LOAD", "hang")
    monkeypatch.setattr(first_load, "SECONDS", 3.0)
    started = time.monotonic()
    assert "took more than 3 seconds" in str(refused(crashing, policy))
    assert time.monotonic() - started < 300  # it slept for 600


def test_a_damaged_memory_of_it_is_not_believed(sound, policy, runtime_cache, monkeypatch):
    policy = policy.rename(policy.with_name("a:b.toml"))  # also this name reaches the child
    runs(sound, policy)
    [kept] = (runtime_cache / "first-loads" / "v1").iterdir()
    said = json.loads(kept.read_bytes())
    assert said["outcome"] == "loaded"
    forbid_processes(monkeypatch)
    runs(sound, policy)  # a sound bundle is tried once on a machine
    of_another = json.dumps({**said, "key": digest_of(b"another bundle")}).encode()
    right = kept.read_bytes()
    for damage in (b"", b'{"outcome":"loaded"}', right[:-1], of_another, right):
        kept.write_bytes(damage)
        kept.chmod(0o666 if damage == right else 0o600)  # somebody else could have written it
        # It was tried again, by a module that is not there.
        assert "status 1" in str(refused(sound, policy))


def test_damage_and_errors_of_xla_have_names(kernel_recipe, sound, policy, runtime_cache, tmp_path):
    content = kernel_recipe.content(KERNELS_MEDIA_TYPE) + b"\0"
    kernels = replace(kernel_recipe.targets[0].config.kernels, digest=digest_of(content))
    unbound = kernel_recipe.with_content(KERNELS_MEDIA_TYPE, content)
    unbound = unbound.configured(lambda config: replace(config, kernels=kernels))
    with pytest.raises(ExecutableError) as not_loaded:
        load(unbound.write(tmp_path / "unbound"), trust=policy)
    assert not_loaded.value.exit_code == 3
    largest = max((sound / "blobs" / "sha256").iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"x")
    with pytest.raises(RejectError) as damaged:
        load(sound, trust=policy)
    assert damaged.value.exit_code == 4
    assert str(damaged.value).count(str(sound)) == 1
    assert not (runtime_cache / "first-loads").exists()  # neither is for ever


def test_without_the_rule_no_process_is_started(sound, tmp_path, monkeypatch):
    forbid_processes(monkeypatch)
    runs(sound, None)
    runs(sound, write_policy(tmp_path / "plain.toml", RULE))
    runs(sound, write_policy(tmp_path / "direct.toml", RULE + 'first_load = "direct"'))
    child = write_policy(tmp_path / "child.toml", RULE + 'first_load = "child"')
    assert refused(sound, child)
    monkeypatch.setenv("PREJIT_TRUST", str(child))  # each policy can want it
    said = str(refused(sound, tmp_path / "plain.toml"))
    assert said.split(": ", 1)[1].startswith(f"{child} wants")
    # A recorded bundle is refused where its first load would not be tried.
    with pytest.raises(UntrustedError, match="recorded bundle are loaded by jax"):
        open_recorded(GOLDEN / "recorded")
