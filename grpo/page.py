"""One self-contained HTML page: no script, nothing loaded, readable on a phone and in the dark."""

from __future__ import annotations

import contextlib
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo.errors import UserError

STYLE = """
:root { color-scheme: light dark; --ink: #22303c; --muted: #667480; --line: #d9dfe4;
  --paper: #ffffff; --card: #f5f7f9; --good: #15803d; --bad: #c02626; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ed; --muted: #9aa7b2; --line: #39444e;
  --paper: #14191e; --card: #1d242b; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0;
  font: .85rem/1.45 ui-monospace, monospace; }
.question { border-top: 1px solid var(--line); padding: .8rem 0; }
.answers { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); }
.answer { background: var(--card); border-left: 4px solid var(--bad); border-radius: 6px;
  padding: .5rem .8rem; min-width: 0; }
.answer.correct { border-color: var(--good); }
.correct > .verdict { color: var(--good); } .wrong > .verdict { color: var(--bad); }
.muted { color: var(--muted); }
.fault { border-left: 4px solid var(--bad); padding-left: .7rem; }
.note { border-left: 4px solid var(--line); padding-left: .7rem; }
"""
# Whatever a completion holds, the browser runs and loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: str) -> str:
    """The whole page around a body of HTML; the title is plain text."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escaped(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def escaped(text: object) -> str:
    """Plain text for an element or an attribute.

    >>> escaped("<|up|> & '")
    '&lt;|up|&gt; &amp; &#x27;'
    """
    return html.escape(str(text))


def element(tag: str, text: object, kind: str = "") -> str:
    """Plain text in a tag, of a class if one is given.

    >>> element("p", "a < b", "muted")
    '<p class="muted">a &lt; b</p>'
    """
    return f"<{tag}{_class(kind)}>{escaped(text)}</{tag}>"


def around(tag: str, parts: Iterable[str], kind: str = "") -> str:
    """HTML in a tag, of a class if one is given."""
    return f"<{tag}{_class(kind)}>{''.join(parts)}</{tag}>"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of plain text that scrolls by itself where the screen is too narrow for it."""
    lines = [around("tr", (element("th", cell) for cell in head))]
    lines += [around("tr", (element("td", cell) for cell in row)) for row in rows]
    return around("div", [around("table", lines)], "wide")


def write_page(path: Path, text: str) -> None:
    """Write the page aside and rename it. Raises UserError for a place that cannot be written."""
    aside = path.parent / f".{path.name}.writing"
    try:
        # A completion may hold half a surrogate pair, which UTF-8 has no bytes for.
        aside.write_text(text, "utf-8", errors="replace")
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another") from error


def _class(kind: str) -> str:
    return f' class="{escaped(kind)}"' if kind else ""
