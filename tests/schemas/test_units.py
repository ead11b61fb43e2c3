"""Sizes and budgets as people write them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coop_plan.schemas import InvalidInputError, format_bytes, parse_budget, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("12GiB", 12 * 2**30),
        ("12GB", 12 * 10**9),
        ("12 gib", 12 * 2**30),
        ("500mb", 500 * 10**6),
        (" 1.5MiB ", 3 * 2**19),
        (".5kB", 500),
        ("0.3B", 0),
        ("1TiB", 2**40),
        ("2PB", 2 * 10**15),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes(text, count):
    """Powers of 1000 and of 1024 are different; decimals are exact."""
    assert parse_bytes(text) == count


NOT_SIZES = ["", " ", "GiB", "12 X", "12G", "-1", "+1", "1e9", "0x10", "1,5GB", "1..5", "nan"]
NOT_SIZES += ["inf", "12GiBs", "1 2", "\u0663", "½", "9223372036854775808", "9999999TiB"]
NOT_SIZES += ["9" * 5000]

NOT_BUDGETS = ["", "0", "0%", "0.0GiB", "-1", -1, 0, "-5%", "%", "half", "50 percent", "max", True]
NOT_BUDGETS += ["1e3%", "2**3", "9" * 5000, "9" * 2_000_000, "9" * 5000 + "%"]
NOT_BUDGETS += [2**63, 10**5000, -(10**5000)]


@pytest.mark.parametrize("text", NOT_SIZES, ids=range(len(NOT_SIZES)))
def test_not_sizes(text):
    """Refused in one line."""
    with pytest.raises(InvalidInputError) as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "peak", "count"),
    [
        ("12GiB", 1, 12 * 2**30),
        (4096, 1, 4096),
        ("50%", 1001, 500),
        ("33.3 %", 1000, 333),
        ("100%", 2**62 + 1, 2**62 + 1),
        ("150%", 10, 15),
        ("min", 10, None),
        (" MIN ", 10, None),
    ],
)
def test_budgets(text, peak, count):
    """Bytes, a share of keep-everything's peak, or the smallest possible."""
    assert parse_budget(text).resolve(peak) == count


@pytest.mark.parametrize("text", NOT_BUDGETS, ids=range(len(NOT_BUDGETS)))
def test_not_budgets(text):
    """Nothing else, and nothing that is zero or less."""
    with pytest.raises(InvalidInputError) as caught:
        parse_budget(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_message_says_what_to_write():
    """One line with the forms that are understood."""
    with pytest.raises(InvalidInputError) as caught:
        parse_budget("lots")
    assert str(caught.value) == (
        "'lots' is not a budget: write 12GiB, 12GB, 500MB, plain bytes, 50% or min"
    )


def test_rates():
    """Sizes per second; what is none is named."""
    texts = ("25GB/s", " 2 GiB/s", "7B/s", 7, "5000000", "0", "25gB")
    rates = [25 * 10**9, 2 << 30, 7, 7, 5 * 10**6, 0, 25 * 10**9]
    assert [parse_rate(text) for text in texts] == rates
    for text in ("fast", "25GB/h", "-1", "9" * 200):
        with pytest.raises(InvalidInputError, match="is not a bandwidth: write 25GB/s"):
            parse_rate(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("25", "'25' is 25 bytes per second: write 25GB/s, or 25B/s if meant"),
        ("2.5", "write 2.5GB/s"),
        ("25Gb/s", "in bits: write 3.125GB/s, or 25GB/s if bytes are meant"),
        ("100 gbps", "write 12.5GB/s"),
        ("800Mbit/s", "write 100MB/s"),
        ("8Gibit", "write 1GiB/s"),
    ],
)
def test_a_rate_that_is_rarely_meant_is_refused_with_both_readings(text, said):
    with pytest.raises(InvalidInputError) as caught:
        parse_rate(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "written"),
    [("12Gb", "1.5GB, or 12GB"), ("800 Mbit", "100MB, or 800MB"), ("8Gib", "1GiB, or 8GiB")],
)
def test_a_size_in_bits_is_refused_with_both_readings(text, written):
    """By the rule of bandwidths: a capital prefix before a lower-case b is not taken for bytes."""
    for parse in (parse_bytes, parse_budget):
        with pytest.raises(InvalidInputError) as caught:
            parse(text)
        assert str(caught.value) == f"'{text}' is in bits: write {written} if bytes are meant"


@given(st.text(max_size=12) | st.from_regex(r"[0-9.]{1,6} ?[kmgtpib%]{0,3}", fullmatch=True))
def test_any_text_is_a_budget_or_refused(text):
    """No other exception, whatever was typed."""
    try:
        budget = parse_budget(text)
    except InvalidInputError:
        return
    assert budget.kind == "min" or budget.value > 0
    assert isinstance(budget.value, Decimal)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (5423447777, "5.05 GiB"),
        (2**50, "1024.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format(count, text):
    """For people: the largest binary unit."""
    assert format_bytes(count) == text
