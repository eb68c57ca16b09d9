"""A finalizer must not wait for a lock that its own thread holds."""

import gc
import textwrap
import threading

from prejit.server.engine.finalizers import when_dropped


class Owner:
    """Something that a cycle keeps until the garbage collector runs."""

    def __init__(self, call):
        self.itself = self
        when_dropped(self, call)


def test_a_finalizer_waits_for_no_lock_of_its_thread_and_one_that_fails_stops_no_other(capsys):
    lock, done = threading.Lock(), threading.Event()

    def call():
        with lock:
            done.set()

    Owner(call)
    with lock:
        gc.collect()
        assert not done.is_set()
    assert done.wait(60)
    done = threading.Event()

    def fails():
        raise ValueError("cannot close")

    Owner(fails)
    gc.collect()
    Owner(done.set)
    gc.collect()
    assert done.wait(60)
    assert "ValueError: cannot close" in capsys.readouterr().err


def test_what_is_being_freed_at_exit_is_freed_first(run_python):
    """The interpreter would stop the thread in the middle of it."""
    code = """
        import time
        from prejit.server.engine.finalizers import when_dropped
        class Owner: ...
        def call():
            time.sleep(0.3)
            print("freed", flush=True)
        owner = Owner()
        when_dropped(owner, call)
        del owner
    """
    assert run_python(textwrap.dedent(code)).stdout.strip() == "freed"
