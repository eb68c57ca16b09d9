"""Read how transformers' image processor makes pixels of a picture, from the file that it saves.

Resizing and cropping are done where a bundle runs, by Pillow, as PilBackend of transformers 5 does them
(image_processing_backends.py). Rescaling and normalizing are parts of the compiled program. No JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

FILES = ("processor_config.json", "preprocessor_config.json")
"""The files that may say it. The first counts if it has an object `image_processor`, as in transformers."""

MATCHING = {"clip": ("logit_scale",), "siglip": ("logit_bias", "logit_scale")}
"""The tensors that make logits of the cosine of an image and a text: exp(scale) * cosine + bias."""

_HALVES, _IMAGENET = [0.5] * 3, ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_OPENAI = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_CROPPED = {
    "resample": 3,
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": 224,
    "image_mean": _OPENAI[0],
    "image_std": _OPENAI[1],
}
_SQUARE = {
    "resample": 2,
    "size": 224,
    "default_to_square": True,
    "do_center_crop": False,
    "crop_size": None,
    "image_mean": _HALVES,
    "image_std": _HALVES,
}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "BitImageProcessor": _CROPPED,
    "CLIPImageProcessor": _CROPPED,
    "DINOv3ViTImageProcessor": _SQUARE | {"image_mean": _IMAGENET[0], "image_std": _IMAGENET[1]},
    "Gemma3ImageProcessor": _SQUARE | {"size": {"height": 224, "width": 224}},
    "SiglipImageProcessor": _SQUARE
    | {"resample": 3, "size": {"height": 224, "width": 224}, "default_to_square": False},
    "ViTImageProcessor": _SQUARE,
}
"""The classes of image processors, with what each one takes for a missing key."""

_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_UNUSED = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "do_convert_rgb"),
    *("return_tensors", "device", "disable_grouping", "_valid_processor_keys", "pad_size"),
)
"""Keys that change no pixel of an RGB picture that is not padded."""
_PAN_AND_SCAN = (
    *("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"),
    "pan_and_scan_min_ratio_to_activate",
)
_LARGEST = 2**14


@dataclass(frozen=True)
class ImageProcessing:
    """The steps of an image processor: resize, crop, multiply, normalize.

    Attributes:
        size: height and width of what the model is given.
        resize: height and width that pictures are resized to; or that of the shorter edge alone; empty: they
            are not resized. Then their middle of `size` is taken.
        resample: Pillow's number of the filter.
        factor: by which pixels are multiplied.
        mean: of each of the three channels, subtracted after that.
        deviation: of each channel, by which the result is divided.
        file: the file that says all this.
    """

    size: tuple[int, int]
    resize: tuple[int, ...]
    resample: int
    factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    file: Path


def read_processing(directory: Path, default: str) -> ImageProcessing:
    """Read the image processor of a model; `default` is its class where the file names none.

    Raises:
        CheckpointError: there is no file, or it has a setting that is not supported; the error names file,
            key, value and what is allowed.
    """
    file, content = _content(directory)
    kind = content.get("image_processor_type") or content.get("feature_extractor_type") or default
    name = (
        str(kind)
        .removesuffix("Fast")
        .removesuffix("Pil")
        .replace("FeatureExtractor", "ImageProcessor")
    )
    if name not in PROCESSORS:
        known = " or ".join(map(shown, PROCESSORS))
        raise _refused(file, "image_processor_type", known, kind, did_you_mean(name, PROCESSORS))
    settings = {**_STEPS, **PROCESSORS[name]}
    allowed = (
        *settings,
        *_UNUSED,
        *("do_pad", "data_format", "input_data_format", "image_seq_length"),
        *(_PAN_AND_SCAN if name == "Gemma3ImageProcessor" else ()),
    )
    for key, value in content.items():
        if key not in allowed:
            known = ", ".join(allowed)
            raise _refused(file, key, f"one of the keys {known}", key, did_you_mean(key, allowed))
        if value is None and settings.get(key):  # transformers leaves the step out, or fails
            raise _refused(file, key, f"{shown(settings[key])}, the default, or no such key", None)
        if value is not None and key in settings:
            settings[key] = value
    fixed: Mapping[str, list[Any]] = {
        "do_pad": [None, False],
        "data_format": [None, "channels_first"],
        "input_data_format": [None],
        "do_pan_and_scan": [None, False],
        # of a decoder, which compares it with its own (image_config.py)
        "image_seq_length": [content.get("image_seq_length")]
        if name == "Gemma3ImageProcessor"
        else [None],
    }
    for key, values in fixed.items():
        if content.get(key) not in values:
            raise _refused(file, key, " or ".join(map(shown, values)), content[key])
    for key in ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "default_to_square"):
        if type(settings[key]) is not bool:
            raise _refused(file, key, "true or false", settings[key])
    factor = _numbers(file, settings, "rescale_factor", 1)[0] if settings["do_rescale"] else 1.0
    mean: tuple[float, ...] = (0.0,) * 3
    deviation: tuple[float, ...] = (1.0,) * 3
    if settings["do_normalize"]:
        mean, deviation = (_numbers(file, settings, key, 3) for key in ("image_mean", "image_std"))
        if 0 in deviation:
            raise _refused(file, "image_std", "numbers other than 0", settings["image_std"])
    if type(settings["resample"]) is not int or settings["resample"] not in _FILTERS:
        known = ", ".join(f"{number} ({filter_})" for number, filter_ in _FILTERS.items())
        raise _refused(file, "resample", known, settings["resample"])
    if name.startswith("DINOv3") and settings["resample"] != 2:
        wanted = "2 (bilinear): this class resizes in float32, where other filters pass 0 and 1"
        raise _refused(file, "resample", wanted, settings["resample"])
    resize: tuple[int, ...] = ()
    if settings["do_resize"]:
        resize = _size(file, settings, "size", square=settings["default_to_square"])
    size = resize
    if settings["do_center_crop"] and name != "Gemma3ImageProcessor":  # which never crops
        size = _size(file, settings, "crop_size", square=True)
    if len(size) != 2:
        wanted = "true, or a size with height and width: all pictures must get the same size"
        raise _refused(file, "do_center_crop", wanted, settings["do_center_crop"])
    return ImageProcessing(
        (size[0], size[1]), resize, settings["resample"], factor, mean, deviation, file
    )


def processing_files(directory: Path) -> list[Path]:
    """Return the files of the image processor that a directory has."""
    return [directory / name for name in FILES if (directory / name).is_file()]


def sight_files(directory: Path) -> list[Path]:
    """Return the files that say how a decoder's prompts hold images."""
    names = ("tokenizer.json", "tokenizer_config.json")
    files = [directory / name for name in names if (directory / name).is_file()]
    return [*processing_files(directory), *files]


