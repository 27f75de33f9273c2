"""The one exception that is meant for the user's eyes, and how a command ends by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence


class UserError(Exception):
    """A mistake in what the user gave (a flag, a file, a model), or a state that needs the user.

    The message names what is wrong, where, and what to do. A command prints it as one line and
    exits with status 2; it is never shown as a traceback.
    """


def exit_status(
    work: Callable[[Sequence[str]], int], argv: Sequence[str], stopped: str = ""
) -> int:
    """That of a command: work's own, 2 for a UserError, told in one line, 130 after Ctrl-C.

    stopped: what to say then.
    """
    try:
        status = work(argv)
        sys.stdout.flush()
        return status
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if stopped:
            print(f"\n{stopped}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 0


def _nobody_reads() -> bool:
    """Whether it is the output that is closed, as by `| head`; then Python may not complain of it
    once more when it ends."""
    try:
        print(flush=True)  # flushing alone is silent by now: what could not be written is dropped
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
