"""The spectrogram of the transcriber example against transformers' WhisperFeatureExtractor."""

import runpy
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4
SAMPLES = 480_000


@cache
def mel():
    return runpy.run_path(str(ROOT / "examples" / "transcriber" / "mel.py"))


@cache
def log_mel():
    return jax.jit(mel()["log_mel"], static_argnames="bins")


def noise():
    return np.random.default_rng(0).uniform(-1, 1, SAMPLES)


def bursts():
    """Short sounds with silence between and after, as of speech."""
    loud = np.random.default_rng(1).integers(0, 2, 20).repeat(12_000)
    time = np.arange(loud.size) / 16_000
    voice = sum(np.sin(2 * np.pi * 120 * n * time) / n for n in range(1, 30))
    return np.pad(0.2 * loud * voice, (0, SAMPLES - loud.size))


def click():
    return np.eye(1, SAMPLES, 1_000)[0]


def silence():
    return np.zeros(SAMPLES)


@pytest.mark.parametrize(
    ("sound", "bins"), [(bursts, 80), (click, 80), (silence, 80), (noise, 128)]
)
def test_the_spectrogram_equals_transformers(sound, bins):
    from transformers import WhisperFeatureExtractor

    samples = sound().astype(np.float32)
    extractor = WhisperFeatureExtractor(feature_size=bins)
    expected = extractor(samples, sampling_rate=16_000)["input_features"][0]
    found = np.asarray(log_mel()(samples, bins=bins))
    assert (found.shape, found.dtype) == ((bins, 3000), np.float32)
    assert np.abs(found - expected).max() < TOLERANCE


def test_the_sounds_differ_and_the_loudest_frames_are_where_the_sound_is():
    quiet = np.asarray(log_mel()(silence().astype(np.float32)))
    assert np.ptp(quiet) == 0
    clicked = np.asarray(log_mel()(click().astype(np.float32)))
    # Frames are centred on every 160th sample and are 400 wide: two of them contain sample 1000.
    assert np.flatnonzero(clicked.max(0) > clicked.min()).tolist() == [6, 7]