def _content(directory: Path) -> tuple[Path, Mapping[str, Any]]:
    whole, alone = (directory / name for name in FILES)
    nested = read_object(whole, required=False).get("image_processor")
    if isinstance(nested, dict):
        return whole, nested
    return alone, read_object(alone, "expected the files that were published with the model")


def _size(file: Path, settings: Mapping[str, Any], key: str, *, square: bool) -> tuple[int, ...]:
    """Return height and width, or the shorter edge alone."""
    value = settings[key]
    found: list[Any] = [value, value] if square else [value]
    if isinstance(value, dict):
        given = {name for name, number in value.items() if number is not None}
        names = ("height", "width") if given == {"height", "width"} else ("shortest_edge",)
        found = [value[name] for name in names] if given == {*names} else [None]
    whole = all(type(each) is int and 0 < each <= _LARGEST for each in found)
    if not whole or (key == "crop_size" and len(found) == 1):
        shorter = "" if key == "crop_size" else ", or with shortest_edge"
        wanted = f"an integer, or an object with height and width{shorter}; each 1 to {_LARGEST}"
        raise _refused(file, key, wanted, value)
    return tuple(found)


def _numbers(file: Path, settings: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    value = settings[key]
    found = value if isinstance(value, list) else [value] * count
    if len(found) != count or not all(type(n) in (int, float) and abs(n) < 1e6 for n in found):
        wanted = (
            "a number" if count == 1 else f"{count} numbers, one for each channel, or one number"
        )
        raise _refused(file, key, wanted, value)
    return tuple(map(float, found))


def _refused(file: Path, key: str, wanted: str, found: Any, guess: str = "") -> CheckpointError:
    return CheckpointError(
        f"{file}: {key}: expected {wanted}; found {shown(found)}{guess}",
        hint="make the pixels yourself, and write the model as a [[program]]",
    )
