"""A model's directory is written aside and renamed when it is whole, so that a kill at any moment
leaves the old one or the new one, never half of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from grpo.errors import UserError


@contextmanager
def written_aside(directory: str | Path) -> Iterator[Path]:
    """Yields an empty directory beside `directory` that takes its place at the end.

    An export that is there already is replaced; a directory with anything else in it is refused.
    Raises UserError for that and for a disk that is full or may not be written.
    """
    target = Path(directory)
    partial = target.with_name(f".{target.name}.partial")
    if target.exists() and not _replaceable(target):
        raise UserError(f"{target}: there is something else in the way; choose another directory")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        _put_in_place(partial, target)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target}: cannot be written ({error}); nothing was changed") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(partial: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _replaceable(target: Path) -> bool:
    if not target.is_dir():
        return False
    return not any(target.iterdir()) or any(target.glob("*.safetensors"))
