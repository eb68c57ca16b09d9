"""Sounds of telephone keys, to train on and to try: each key is two tones at once. NumPy alone.

Source: ITU-T recommendation Q.23, "Technical features of push-button telephone sets".
"""

from typing import NamedTuple

import numpy as np

RATE, SECONDS = 16_000, 2  # samples a second; length of every sound
KEYS = "123456789*0#"
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # hertz
MOST_KEYS = 6


class Call(NamedTuple):
    """A telephone call.

    Attributes:
        sound: float32 [32000], from -1 to 1.
        starts: seconds at which each key is pressed.
        ends: seconds at which each key is released.
    """

    sound: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def dial(keys: str, random: np.random.Generator) -> Call:
    """Return a call that presses keys, at a random speed on a random noisy line."""
    pressed = random.uniform(0.06, 0.14) * random.uniform(0.9, 1.1, len(keys))
    released = random.uniform(0.05, 0.12) * random.uniform(0.9, 1.1, len(keys))
    ends = random.uniform(0, 0.2) + np.cumsum(pressed + released) - released
    starts = ends - pressed
    noise = random.uniform(0.001, 0.03)
    sound = noise * random.standard_normal(RATE * SECONDS, np.float32)
    tuning, levels = random.uniform(0.985, 1.015), random.uniform(0.05, 0.3, 2)
    for key, start, length in zip(keys, starts, pressed, strict=True):
        row, column = divmod(KEYS.index(key), len(COLUMNS))
        time = np.arange(int(length * RATE), dtype=np.float32) / RATE
        for hertz, level in zip((ROWS[row], COLUMNS[column]), levels, strict=True):
            wave = np.sin(2 * np.pi * hertz * tuning * time + random.uniform(0, 2 * np.pi))
            sound[int(start * RATE) :][: len(time)] += level * wave
    return Call(sound, starts, ends)


def random_keys(random: np.random.Generator) -> str:
    """Return 1 to 6 keys."""
    return "".join(random.choice(list(KEYS), random.integers(1, MOST_KEYS + 1)))
