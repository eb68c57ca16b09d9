"""A module `ray` for tests, with nodes that live and answer as a test says."""

import sys
import time
from types import SimpleNamespace

from prejit.compiler.cluster import connection
from prejit.compiler.cluster.connection import Board


class RayError(Exception):
    """As ray.exceptions has it."""


NAMES = "OutOfMemory NodeDied ObjectLost WorkerCrashed RaySystem RayTask RuntimeEnvSetup"
ERRORS = {f"{name}Error": type(name, (RayError,), {}) for name in NAMES.split()}


class Remote:
    """Stand-in for a function that `ray.remote` has wrapped."""

    def __init__(self, call):
        self.remote = call

    def options(self, **given):
        return self


class Cluster:
    """Stand-in for the module `ray`.

    `behave(order)` returns the result, an error to raise, or None while the node computes.
    """

    def __init__(self, behave=lambda order: None, address="127.0.0.1"):
        self.behave, self.address = behave, address
        self.alive = {"a", "b"}
        self.orders, self.running, self.outcomes = [], [], {}
        self.board = Board()
        self.is_closed = self.broken = False
        self.exceptions = SimpleNamespace(RayError=RayError, **ERRORS)

    def installed(self, patch):
        """Put it in the place of ray, whose nodes are asked about at once."""
        patch.setitem(sys.modules, "ray", self)
        patch.setattr(connection, "_keep_stdout_for_data", lambda: None)
        patch.setattr(connection, "_LOOK_SECONDS", 0.0)
        return self

    def remote(self, what):
        if what is Board:
            return Remote(lambda: SimpleNamespace(news=Remote(self._news)))
        return Remote(self._take)

    def _take(self, order, board):
        reference = f"attempt {order.attempt}"
        self.orders.append(order)
        self.running.append(reference)
        if (answer := self.behave(order)) is not None:
            self.outcomes[reference] = answer
        return reference

    def _news(self):
        self.outcomes["news"] = self.board.news()
        return "news"

    def is_initialized(self):
        return True

    def nodes(self):
        same = {"Resources": {"CPU": 2.0, "memory": 1 << 40}, "NodeManagerAddress": self.address}
        return [{"NodeID": name, "Alive": name in self.alive, **same} for name in "abc"]

    def wait(self, references, **given):
        if self.broken:
            raise ConnectionError("gone")
        found = [each for each in references if each in self.outcomes]
        if not found:
            time.sleep(0.01)
        return found, []

    def get(self, reference):
        if isinstance(found := self.outcomes.pop(reference), Exception):
            raise found
        return found

    def cancel(self, reference, *, force):
        self.running.remove(reference)

    def kill(self, actor):
        self.is_closed = True
