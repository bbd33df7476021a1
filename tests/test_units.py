from fractions import Fraction

import pytest

from retrograde.errors import RetrogradeError, UnitError
from retrograde.units import as_bytes, format_bytes, parse_memory


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (67108864, 67108864),
        ("67108864", 67108864),
        ("64MiB", 67108864),
        ("64 mib", 67108864),
        ("64Mi", 67108864),
        ("1.5GB", 1_500_000_000),
        ("2e3 kB", 2_000_000),
        ("1 B", 1),
        (1, 1),
        (0.05, Fraction(1, 20)),
        ("5%", Fraction(1, 20)),
        ("0.05", Fraction(1, 20)),
        ("100%", Fraction(1)),
        (1.0, Fraction(1)),
    ],
)
def test_memory_is_read_as_people_write_it(given, expected):
    assert parse_memory(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("64 parsecs", "unknown unit 'parsecs'"),
        ("lots", "cannot read the memory 'lots': expected bytes"),
        ("", "cannot read the memory ''"),
        ("-5%", "cannot read the memory '-5%'"),
        (0, "is 0 bytes: expected at least 1 byte"),
        (-7, "is -7 bytes"),
        ("0.4 B", "is 0 bytes"),
        (1.5, "1.5 times what ordinary backpropagation holds"),
        (0.0, "expected a fraction above 0"),
        ("300%", "3 times"),
        (float("nan"), "cannot read"),
        (float("inf"), "cannot read"),
        (True, "cannot read the memory True"),
        (None, "cannot read the memory None"),
        ([1], "cannot read"),
    ],
)
def test_nonsense_is_refused_with_the_remedy(given, message):
    with pytest.raises(UnitError, match="memory") as caught:
        parse_memory(given)
    assert message in str(caught.value)
    assert isinstance(caught.value, RetrogradeError)


def test_a_fraction_is_taken_exactly_and_rounded_down():
    assert as_bytes("10%", 10**15 + 9) == 10**14
    assert as_bytes(0.1, 999) == 99
    assert as_bytes("1KiB", 5) == 1024


def test_sizes_are_written_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "5 TiB",
    ]
