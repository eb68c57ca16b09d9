"""jax's client on a GPU: who decides whether it takes the memory at its start."""

import os
import subprocess
import sys

JAX = """\
import os, types
def devices(platform):
    return [types.SimpleNamespace(client=os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))]
"""
ASK = """\
import os
from prejit.runtime.device._jax_parts import client_of_jax
print(client_of_jax("cuda"), client_of_jax("cuda"), os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
"""


def test_memory_grows_unless_the_process_has_jax_or_says_otherwise(tmp_path):
    (tmp_path / "jax.py").write_text(JAX)
    unset = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")} | {
        "PYTHONPATH": str(tmp_path)
    }

    def asked(code, **variables):
        command = (sys.executable, "-c", code)
        return subprocess.check_output(command, env=unset | variables, text=True).split()

    assert asked(ASK) == ["false", "None", "None"]
    assert asked("import jax\n" + ASK) == ["None"] * 3
    assert asked(ASK, XLA_PYTHON_CLIENT_PREALLOCATE="true") == ["true"] * 3
