"""What loading and generating does not do, counted from outside: by jax.monitoring and by XLA's own log."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Run

GENERATE = """
import json, sys
from prejit.runtime import load
before = {name.partition('.')[0] for name in sys.modules}
bundle = load(sys.argv[1], on_mismatch='error')
text = bundle.generate('def main(', max_new_tokens=24).text
modules = sorted(sys.modules)
events = []
import jax.monitoring
print(json.dumps({'text': text, 'modules': modules}))
"""

MONITORED = """
import json, sys
import jax, jax.monitoring
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *a, **k: events.append(name))
jax.monitoring.register_event_listener(lambda name, *a, **k: events.append(name))
jax.jit(lambda x: x + 1)(1)      # the listener hears jax compile
heard = [name for name in events if 'compile' in name or 'trace' in name]
events.clear()
from prejit.runtime import load
bundle = load(sys.argv[1], on_mismatch='error')
bundle.generate('def main(', max_new_tokens=24)
print(json.dumps({'heard': heard, 'events': events}))
"""

COMPILE_ANYTHING = "import jax; jax.jit(lambda x: x + 1)(1)"
XLA_LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cpu_compiler=1,pjrt_stream_executor=1"}


def test_loading_imports_nothing_of_the_build_side_and_no_whole_jax(
    python: Run, demo: Path
) -> None:
    result = json.loads(python(GENERATE, demo).stdout.splitlines()[-1])
    packages = {name.partition(".")[0] for name in result["modules"]}
    assert not packages & {
        "flax",
        "transformers",
        "pydantic",
        "click",
        "rich",
        "optax",
        "orbax",
        "torch",
    }
    assert not [name for name in result["modules"] if name.startswith("prejit.compiler")]
    assert "jax.numpy" not in result["modules"]
    assert result["text"].strip()


def test_nothing_is_traced_or_compiled_says_jax_monitoring(python: Run, demo: Path) -> None:
    result = json.loads(python(MONITORED, demo).stdout.splitlines()[-1])
    assert result["heard"], "the listener must hear a compile of jax's own"
    assert result["events"] == []


def test_nothing_is_compiled_says_xla(python: Run, demo: Path) -> None:
    heard = python(COMPILE_ANYTHING, **XLA_LOG).stderr
    assert "cpu_compiler.cc" in heard, "XLA's log must tell of a compile"
    assert "cpu_compiler.cc" not in python(GENERATE, demo, **XLA_LOG).stderr
