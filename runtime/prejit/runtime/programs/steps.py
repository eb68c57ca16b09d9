"""Steps of a program on a state that stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, final

from prejit.runtime.base import arguments
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.device import _jax_parts, _jaxlib
from prejit.runtime.device.transfer import DeviceArray, dtype_of
from prejit.runtime.errors import UsageError
from prejit.runtime.format import constants, trees
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import ProgramEntry
from prejit.runtime.format.trees import (
    Branch,
    branches,
    candidates,
    how_to_name,
    whole,
    without_references,
)
from prejit.runtime.programs import pytree
from prejit.runtime.programs.known_calls import ChosenBucket, Held, KnownCalls
from prejit.runtime.programs.user_programs import Calls

State = Sequence[DeviceArray]
"""The arrays of all arguments that are kept."""
_Pick = Callable[[Sequence[DeviceArray]], Sequence[DeviceArray]]


@dataclass(frozen=True, slots=True)
class Route:
    """Where the arguments of a bucket come from and its results go.

    Attributes:
        others: the arrays of arguments that are not kept.
        arguments: returns all arguments in order, of the state and the others.
        state: returns the next state, of all results.
        rest: returns the arrays of the other results.
        returned: the other results.
        has_names: whether the function returns its results by name.
    """

    others: tuple[Array, ...]
    arguments: _Pick
    state: _Pick
    rest: _Pick
    returned: tuple[Branch, ...]
    has_names: bool


def _picker(places: Sequence[int]) -> _Pick:
    """Return a function that returns the items at some places of a list."""
    first = places[0] if places else 0
    if list(places) == list(range(first, first + len(places))):
        return itemgetter(slice(first, first + len(places)))
    return itemgetter(*places)


Rest = tuple[Route, Sequence[DeviceArray], ChosenBucket]
"""The input of `Steps.rebuild`: the route, the arrays of results that are no state, the bucket that ran."""


class LoneStep(NamedTuple):
    """A step without other arguments.

    Attributes:
        route: that of its bucket.
        chosen: the bucket, which has no weights.
        settings: those of jax when it last ran. The program fits them, and jax looks for no NaNs.
    """

    route: Route
    chosen: ChosenBucket
    settings: Any


@final
class Steps:
    """Steps of a program that keeps some of its arguments. It holds no state.

    Attributes:
        state: the arguments that are kept.
        places: the places of their arrays in a `State`.
        alone: the last step without other arguments; None: there was none, or the program has weights.
    """

    def __init__(
        self, calls: Calls, name: str, kept: Sequence[trees.Key], static: Mapping[str, Any]
    ) -> None:
        """Find the results that take the place of the state.

        Args:
            calls: how to call a program.
            name: of the program.
            kept: names or places of the arguments that are kept.
            static: values of static arguments.

        Raises:
            UsageError: there is no such argument, no bucket has a static value, or it is unclear which result
                takes the place of an argument.
        """
        self.alone: LoneStep | None = None
        self._calls = calls
        self._name = name
        buckets = calls.choice.buckets(name)
        first = self._arguments(buckets[0])
        for key in kept:
            if key not in first:
                raise UsageError(
                    f"bind: {name!r} has no argument {key!r}{did_you_mean(str(key), map(str, first))}",
                    hint=f"its arguments are: {', '.join(map(str, first)) or 'none'}",
                )
        for key, value in static.items():
            values = [calls.programs.static(program.name) for program in buckets]
            built = [each[key] for each in values if key in each]
            if not any(constants.same(each, constants.encode(value)) for each in built):
                known = " or ".join(sorted({constants.shown(each) for each in built}))
                raise UsageError(
                    f"bind: {key}: expected {known}, found {arguments.described(value)}"
                )
        self.state = {key: first[key] for key in kept}
        ends = [*accumulate(len(branch.arrays) for branch in self.state.values())]
        self.places = dict(zip(kept, map(slice, [0, *ends], ends), strict=False))
        self._placeholders = {
            key: [Held(dtype_of(array.dtype), array.shape, array.weak) for array in branch.arrays]
            for key, branch in self.state.items()
        }
        self._placeholder_ids = {id(e) for held in self._placeholders.values() for e in held}
        self._routes: dict[str, Route] = {}
        for program in buckets:
            self._route(program)
        self._static = static
        self._has_static = bool(calls.choice.static_names(name))
        self._known_calls = KnownCalls()

    def run(
        self, state: State, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[State, Rest]:
        """Run a step, and return the next state and the rest. What the program donates is deleted.

        Args:
            state: the arrays that are kept.
            args: arguments by place, without those that are kept.
            kwargs: arguments by name, and static ones.

        Raises:
            UsageError, RejectError: as `Bundle.call`.
        """
        looks_for_nans = self._calls.check_settings(self._name)
        if args or kwargs or self.alone is None:
            chosen = self._known_calls.choose(
                (args, kwargs), self._choose, has_static=self._has_static
            )
            route = self._routes.get(chosen.program.name) or self._route(chosen.program)
        else:
            route, chosen, _ = self.alone
        is_plain = not (args or kwargs or looks_for_nans or chosen.program.weights)
        if is_plain and self._calls.has_finished:
            self.alone = LoneStep(route, chosen.emptied(), _jax_parts.trace_context())
        if chosen.values:
            values = self._calls.filled(chosen, route.others)
            with _jaxlib.guarding(not chosen.is_on_device):
                state = [*state, *map(self._copied, route.others, values)]
            chosen = chosen.emptied()
        results = self._calls.run(chosen.program, route.arguments(state))
        if looks_for_nans:
            self._calls.check_results(chosen, results)
        return route.state(results), (route, route.rest(results), chosen)

    def rebuild(self, route: Route, rest: Sequence[DeviceArray], chosen: ChosenBucket) -> Any:
        """Return the results that are no state, as `Bound.__call__` returns them."""
        if not route.returned:
            return None
        cut = self._calls.cutter(chosen)
        arrays = iter(rest)
        values = {
            branch.key: self._calls.nested(
                branch.tree, [cut(array, next(arrays)) for array in branch.arrays]
            )
            for branch in route.returned
        }
        if len(values) > 1:
            return values if route.has_names else tuple(values.values())
        return next(iter(values.values()))

    def _copied(self, array: Array, value: Any) -> DeviceArray:
        return self._calls.placed(array, value, copy=True)

    def _choose(self, given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> ChosenBucket:
        """Return the bucket that takes these arguments beside the state, whose values are left out."""
        args, kwargs = given
        static, named = {**self._static}, {**kwargs}
        for key in self._calls.choice.static_names(self._name) & kwargs.keys():
            static[key] = named.pop(key)

        def flatten(tree: trees.Tree) -> list[Any]:
            assert isinstance(tree, trees.Node)
            others = [key for key in tree.keys if key not in self.state]
            given: dict[trees.Key, Any] = {}
            if tree.kind == "dict":
                given.update(named)
            else:
                given.update(zip(others, args, strict=False))
            found: list[Any] = []
            for key, child in zip(tree.keys, tree.children, strict=True):
                if key in self.state:
                    found += self._placeholders[key]
                elif key in given:
                    found += pytree.flatten(child, given.pop(key), (key,))
                else:
                    raise pytree.MisfitError(f"{pytree.spell((key,))} is missing")
            more = args if tree.kind == "dict" else (*args[len(others) :], *named)
            for key in (*given, *range(len(more))):
                raise pytree.MisfitError(f"unexpected {pytree.spell((key,))}")
            return found

        chosen = self._calls.choice.choose(self._name, static, flatten)
        return chosen._replace(
            values=[v for v in chosen.values if id(v) not in self._placeholder_ids]
        )

    def _route(self, program: ProgramEntry) -> Route:
        """Find and keep where the results of a program go.

        The next value of an argument is the result of the same name, or else the only one with the same
        structure, shapes and dtypes.
        """
        results = {branch.key: branch for branch in self._results(program)}
        slots: dict[trees.Key, Branch] = {}
        taken = self._arguments(program)
        for key, branch in self.state.items():
            if key not in taken or not branch.holds_what(taken[key]):
                raise UsageError(
                    f"bind: expected {key!r} to have the same structure, shapes and dtypes in all buckets "
                    f"of {self._name!r}, found others in {program.name}"
                )
            alike = [each for each, result in results.items() if branch.holds_what(result)]
            found = candidates(key, alike, taken)
            if not found:
                raise UsageError(
                    f"bind: {program.name} returns nothing with the structure, shapes and dtypes of {key!r}",
                    hint="keep an argument that the function returns anew",
                )
            if len(found) > 1:
                raise UsageError(
                    f"bind: expected one result of {program.name} that can be the next {key!r}, found "
                    f"{', '.join(map(repr, found))} with the same structure, shapes and dtypes",
                    hint=how_to_name(key),
                )
            slots[key] = results.pop(found[0])
            for argument, array in zip(branch.arrays, slots[key].arrays, strict=True):
                # XLA takes the parts of the one for those of the other.
                if argument.sharding != array.sharding:
                    raise UsageError(
                        f"bind: expected the next {pytree.spell((key, *argument.path[1:]))} of "
                        f"{program.name} to be split along {[*argument.sharding]}, as the argument, found "
                        f"{[*array.sharding]}",
                        hint="build it with the same shardings of both; without those of the result it is "
                        "split as the argument",
                    )
        others = [branch for key, branch in taken.items() if key not in slots]
        order = [taken[key] for key in self.state] + others
        given = [place for branch in order for place in branch.places]
        returned = tuple(results.values())
        tree = self._calls.programs.results_tree(program.name)
        route = self._routes[program.name] = Route(
            tuple(array for branch in others for array in branch.arrays),
            _picker([given.index(place) for place in range(len(given))]),
            _picker([place for slot in slots.values() for place in slot.places]),
            _picker([place for branch in returned for place in branch.places]),
            returned,
            isinstance(tree, trees.Node) and tree.kind not in ("list", "tuple", "node"),
        )
        return route

    def _arguments(self, program: ProgramEntry) -> dict[trees.Key, Branch]:
        """Return the arguments of a program."""
        programs = self._calls.programs
        tree, arrays = programs.arguments_tree(program.name), programs.arguments(program.name)
        return {branch.key: branch for branch in branches(tree, arrays)}

    def _results(self, program: ProgramEntry) -> list[Branch]:
        """Return the results of a program; all of them as one, if together they can be the state."""
        programs = self._calls.programs
        tree = without_references(programs.results_tree(program.name))
        arrays = programs.results(program.name)
        together = whole(tree, arrays)
        alone = any(map(together.holds_what, self.state.values()))
        return [together] if alone else branches(tree, arrays)
