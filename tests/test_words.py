import pytest

from odevit.words import si


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7.0 "),
        (1000, "1.0 k"),
        (29_860_000, "29.9 M"),
        (25.84e9, "25.8 G"),
        (60.6e15, "60.6 P"),
        (3e18, "3,000.0 P"),
    ],
)
def test_si(value, text):
    assert si(value) == text
