"""The child process of a first load: load every executable of a bundle, run one program, and say how it went.

    python -P -m prejit.runtime.first_load_child < REQUEST > ANSWER

`trust.first_load` starts it where a policy has `first_load = "child"`, and writes the request.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import warnings
from typing import Any

from prejit.runtime.base.child_process import take_stdout, write_answer
from prejit.runtime.base.process_facts import TRUST_VARIABLE
from prejit.runtime.base.process_memory import free_memory_bytes
from prejit.runtime.base.typed_json import from_any_json
from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import AnswerError, PrejitError, RejectError
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.programs.usage_hint import smallest_call
from prejit.runtime.trust.first_load import become_child, begun_manifests


def main() -> None:
    """Load the bundle that the request on stdin names, and answer."""
    answers = take_stdout()
    wanted: Any = json.loads(sys.stdin.buffer.read())
    _limit(has_memory_limit=wanted["limited"])
    error, text, path = "", "", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the parent gives them again
            _try(wanted)
    except RejectError as raised:
        error, path = raised.code, raised.path
        text = str(raised).removeprefix(f"{path}: ")
    except PrejitError as raised:
        error, text = raised.code, str(raised)
    except Exception as raised:
        error, text = "error", f"{type(raised).__name__}: {raised}"
    manifests = list(begun_manifests())
    answer = {"error": error, "path": path, "text": text[:4000], "manifests": manifests}
    write_answer(answers, answer)


def _limit(*, has_memory_limit: bool) -> None:
    """Limit what this process may take from the others, and write no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if has_memory_limit:
        given = resource.getrlimit(resource.RLIMIT_DATA)
        most = min(
            free_memory_bytes(), *(x for x in given if x != resource.RLIM_INFINITY), sys.maxsize
        )
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, this process ends before the server
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def _try(wanted: Any) -> None:
    """Load the bundle, then every executable, and run one program."""
    become_child()
    declared, policies = wanted["fingerprint"], wanted["policies"]
    # Only the argument of `load` can have a colon in its name: the variable separates names by it.
    argument = next((path for path in policies if os.pathsep in path), None)
    os.environ[TRUST_VARIABLE] = os.pathsep.join(path for path in policies if path != argument)
    with load(
        wanted["path"],
        on_mismatch=wanted["on_mismatch"],
        fingerprint=declared and from_any_json(Fingerprint, declared.encode(), "the request"),
        trust=argument,
        canary="off",  # a wrong answer is for the load that follows
    ) as bundle:
        if bundle.matched:
            with contextlib.suppress(AnswerError):  # of one in quarantine
                bundle.prepare()
            with contextlib.suppress(PrejitError):  # such as NaN in a result: the caller's to see
                _run_one(bundle)


def _run_one(bundle: Bundle) -> None:
    """Run the cheapest thing that a bundle can do."""
    if bundle.config.decoder is not None:
        bundle.generate([0], max_new_tokens=1, stop_token_ids=(), temperature=0)
    elif bundle.config.encoder is not None:
        bundle.encode([[bundle.config.encoder.vocab_size - 1]])  # CLIP needs its end
    else:
        bundle.runner_with_zeros(smallest_call(bundle.config.programs))()


if __name__ == "__main__":
    main()
