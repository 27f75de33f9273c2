"""Ctrl-C and SIGTERM: finish the step, save, and say how to go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import TypeVar

from grpo.distributed import any_rank, gather, is_first, share

T = TypeVar("T")


class Stopped(Exception):
    """A stop was asked for in the middle of something that is simply done again after a resume."""


class StopRequest:
    """`with StopRequest() as stop:` makes the first signal set `stop.requested`; the second kills.

    The loop looks at `requested` between steps, so that no step is left half done; an evaluation
    calls `check`, which raises Stopped.
    """

    # What the second one does, even where the first was ignored (a job that a shell put into the
    # background starts with SIGINT ignored).
    SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def __init__(self):
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        if self.requested:
            raise Stopped

    def check_together(self) -> None:
        """All ranks raise Stopped if one was asked to stop; all of them have to come here."""
        if any_rank(self.requested):
            raise Stopped

    def _ask(self, number, frame):
        self.requested = True
        signal.signal(number, self.SIGNALS[number])
        # print() may not be called while the program is inside another print(), as it may be here.
        with contextlib.suppress(OSError):
            if is_first():
                os.write(2, b"\nfinishing this step, then saving (once more to quit at once)\n")


def shared_out(work: Callable[[range], list[T]], places: range) -> list[T]:
    """What work(a rank's share of the places) gives, of all ranks in order, on every rank.

    Raises Stopped on all of them if work did so on one.
    """
    own = places[share(len(places))]
    try:
        found = work(own) if own else []
    except Stopped:
        found = None
    parts = gather(found)
    if None in parts:
        raise Stopped
    return [value for part in parts for value in part]
