"""Neither a burst of prompts nor a text that runs may wait longer for the other than needed."""

from __future__ import annotations

import pytest

from prejit.server.engine.admission import positions_between, positions_of_call


@pytest.mark.parametrize(("waiting", "running"), [(1, 1), (1, 8), (8, 8), (7, 16), (0, 1)])
def test_running_texts_wait_for_few_positions_if_few_prompts_wait(
    waiting: int, running: int
) -> None:
    assert positions_between(64, {"": waiting}, {"": running}) == 64


def test_more_is_computed_the_more_prompts_wait_beside_few_texts() -> None:
    found = [positions_between(64, {"": waiting}, {"": 4}) for waiting in (4, 6, 8, 12, 16, 100)]
    assert found == [64, 96, 128, 192, 256, 256]


def test_a_client_does_not_wait_for_the_many_prompts_of_another() -> None:
    assert positions_between(64, {"many": 100}, {"few": 1}) == 64
    assert positions_between(64, {"many": 100, "few": 3}, {"few": 2, "many": 1}) == 96


def test_all_prompts_are_computed_before_a_step_that_would_decode_nothing() -> None:
    assert positions_between(64, {"": 100}, {}) > 1 << 40


def test_prompts_computed_together_do_not_make_running_texts_wait_longer() -> None:
    assert positions_of_call(64, positions_between(64, {"": 100}, {})) == 128
    assert positions_of_call(64, positions_between(64, {"": 3}, {"": 2})) == 96
