"""How sure a share of right answers is: Wilson's interval.

Wilson 1927, "Probable inference, the law of succession, and statistical inference", equation 2. Unlike the mean with
1.96 standard errors it stays within 0 and 1, and holds for few answers and for shares near either end.

Not here: what counts as right.
"""

import math

_Z_95 = 1.959964


def wilson_95(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share of `right` in `total`.

    Example: `wilson_95(8, 10)` is about `(0.490, 0.943)`.
    """
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"a share needs 0 <= right <= total and 1 <= total; they are {right} and {total}")
    share, square = right / total, _Z_95**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
