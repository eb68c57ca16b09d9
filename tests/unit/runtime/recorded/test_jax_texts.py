"""The texts of jax that prejit reads are those of the installed jax."""

import json
import os
import sys
from pathlib import Path

import jax
import pytest
from tests.processes import ran

from prejit.runtime.recorded.hook import jax_texts

SCRIPT = """
import json, logging, os, sys
seen, events = [], []
class Seeing(logging.Filter):
    def filter(self, record):
        seen.append([record.name, str(record.msg), [str(each) for each in record.args or ()]])
        return False
import jax
from jax import monitoring
monitoring.register_event_listener(lambda event, **_: events.append([event, {}]))
monitoring.register_scalar_listener(lambda event, _, **more: events.append([event, more]))
monitoring.register_event_duration_secs_listener(lambda event, _, **more: events.append([event, more]))
for name in json.loads(sys.argv[1]):
    logging.getLogger(name).addFilter(Seeing())
    logging.getLogger(name).setLevel(logging.DEBUG)
def score(x):
    return x * 2
def called(x):
    jax.debug.callback(lambda value: None, x)
    return x
jax.jit(called)(1.0)
for seconds in (0.0, 0.0, 1e9):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.jit(score)(1.0 if seconds == 0 else jax.numpy.ones(3))
    jax.clear_caches()
print(json.dumps({"seen": seen, "events": events, "files": os.listdir(sys.argv[2])}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    loggers = [jax_texts.KEY_LOGGER, jax_texts.COMPILER_LOGGER, jax_texts.SHAPES_LOGGER]
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "XLA_FLAGS": "--xla_cpu_enable_fast_math=false",
    }
    command = [sys.executable, "-c", SCRIPT, json.dumps(loggers), cache]
    return json.loads(ran(*command, env={**os.environ, **env}).stdout)


def logged(found, logger, text):
    return [words for name, message, words in found["seen"] if (name, message) == (logger, text)]


def test_keys_hits_misses_arguments_and_events_are_told_as_ever(found):
    words = logged(found, jax_texts.KEY_LOGGER, jax_texts.INGREDIENT)
    names = tuple(name for name, digest in words[: len(jax_texts.INGREDIENTS)])
    assert names == jax_texts.INGREDIENTS
    assert {len(digest) for _, digest in words} == {64}
    flags = logged(found, jax_texts.KEY_LOGGER, jax_texts.FLAG)
    assert ["--xla_cpu_enable_fast_math=false"] in flags
    files = {Path(name).name for name in found["files"]}
    for text, count in ((jax_texts.MISS, 2), (jax_texts.HIT, 1)):
        words = logged(found, jax_texts.COMPILER_LOGGER, text)
        mine = [key for name, key in words if name == "jit_score"]
        assert len(mine) == count, text
    assert f"{mine[0]}{jax_texts.FILE_SUFFIX}" in files
    names = [words[0] for words in logged(found, jax_texts.SHAPES_LOGGER, jax_texts.SHAPES)]
    assert names.count("jit(score)") == 3
    texts = [message for name, message, _ in found["seen"] if name == jax_texts.COMPILER_LOGGER]
    mine = [text for text in texts if text.startswith(jax_texts.NOT_WRITTEN)]
    # Before 0.11 jax keeps no program that calls Python: `jax_calls.keep_callbacks` changes that.
    others = [text for text in mine if "host callbacks" not in text]
    assert len(mine) == len(others) + (jax.__version_info__ < (0, 11))
    assert others
    assert all(jax_texts.TOO_QUICK in text for text in others)
    wanted = {jax_texts.COMPILE_EVENT, jax_texts.REQUEST_EVENT}
    wanted |= {jax_texts.HIT_EVENT, jax_texts.SAVED_EVENT}
    events = [(name, more.get("fun_name")) for name, more in found["events"] if name in wanted]
    mine = (jax_texts.COMPILE_EVENT, "jit(score)")
    miss = [mine, (jax_texts.REQUEST_EVENT, None), mine]
    hit = [*miss[:2], (jax_texts.HIT_EVENT, None), (jax_texts.SAVED_EVENT, None), mine]
    starts = [place for place, event in enumerate(events) if event == mine][::2]
    assert [events[start : start + 3] == miss for start in starts] == [True, False, True]
    assert events[starts[1] : starts[1] + 5] == hit
