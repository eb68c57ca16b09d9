"""The arithmetic of the comparison of two states of the runtime."""

from benchmarks.studies import before_after


def samples(before, after):
    return {
        f"{side} generate": [{"first_seconds": value, "tokens": [1, 2]} for value in values]
        for side, values in (("before", before), ("after", after))
    }


def test_ratios_are_taken_within_rounds_so_that_a_slow_round_does_not_count():
    made = before_after.table("x", samples([1.0, 9.0, 1.0], [0.5, 4.5, 0.5]))
    (line,) = made.rows
    assert line[0] == "exec to first token, ms"
    assert line[3:] == ("0.500", "0.500 to 0.500")
    assert made.note == "Tokens of both sides: the same."


def test_tokens_that_differ_are_shown():
    found = samples([1.0, 1.0], [1.0, 1.0])
    found["after generate"][1]["tokens"] = [1, 3]
    assert "**not the same**" in before_after.table("x", found).note


def test_the_interval_holds_the_median_and_widens_with_the_spread():
    narrow = before_after.interval([0.99, 1.0, 1.0, 1.0, 1.01])
    wide = before_after.interval([0.5, 0.9, 1.0, 1.1, 1.5])
    assert narrow[0] <= 1.0 <= narrow[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]
