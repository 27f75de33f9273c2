"""Ctrl-C and SIGTERM: finish the step, save, and say how to go on."""

from __future__ import annotations

import signal
import sys


class StopRequest:
    """`with StopRequest() as stop:` makes the first signal set `stop.requested`; the second kills.

    The loop looks at `requested` between steps, so that no step is left half done.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested = False

    def __enter__(self):
        self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        self.requested = True
        signal.signal(number, self._before[number])
        print("\nfinishing this step, then saving (once more to quit at once)", file=sys.stderr)
