"""From a dataclass to command-line flags, and from a flag's text to a checked value."""

from __future__ import annotations

import argparse
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from difflib import get_close_matches
from typing import Any

from grpo.errors import UserError


def option(
    default: Any,
    help: str,
    choices: Sequence[Any] | None = None,
    positive: bool = False,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    section: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Its annotation is int, float, str or bool, or one of the first three with `| None` (typed as
    "none"). positive means above 0. section opens a new group of flags in --help; the fields
    after it stay in that group.
    """
    limits = {"positive": positive, "at_least": at_least, "at_most": at_most, "below": below}
    about = {"help": help, "choices": choices, "section": section}
    return field(default=default, metadata=about | limits)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def both_spellings(name: str) -> str:
    """As a flag and as a setting, so that whoever wrote either finds it in the message."""
    return f"{flag(name)} ({name})" if "_" in name else flag(name)


def with_dashes(word: str) -> str:
    """--learning_rate=1e-6 is as good as --learning-rate=1e-6."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def show(value: Any) -> str:
    """A setting's value as the command line takes it."""
    words = {None: "none", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


# ---------------------------------------------------------------------------------------------
# Values


def checked(owner: type, name: str, given: Any) -> Any:
    """`given`, a flag's text or a JSON value, as the type that owner annotates, within its limits.

    Raises UserError that names the setting, the value and what would be accepted.
    """
    kind, optional = _kind(owner, name)
    if optional and (given is None or str(given).lower() == "none"):
        return None
    try:
        value = _converted(kind, given)
    except (ValueError, TypeError, OverflowError):
        wanted = {int: "a whole number", float: "a number", bool: "yes or no"}.get(kind, "text")
        or_none = " (or none)" if optional else ""
        raise UserError(f"{both_spellings(name)}: '{given}' is not {wanted}{or_none}") from None
    _check_limits(name, value, owner.__dataclass_fields__[name].metadata)
    return value


_hints = functools.cache(typing.get_type_hints)


def _kind(owner: type, name: str) -> tuple[type, bool]:
    """The type in the annotation, and whether it may be None."""
    hint = _hints(owner)[name]
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    return next(t for t in typing.get_args(hint) if t is not type(None)), True


def _converted(kind: type, given: Any) -> Any:
    if kind in (str, bool) or isinstance(given, bool):
        if isinstance(given, kind) and (kind is bool or not isinstance(given, bool)):
            return given
        raise ValueError
    value = kind(given)
    if not math.isfinite(value) or value != float(given):
        raise ValueError  # nan, inf, or 2.5 for a whole number
    return value


def _check_limits(name: str, value: Any, meta: Mapping[str, Any]) -> None:
    where = f"{both_spellings(name)}: '{show(value)}'"
    if meta["choices"] and value not in meta["choices"]:
        known = [str(c) for c in meta["choices"]]
        near = get_close_matches(str(value), known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{where} is not one of {', '.join(known)}{hint}")
    limits = (
        ("above 0", meta["positive"] and value <= 0),
        (f"at least {meta['at_least']}", meta["at_least"] is not None and value < meta["at_least"]),
        (f"at most {meta['at_most']}", meta["at_most"] is not None and value > meta["at_most"]),
        (f"below {meta['below']}", meta["below"] is not None and value >= meta["below"]),
    )
    for limit, broken in limits:
        if broken:
            raise UserError(f"{where} is out of range; it must be {limit}")


# ---------------------------------------------------------------------------------------------
# Flags


class FlagParser(argparse.ArgumentParser):
    """argparse that raises UserError where it would print its usage and exit."""

    def __init__(self, **keywords: Any):
        # Abbreviations would hide a misspelt flag behind another one.
        super().__init__(allow_abbrev=False, **keywords)

    def error(self, message: str) -> typing.NoReturn:
        message = message.removeprefix("argument ")
        if "ignored explicit argument" in message:
            message = f"{message.split(':')[0]} is a switch; it takes no value"
        raise UserError(message.replace("expected one argument", "a value must follow"))


def add_flags(parser: FlagParser, owner: type, title: str, defaults: Mapping[str, Any]) -> None:
    """A flag for each field of owner; help shows the value in defaults, else the field's own.

    A flag that is not given leaves no trace in the parsed namespace.
    """
    group = None
    for f in fields(owner):
        if f.metadata["section"] or group is None:
            group = parser.add_argument_group(f.metadata["section"] or title)
        text = f"{f.metadata['help']} [{show(defaults.get(f.name, f.default))}]"
        keywords = {"dest": f.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        kind, _ = _kind(owner, f.name)
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif f.metadata["choices"]:
            keywords["metavar"] = "{" + ",".join(map(str, f.metadata["choices"])) + "}"
        else:
            keywords["metavar"] = {int: "N", float: "X"}.get(kind, "TEXT")
        group.add_argument(flag(f.name), **keywords)


def unknown_flag(word: str, names: Iterable[str]) -> str:
    """The message for a word that is no flag: the nearest of the settings, in both spellings."""
    if not word.startswith("-"):
        return f"'{word}' is no flag; settings are given as --name value, see --help"
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    near = get_close_matches(name, list(names), n=1, cutoff=0.5)
    hint = f"did you mean {both_spellings(near[0])}?" if near else "see --help for all of them"
    return f"{both_spellings(name)}: there is no such setting; {hint}"
