"""The model made from scratch: its name, and how an export of it is known. No torch in here."""

from __future__ import annotations

import os.path
from pathlib import Path

SCRATCH = "scratch"

# Each message on a line of its own; the model goes on from there, so nothing opens its turn.
SCRATCH_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


def made_from_scratch(model: str) -> bool:
    """Whether the model knows nothing but a task's own tokens: a fresh one, or one of our exports
    of it, which can be told by its tokenizer's chat template."""
    template = Path(os.path.expanduser(model)) / "chat_template.jinja"
    return model == SCRATCH or (
        template.is_file() and template.read_bytes() == SCRATCH_TEMPLATE.encode()
    )
