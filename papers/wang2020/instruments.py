"""Instrument recordings as MFCC sequences: Wang, *BPPSA* (2020), section 4.2, table 4.2.

Three sets of the same sound trade resolution in time against resolution in frequency. The first
coefficient is dropped, since it is the average power; every other has zero mean and unit variance
over the frames of its recording. ``instruments_{s,m,l}.npz`` hold such sequences ready made; the
paper's own data are IRMAS: stereo recordings of 3 s, one folder a class, whose two channels stand
side by side (:mod:`wang2020.irmas`).
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrograde_papers.options import SETS, ExperimentError
from wang2020.task import Integers

__all__ = ["FEATURES", "Features", "Instruments", "features_of", "load_instruments"]

_PARTS = ("train_x", "train_y", "test_x", "test_y", "class_names")


@dataclass(frozen=True)
class Features:
    """How a set's MFCCs are computed: a row of table 4.2.

    Attributes:
        coefficients: of each frame, the first, which is dropped, included.
        window: length of the Fourier transform, in samples.
        hop: from one frame to the next, in samples.
    """

    coefficients: int
    window: int
    hop: int

    def frames(self, samples: int) -> int:
        """Steps of the sequence that so many samples make.

        Example:
            >>> [FEATURES[name].frames(132_300) for name in "sml"]
            [259, 517, 1034]
        """
        return 1 + samples // self.hop


FEATURES = {
    "s": Features(20, 4096, 512),
    "m": Features(13, 2048, 256),
    "l": Features(7, 1024, 128),
}


@dataclass(frozen=True, eq=False)
class Instruments:
    """The task of telling an instrument by its sound.

    Attributes:
        name: of the set: ``"s"``, ``"m"`` or ``"l"``.
        inputs: shape ``(samples, length, features)``, training samples first.
        labels: the class of each.
        training: samples to learn from; the others are held out.
        class_names: the instruments.

    Example:
        >>> sounds = np.zeros((5, 7, 2), np.float32)
        >>> task = Instruments("s", sounds, np.array([0, 1, 1, 0, 1]), 3, ("oboe", "cello"))
        >>> task.testing, task.test_samples(np.array([0, 1]))[0].shape
        (2, torch.Size([7, 2, 2]))
    """

    name: str
    inputs: NDArray[np.floating]
    labels: Integers
    training: int
    class_names: tuple[str, ...]

    @property
    def length(self) -> int:
        """Frames of a recording."""
        return int(self.inputs.shape[1])

    @property
    def features(self) -> int:
        """Coefficients of a frame, of all channels."""
        return int(self.inputs.shape[2])

    @property
    def classes(self) -> int:
        """How many instruments."""
        return len(self.class_names)

    @property
    def testing(self) -> int:
        """Samples held out."""
        return len(self.labels) - self.training

    def training_samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        """Some of the samples to learn from."""
        return self._samples(places)

    def test_samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        """Some of the samples held out."""
        return self._samples(places + self.training)

    def _samples(self, places: Integers) -> tuple[Tensor, Tensor]:
        sounds = np.ascontiguousarray(self.inputs[places].transpose(1, 0, 2), np.float32)
        return torch.from_numpy(sounds), torch.from_numpy(self.labels[places])


def load_instruments(folder: str | Path, name: str) -> Instruments:
    """Read ``instruments_{name}.npz``, whose name is ``"s"``, ``"m"`` or ``"l"``.

    Raises:
        ExperimentError: the file is not there, or is not such a file.
    """
    path = Path(folder) / f"instruments_{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            parts = {part: file[part] for part in _PARTS}
    except FileNotFoundError:
        names = ", ".join(f"instruments_{each}.npz" for each in SETS)
        raise ExperimentError(
            f"there is no {path}: give --data FOLDER that has {names}, or --irmas FOLDER with "
            "IRMAS-TrainingData"
        ) from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ExperimentError(
            f"cannot read {path}: {error}; expected an npz file with {', '.join(_PARTS)}"
        ) from error
    return _checked(path, name, parts)


def features_of(sound: NDArray[np.floating]) -> NDArray[np.float32]:
    """The network's inputs ``(frames, coefficients - 1)``, of one channel's coefficients.

    The first coefficient is dropped. Each of the others has zero mean and unit variance, or is zero
    where it never changes.

    Example:
        >>> features_of(np.array([[9.0, 9.0], [1.0, 3.0], [5.0, 5.0]])).tolist()
        [[-1.0, 0.0], [1.0, 0.0]]
    """
    kept = sound[1:]
    spread = kept.std(axis=1, keepdims=True)
    scaled = (kept - kept.mean(axis=1, keepdims=True)) / np.where(spread == 0, 1, spread)
    return np.ascontiguousarray(scaled.T, np.float32)


def _checked(path: Path, name: str, parts: dict[str, NDArray[np.generic]]) -> Instruments:
    train, test = parts["train_x"], parts["test_x"]
    labels = np.concatenate([parts["train_y"], parts["test_y"]]).astype(np.int64)
    names = tuple(map(str, parts["class_names"]))
    fits = train.ndim == test.ndim == 3 and train.shape[1:] == test.shape[1:]
    if not fits or len(labels) != len(train) + len(test) or not len(train) or not len(test):
        raise ExperimentError(
            f"cannot use {path}: train_x is {train.shape} and test_x {test.shape} for "
            f"{len(labels)} labels; expected (samples, frames, coefficients) and a label for each"
        )
    if labels.min() < 0 or labels.max() >= len(names):
        raise ExperimentError(
            f"cannot use {path}: labels from {labels.min()} to {labels.max()}, and "
            f"{len(names)} class names; expected labels from 0 to {len(names) - 1}"
        )
    sounds = np.concatenate([train, test]).astype(np.float32)
    if not np.isfinite(sounds).all():
        raise ExperimentError(f"cannot use {path}: some coefficients are not finite numbers")
    return Instruments(name, sounds, labels, len(train), names)
