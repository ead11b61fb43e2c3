"""Parsers and formatter of sizes, bandwidths and budgets; all values are bytes."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from coop_plan.schemas._parse import INT64_MAX
from coop_plan.schemas.errors import InvalidInputError

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtp", start=1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", re.ASCII)
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*%\s*", re.ASCII)

_BITS = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgtpKMGTP]i?)(b|[bB]its?)(/s|ps)?\s*", re.ASCII)
"""A size or bandwidth in bits: `12Gb`, `12Gbit`. `12gb` is bytes, but `12gb/s` rarely is."""

LEAST_RATE = 10**6
"""Bytes per second of the slowest link that is given without a unit."""

_LONGEST = 100
"""Characters of a size at most: int and Decimal fail on thousands of digits."""


@dataclass(frozen=True)
class Budget:
    """A memory budget, independent of a graph.

    `kind` "bytes": `value` is bytes; "share": `value` is a fraction of the peak of keep-everything,
    resident bytes included; "min": the smallest budget that the method can meet (`value` is 0).
    """

    kind: Literal["bytes", "share", "min"]
    value: Decimal

    def resolve(self, keep_all_peak_bytes: int) -> int | None:
        """The budget in bytes for a graph with this keep-everything peak; None for "min".

        Raises:
            InvalidInputError: the share exceeds int64.
        """
        if self.kind == "min":
            return None
        count = int(self.value if self.kind == "bytes" else self.value * keep_all_peak_bytes)
        if count > INT64_MAX:
            raise InvalidInputError(f"the budget is more than {INT64_MAX} bytes", "/budget")
        return count


def _refuse_bits(text: str, per: Literal["", "/s"]) -> None:
    """Raise `InvalidInputError` if a size, or a bandwidth with `per` "/s", is in bits."""
    bits = _BITS.fullmatch(text[:_LONGEST])
    if bits is None or (not per and (bits[4] or (bits[3] == "b" and bits[2].islower()))):
        return
    count, prefix = Decimal(bits[1]), bits[2][0].upper() + bits[2][1:]
    raise InvalidInputError(
        f"'{text}' is in bits: write {(count / 8).normalize():f}{prefix}B{per}, or"
        f" {count.normalize():f}{prefix}B{per} if bytes are meant"
    )


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `12GiB`, `12GB`, `1.5MiB` or `4096`; fractions of a byte are cut off.

    Raises:
        InvalidInputError: not a size, bits such as `12Gb`, an unknown unit, or above int64.
    """
    if len(text) > _LONGEST:
        raise InvalidInputError(f"a text of {len(text)} characters is not a size")
    _refuse_bits(text, "")
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidInputError(f"'{text}' is not a size: write 12GiB, 12GB, 500MB or plain bytes")
    value = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    if value > INT64_MAX:
        raise InvalidInputError(f"'{text}' is more than {INT64_MAX} bytes")
    return value


def parse_rate(text: str | int) -> int:
    """Bytes per second of a bandwidth such as `25GB/s` or `12GiB/s`, or a number of them.

    A text without a unit that is below 1 MB/s is taken for a forgotten unit.

    Raises:
        InvalidInputError: not a size per second, bits per second, or a forgotten unit.
    """
    if isinstance(text, int):
        text = f"{text}B/s"
    _refuse_bits(text, "/s")
    try:
        rate = parse_bytes(text.strip().removesuffix("/s"))
    except InvalidInputError:
        shown = text if len(text) <= _LONGEST else f"a text of {len(text)} characters"
        raise InvalidInputError(
            f"'{shown}' is not a bandwidth: write 25GB/s or plain bytes per second"
        ) from None
    number = text.strip()
    if 0 < rate < LEAST_RATE and number.replace(".", "", 1).isdigit():
        raise InvalidInputError(
            f"'{text}' is {rate} bytes per second: write {number}GB/s, or {number}B/s if meant"
        )
    return rate


def parse_budget(text: str | int) -> Budget:
    """Budget from `12GiB`, `12GB`, plain bytes (text or int), `50%` or `min`.

    Raises:
        InvalidInputError: another text, or a budget of zero or less.
    """
    if isinstance(text, int):
        if abs(text) > INT64_MAX:
            raise InvalidInputError(f"the budget is beyond {INT64_MAX} bytes")
        text = str(text)
    if len(text) > _LONGEST:
        raise InvalidInputError(f"a text of {len(text)} characters is not a budget")
    if text.strip().lower() == "min":
        return Budget("min", Decimal(0))
    if text.strip().startswith("-"):
        raise InvalidInputError(f"'{text}' is not a budget: it must be above zero")
    share = _SHARE.fullmatch(text)
    if share is not None:
        budget = Budget("share", Decimal(share[1]) / 100)
    else:
        try:
            budget = Budget("bytes", Decimal(parse_bytes(text)))
        except InvalidInputError as error:
            raise InvalidInputError(
                error.message.replace("is not a size", "is not a budget").replace(
                    " or plain bytes", ", plain bytes, 50% or min"
                )
            ) from None
    if budget.value <= 0 and re.search("[1-9]", text):
        raise InvalidInputError(f"'{text}' is less than a byte: write a share as 60%")
    if budget.value <= 0:
        raise InvalidInputError(f"'{text}' is not a budget: it must be above zero")
    return budget


def format_bytes(count: int) -> str:
    """Bytes as text in the largest binary unit with a value of at least 1: `5.05 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
