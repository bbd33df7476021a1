"""The text as a ring that many streams read at once."""

import pytest

from retrograde.training import Text, TrainingError, embedded_text, read_text


def test_the_embedded_text_is_english_of_some_length():
    text = embedded_text()
    assert len(text.characters) > 100_000
    assert 60 < len(text.vocabulary) < 300
    assert " the " in text.characters
    assert 4 < text.entropy_bits < 5.5
    assert embedded_text().digest == text.digest


def test_codes_are_places_in_the_vocabulary():
    text = Text("banana", "example")
    assert text.vocabulary == "abn"
    assert text.codes.tolist() == [1, 0, 2, 0, 2, 0]
    assert text.entropy_bits == pytest.approx(1.4591479)


@pytest.mark.parametrize("position", [0, 3, 40, 10**6])
@pytest.mark.parametrize(("length", "batch"), [(1, 1), (5, 3), (39, 7), (7, 64)])
def test_every_stream_reads_on_around_the_ring(position, length, batch):
    characters = "".join(chr(97 + i % 26) for i in range(40))
    text = Text(characters, "example")
    inputs, targets = text.sequences(position, length, batch)
    assert inputs.shape == targets.shape == (length, batch)
    for stream in range(batch):
        start = stream * 40 // batch + position
        expected = [text.codes[(start + step) % 40].item() for step in range(length + 1)]
        assert inputs[:, stream].tolist() == expected[:-1]
        assert targets[:, stream].tolist() == expected[1:]
    following, _ = text.sequences(position + length, length, batch)
    assert following[0].tolist() == targets[-1].tolist()


def test_a_text_shorter_than_one_sequence_is_refused():
    text = Text("x" * 40, "notes.txt")
    text.check_length(39)
    with pytest.raises(TrainingError) as error:
        text.check_length(40)
    assert str(error.value) == (
        "notes.txt has 40 characters: a sequence of 40 needs at least 41; use --length 39 or less, "
        "or a longer text"
    )


@pytest.mark.parametrize("characters", ["", "x"])
def test_a_text_without_a_single_pair_wants_another(characters):
    with pytest.raises(TrainingError, match=r"use another --text$"):
        Text(characters, "empty.txt").check_length(1)


def test_files_are_read_as_utf_8(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("naïve α", encoding="utf-8")
    assert read_text(path).characters == "naïve α"


def test_a_file_that_cannot_be_read_is_named_with_a_remedy(tmp_path):
    with pytest.raises(TrainingError, match=r"missing\.txt: No such file.*give --text"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(TrainingError, match="directory"):
        read_text(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"abc\xff\xfe")
    with pytest.raises(TrainingError, match=r"not UTF-8: byte 3 is 0xff; convert it"):
        read_text(binary)
