"""Recordings of instruments: the ready-made files, and IRMAS folders of WAV files."""

import sys
import wave

import numpy as np
import pytest
import torch

from retrograde_papers.options import ExperimentError
from wang2020 import irmas
from wang2020.instruments import FEATURES, features_of, load_instruments
from wang2020.irmas import find_recordings, load_irmas

RATE = 44_100


def test_a_set_is_read_as_it_is(sounds):
    task = load_instruments(sounds, "s")
    assert (task.length, task.features, task.classes) == (9, 2, 3)
    assert (task.training, task.testing) == (31, 9)
    inputs, classes = task.training_samples(np.array([0, 4]))
    assert inputs.shape == (9, 2, 2)
    assert inputs.dtype == torch.float32
    assert classes.tolist() == [0, 1]
    held, classes = task.test_samples(np.array([0]))
    with np.load(sounds / "instruments_s.npz") as file:
        assert np.array_equal(held[:, 0], file["test_x"][0].astype(np.float32))
        assert classes.tolist() == file["test_y"][:1].tolist()


def damaged(sounds, path, **parts):
    with np.load(sounds / "instruments_s.npz") as file:
        whole = dict(file)
    kept = {name: values for name, values in (whole | parts).items() if values is not None}
    np.savez(path / "instruments_s.npz", **kept)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"train_y": None}, "expected an npz file with train_x, train_y"),
        ({"train_y": np.zeros(5, int)}, "for 14 labels; expected (samples, frames, coefficients)"),
        ({"test_x": np.zeros((9, 8, 2))}, "test_x (9, 8, 2)"),
        ({"class_names": np.array(["a", "b"])}, "labels from 0 to 2, and 2 class names"),
        ({"test_x": np.full((9, 9, 2), np.nan)}, "not finite"),
        ({"train_y": np.array([{}] * 31, object)}, "cannot read"),
    ],
)
def test_a_file_that_is_something_else_is_refused(sounds, tmp_path, parts, expected):
    damaged(sounds, tmp_path, **parts)
    with pytest.raises(ExperimentError) as refusal:
        load_instruments(tmp_path, "s")
    assert expected in str(refusal.value)


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match=r"give --data FOLDER that has instruments_s\.npz"):
        load_instruments(tmp_path, "s")
    (tmp_path / "instruments_s.npz").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(ExperimentError, match="cannot read"):
        load_instruments(tmp_path, "s")


def test_coefficients_have_zero_mean_and_unit_variance():
    sound = np.random.default_rng(0).standard_normal((13, 65)) * 7 + 3
    found = features_of(sound)
    assert found.shape == (65, 12)
    assert np.abs(found.mean(axis=0)).max() < 1e-6
    assert found.std(axis=0) == pytest.approx(np.ones(12), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "frames", "columns"), [("s", 259, 38), ("m", 517, 24), ("l", 1034, 12)]
)
def test_the_sizes_are_those_of_table_4_2(name, frames, columns):
    features = FEATURES[name]
    assert features.frames(3 * RATE) == frames
    assert 2 * (features.coefficients - 1) == columns


@pytest.mark.parametrize(("name", "shape"), [("s", (259, 19)), ("m", (517, 12)), ("l", (1034, 6))])
def test_the_real_recordings_are_read(recordings, name, shape):
    task = load_instruments(recordings, name)
    assert (task.length, task.features) == shape
    assert (task.training, task.testing, task.classes) == (884, 216, 11)


def write_wav(path, frequency, seconds=0.3, channels=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    moments = np.arange(int(seconds * RATE)) / RATE
    tone = np.stack([np.sin(2 * np.pi * frequency * (1 + c) * moments) for c in range(channels)])
    samples = (8000 * tone.T).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())


@pytest.fixture
def wavs(tmp_path):
    for place, name in enumerate(("cel", "flu")):
        for recording in range(5):
            for excerpt in (1, 2):
                file = tmp_path / name / f"[{name}][cla]{recording:04}__{excerpt}.wav"
                write_wav(file, 200 * (1 + place) + 10 * recording + excerpt)
    return tmp_path


def test_excerpts_of_a_recording_stay_together(wavs):
    (wavs / "flu" / "008__[flu][nod]0000__1.wav").touch()
    (wavs / "flu" / "008__[flu][nod]0000__2.wav").touch()
    found = find_recordings(wavs)
    assert list(found) == ["cel", "flu"]
    assert [len(recording) for recording in found["flu"]] == [2] * 6
    train, test = irmas._split(found, seed=0)
    keys = [
        {path.stem.split("__")[-2] + path.parent.name for path, _ in part} for part in (train, test)
    ]
    assert not keys[0] & keys[1]
    assert (len(train), len(test)) == (18, 4)
    assert {label for _, label in test} == {0, 1}


def test_folders_without_recordings_are_refused(tmp_path, wavs):
    with pytest.raises(ExperimentError, match=r"found 0 such folders\. Give the folder"):
        find_recordings(tmp_path / "elsewhere")
    (wavs / "sax").mkdir()
    (wavs / "sax" / "[sax]0001__1.wav").touch()
    with pytest.raises(ExperimentError, match="sax has but one recording"):
        find_recordings(wavs)


def test_without_librosa_the_extra_is_named(wavs, monkeypatch):
    monkeypatch.setattr(irmas, "find_spec", lambda name: None)
    with pytest.raises(ExperimentError, match=r"pip install 'retrograde-papers\[irmas\]'"):
        load_irmas(wavs, ["s"])


class Librosa:
    """As much of librosa as is used, for where it is not installed."""

    def load(self, path, sr, mono):
        with wave.open(str(path)) as file:
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
            return samples.reshape(-1, file.getnchannels()).T / 2**15, sr

    @property
    def feature(self):
        return self

    def mfcc(self, y, sr, n_mfcc, n_fft, hop_length):
        frames = 1 + len(y) // hop_length
        return np.random.default_rng(len(y)).standard_normal((n_mfcc, frames)) + y[0]


def test_channels_stand_side_by_side(wavs, monkeypatch):
    monkeypatch.setattr(irmas, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "librosa", Librosa())
    done = []
    tasks = load_irmas(wavs, ["s", "l"], show=done.append)
    check_irmas(tasks)
    assert done == list(range(1, 21))
    write_wav(wavs / "cel" / "[cel][cla]0000__1.wav", 100, seconds=0.2)
    with pytest.raises(ExperimentError, match="expected files of one length"):
        load_irmas(wavs, ["s"])


def test_stereo_files_are_read_by_librosa(wavs):
    pytest.importorskip("librosa", reason="librosa is not installed")
    tasks = load_irmas(wavs, ["s", "l"])
    check_irmas(tasks)
    (wavs / "cel" / "[cel][cla]0000__1.wav").write_bytes(b"no sound")
    with pytest.raises(ExperimentError, match="expected a WAV file"):
        load_irmas(wavs, ["s"])


def check_irmas(tasks):
    samples = int(0.3 * RATE)
    for name, columns in (("s", 38), ("l", 12)):
        task = tasks[name]
        assert (task.length, task.features) == (FEATURES[name].frames(samples), columns)
        assert (task.training, task.testing, task.classes) == (16, 4, 2)
        inputs, _ = task.training_samples(np.arange(16))
        assert inputs.mean(0).abs().max() < 1e-5
        assert inputs.std(0, unbiased=False).max() < 1 + 1e-5
    assert tasks["s"].labels.tolist() == tasks["l"].labels.tolist()
