"""The valid ranges of a method's parameters, checked when its dataclass is made."""

import math


def check_range(
    params: object,
    *names: str,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> None:
    """
    Hold the fields `names`, numbers or tuples of numbers, against a range: finite besides.

    Raises:
        ValueError: naming the field, its value and the range.
    """
    for name in names:
        value = getattr(params, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not (least <= number <= most and number > above and math.isfinite(number)):
                low = f"({above:g}" if above > least else f"[{least:g}"
                high = f"{most:g}{')' if math.isinf(most) else ']'}"
                field = f"{type(params).__name__}.{name}"
                raise ValueError(f"{field} = {value!r} is not in {low}, {high}")
