"""IRMAS, the data set of Wang, *BPPSA* (2020), section 4.2, from a folder of WAV files.

Bosch, Janer, Fuhrmann, Herrera, *A Comparison of Sound Segregation Techniques for Predominant
Instrument Recognition in Musical Audio Signals*, 2012. ``IRMAS-TrainingData`` has a folder for each
of eleven instruments, with stereo excerpts of 3 s at 44.1 kHz. The paper names no split; here one
recording in five is held out, chosen by the seed, and all excerpts of a recording
(``…0013__1.wav``, ``…0013__2.wav``) go the same way. MFCCs come from librosa, which is loaded when
it is needed.
"""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrograde_papers.options import ExperimentError
from wang2020.instruments import FEATURES, Features, Instruments, features_of

__all__ = ["find_recordings", "load_irmas", "require_librosa"]

_RATE = 44_100
_HELD_OUT = 5  # one recording in so many
_EXCERPT = re.compile(r"^(?:\d+__)?(.*)__\d+$")  # 008__[cel][nod][cla]0058__1

Recording = list[Path]


def load_irmas(
    folder: str | Path,
    names: Sequence[str],
    seed: int = 0,
    show: Callable[[int], object] = lambda done: None,
) -> dict[str, Instruments]:
    """A task for each set, of the same files in the same order, each read once.

    ``show`` is told how many files are done.

    Raises:
        ExperimentError: librosa is missing, there are no such files, or one cannot be read.
    """
    require_librosa()
    found = find_recordings(folder)
    train, test = _split(found, seed)
    files = [*train, *test]
    sounds: dict[str, list[NDArray[np.float32]]] = {name: [] for name in names}
    for done, (path, _) in enumerate(files, 1):
        channels = _read(path)
        for name in names:
            sounds[name].append(_sequence(channels, FEATURES[name]))
        show(done)
    labels = np.array([label for _, label in files])
    return {
        name: Instruments(name, _stacked(sounds[name], files), labels, len(train), tuple(found))
        for name in names
    }


def find_recordings(folder: str | Path) -> dict[str, list[Recording]]:
    """The WAV files of each instrument's folder, those of one recording together, in order.

    Raises:
        ExperimentError: there are fewer than two instruments, or one has a single recording.
    """
    found: dict[str, dict[str, Recording]] = {}
    for path in sorted(Path(folder).glob("*/*.wav")):
        excerpt = _EXCERPT.match(path.stem)
        key = excerpt[1] if excerpt else path.stem
        found.setdefault(path.parent.name, {}).setdefault(key, []).append(path)
    poor = [name for name, recordings in found.items() if len(recordings) < 2]
    if len(found) < 2 or poor:
        wrong = f"{poor[0]} has but one recording" if poor else f"found {len(found)} such folders"
        raise ExperimentError(
            f"--irmas {folder}: expected a folder for each instrument, such as cel and cla, with "
            f"WAV files of two recordings at least; {wrong}. Give the folder IRMAS-TrainingData "
            "itself"
        )
    return {name: list(recordings.values()) for name, recordings in found.items()}


def require_librosa() -> None:
    """Raise ExperimentError if there is no librosa."""
    if find_spec("librosa") is None:
        raise ExperimentError("--irmas needs librosa: pip install 'retrograde-papers[irmas]'")


def _split(
    found: dict[str, list[Recording]], seed: int
) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Files to learn from and files held out, each with its class."""
    random = np.random.default_rng(seed)
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, recordings in enumerate(found.values()):
        order = random.permutation(len(recordings))
        held = set(order[: max(1, len(recordings) // _HELD_OUT)].tolist())
        for place, recording in enumerate(recordings):
            part = test if place in held else train
            part += [(path, label) for path in recording]
    return train, test


def _read(path: Path) -> NDArray[np.float32]:
    """The channels of a file, ``(channels, samples)``."""
    librosa: Any = import_module("librosa")
    try:
        samples, _ = librosa.load(path, sr=_RATE, mono=False)
    except Exception as error:  # whatever the audio library at hand raises
        raise ExperimentError(
            f"cannot read {path}: {error or type(error).__name__}; expected a WAV file"
        ) from error
    return np.atleast_2d(samples)


def _sequence(channels: NDArray[np.float32], features: Features) -> NDArray[np.float32]:
    """One sequence, the channels' coefficients side by side."""
    librosa: Any = import_module("librosa")
    parts = [
        features_of(
            librosa.feature.mfcc(
                y=channel,
                sr=_RATE,
                n_mfcc=features.coefficients,
                n_fft=features.window,
                hop_length=features.hop,
            )
        )
        for channel in channels
    ]
    return np.concatenate(parts, axis=1)


def _stacked(
    sounds: list[NDArray[np.float32]], files: list[tuple[Path, int]]
) -> NDArray[np.float32]:
    for sound, (path, _) in zip(sounds, files, strict=True):
        if sound.shape != sounds[0].shape:
            raise ExperimentError(
                f"{path} gives {sound.shape} frames and coefficients, and {files[0][0]} "
                f"{sounds[0].shape}: expected files of one length and number of channels"
            )
    return np.stack(sounds)
