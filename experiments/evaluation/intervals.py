"""The interval of a rate that was counted."""

import math
from statistics import NormalDist


def wilson_interval(count: int, total: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a rate of which `count` of `total` trials were seen.

    All rates p for which (rate - p)^2 <= z^2 p (1 - p) / total:

        (rate + z^2 / 2n -+ z sqrt(rate (1 - rate) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike rate -+ z sqrt(rate (1 - rate) / n) it has a width where nothing or everything was
    counted. Source: Wilson 1927, "Probable inference, the law of succession, and statistical
    inference".

    >>> low, high = wilson_interval(0, 25)
    >>> low, round(high, 3)
    (0.0, 0.133)

    Raises:
      ValueError: total is below 1, count outside [0, total], or confidence outside (0, 1).
    """
    if total < 1 or not 0 <= count <= total:
        raise ValueError(f"want 0 <= count <= total and total >= 1, got {count} of {total}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie in (0, 1), got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate, share = count / total, z * z / total
    middle = (rate + share / 2) / (1 + share)
    half = z * math.sqrt(rate * (1 - rate) / total + share / total / 4) / (1 + share)
    # The ends are exact where nothing or everything was counted; rounding would miss them.
    low = 0.0 if count == 0 else middle - half
    high = 1.0 if count == total else middle + half
    return low, high
