"""How sure a measured share is. No torch in here: the commands that only read files use it."""

from __future__ import annotations

import math


def wilson_interval(correct: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927), sensible at 0 and 1 too.

    >>> [round(x, 3) for x in wilson_interval(180, 200)]
    [0.851, 0.934]
    """
    if not count:
        return 0.0, 1.0
    share = correct / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
