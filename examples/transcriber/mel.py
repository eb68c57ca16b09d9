"""The log-mel spectrogram that Whisper reads, in JAX alone, so that a bundle can have it as a program.

It equals transformers' WhisperFeatureExtractor (models/whisper/feature_extraction_whisper.py) within 1e-4.
"""

import jax
import jax.numpy as jnp
import numpy as np

RATE = 16_000  # samples a second
WINDOW, HOP = 400, 160  # samples of a frame, and from one frame to the next


def log_mel(sound: jax.Array, bins: int = 80) -> jax.Array:
    """Return the log-mel spectrogram of a sound: float32 [bins, S / 160].

    Args:
        sound: float32 [S], 16,000 samples a second from -1 to 1; S is a multiple of 160. Published Whispers
            read 30 seconds: 480,000 samples, zeros after a shorter sound.
        bins: 80, or 128 for whisper-large-v3 and what was made of it.
    """
    # Each frame is two and a half pieces of HOP samples. The first is centred on the first sample.
    padded = jnp.pad(sound, WINDOW // 2, mode="reflect")
    pieces = padded[: len(sound) + 2 * HOP].reshape(-1, HOP)
    frames = jnp.concatenate([pieces[:-2], pieces[1:-1], pieces[2:, : WINDOW - 2 * HOP]], 1)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    spectrum = jnp.fft.rfft(frames * jnp.float32(hann))
    power = spectrum.real**2 + spectrum.imag**2
    filters = jnp.float32(mel_filters(bins))
    mel = jnp.matmul(filters, power.T, precision=jax.lax.Precision.HIGHEST)
    decades = jnp.log10(jnp.maximum(mel, 1e-10))
    # The quietest 8 decades below the loudest value are cut off.
    return (jnp.maximum(decades, decades.max() - 8) + 4) / 4


def mel_filters(bins: int) -> np.ndarray:
    """Return the weight of each frequency in each mel bin, [bins, 201]: triangles of equal area.

    Source: transformers.audio_utils.mel_filter_bank with Slaney's scale and norm (Slaney 1998, "Auditory
    Toolbox", technical report 1998-010): 3 mels for 200 Hz up to 1000 Hz, then 27 for a factor of 6.4.
    """
    mels = np.linspace(0, 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4), bins + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    below, centre, above = (corners[first : first + bins, None] for first in range(3))
    hertz = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rising, falling = (hertz - below) / (centre - below), (above - hertz) / (above - centre)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (above - below)
