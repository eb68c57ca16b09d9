"""The queue: priorities, fair shares, nothing lost, and nobody waits for more prompts than needed."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.server.engine.fair_queue import FairQueue, positions_between, positions_of_call


def test_tokens_decide_and_nobody_saves_up_shares_by_waiting():
    queue = FairQueue()
    for number in range(100):
        queue.put(number, "long")
        queue.put(number, "short")

    def serve(count, **costs):
        names = []
        for _ in range(count):
            names.append(queue.take()[0])
            queue.charge(names[-1], costs.get(names[-1], 1000))
            if costs:  # else they go on
                queue.end(names[-1])
        return names

    served = serve(60, long=300, short=100)
    assert served.count("short") == pytest.approx(3 * served.count("long"), abs=3)
    queue = FairQueue()
    queue.put(0, "quiet")
    queue.end(queue.take()[0])  # it goes away, served nothing
    for number in range(10):
        queue.put(number, "busy")
    serve(5)
    for number in range(10):
        queue.put(number, "quiet")
    assert serve(4).count("busy") == 2  # in turns from now on: what it did not use before is gone


def test_a_client_with_many_requests_makes_room_for_one_with_fewer():
    queue = FairQueue()
    for client, count in (("flood", 5), ("some", 3), ("few", 1)):
        for number in range(count):
            queue.put(f"{client}{number}", client, priority=number == 1)
    assert queue.drop("flood") is None
    assert queue.drop("few") == "flood1"  # the least urgent
    assert queue.drop("new") == "flood4"  # then the newest
    assert queue.drop("some") is None  # both have 3
    assert queue.drop("few") is not None
    assert len(queue) == 6


@given(st.lists(st.sampled_from("aaaaabbc"), max_size=60), st.integers(1, 12))
def test_a_client_with_its_share_of_the_room_loses_nothing(clients, room):
    queue = FairQueue()
    for number, client in enumerate(clients):
        before = queue.count(client)
        if len(queue) < room:
            queue.put((client, number), client)
        elif (dropped := queue.drop(client)) is not None:
            assert queue.count(dropped[0]) >= room // len(set(clients))
            queue.put((client, number), client)
        else:
            assert before >= room // len(set(clients))
        assert len(queue) <= room


def test_a_client_runs_no_more_than_it_may_the_others_go_on_and_idle_ones_are_forgotten():
    queue = FairQueue()
    for number in range(4):
        queue.put(number, "limited", most_running=2)
    queue.put(9, "other", priority=1)
    assert queue.can_run == {"limited": 2, "other": 1}
    assert [queue.take()[1] for _ in range(3)] == [0, 1, 9]
    assert (queue.next(), queue.can_run, len(queue)) == (None, {"limited": 0}, 2)
    queue.end("limited")
    assert queue.take() == ("limited", 2)
    queue = FairQueue()
    for number in range(3000):
        queue.put(number, f"client {number}")
        name, _ = queue.take()
        queue.end(name)
    assert len(queue._clients) < 1100


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(-2, 2)),
            st.tuples(st.just("take"), st.integers(0, 50)),
            st.tuples(st.just("remove"), st.integers(0, 20)),
        )
    )
)
def test_every_request_comes_out_once_and_those_of_a_client_in_order(actions):
    queue = FairQueue()
    waiting = {}
    count = 0
    for action in actions:
        if action[0] == "put":
            queue.put(count, action[1], action[2])
            waiting[count] = action[1:]
            count += 1
        elif action[0] == "remove":
            assert queue.remove(action[1]) == (action[1] in waiting)
            waiting.pop(action[1], None)
        elif waiting:
            name, item = queue.take()
            client, priority = waiting.pop(item)
            assert client == name
            assert priority == min([priority, *(p for _, p in waiting.values())])
            same = [one for one, found in waiting.items() if found == (client, priority)]
            assert item == min([item, *same])
            queue.charge(name, action[1])
            queue.end(name)
        else:
            assert queue.next() is None
            with pytest.raises(IndexError):
                queue.take()
        assert len(queue) == len(waiting)
        assert sorted(queue) == sorted(waiting)


EVERYTHING = sys.maxsize


@pytest.mark.parametrize(
    ("waiting", "running", "positions", "of_call"),
    [
        # Running texts wait for few positions if few prompts wait.
        ({"": 2}, {"": 8}, 64, 64),
        ({"": 0}, {"": 1}, 64, 64),
        # More is computed the more prompts wait beside few texts. Those computed together do not make them
        # wait for more than two times the usual.
        ({"": 3}, {"": 8}, 96, 96),
        ({"": 8}, {"": 8}, 256, 128),
        ({"": 100}, {"": 4}, 6400, 128),
        # A client does not wait for the many prompts of another.
        ({"many": 100}, {"few": 1}, 64, 64),
        ({"many": 100, "few": 3}, {"few": 8, "many": 1}, 96, 96),
        # All are computed before a step that would decode nothing.
        ({"": 100}, {}, EVERYTHING, 128),
    ],
)
def test_positions_of_prompts_before_a_decode_step(waiting, running, positions, of_call):
    assert positions_between(64, waiting, running) == positions
    assert positions_of_call(64, positions) == of_call
