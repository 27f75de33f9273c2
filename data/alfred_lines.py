"""ALFRED's examples in few tokens: for a model from scratch, or a pretrained one in less time.

A model from scratch reads what is in the room, what has been done and the goal, and writes what
remains, an action a line:

    there apple bread countertop fridge ...
    done goto countertop pickup apple
    goal place a chilled apple on the counter

A word of the goal that hardly any training goal has stands as "?". A pretrained model reads the
goal as it was written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from data.alfred_actions import OBJECTS, VERBS

UNKNOWN = "?"
LEAST = 3  # goals that have a word, for it to be one of the vocabulary
INSTRUCTIONS = """You plan for a household robot that has one hand. Given a goal and the actions \
done so far, write the actions that remain, one on a line and nothing else. An action is one of \
these verbs and an object: """
_WORD = re.compile(r"[a-z0-9]+")


def words(text: str) -> list[str]:
    """
    >>> words("Put the knife's box on Table-2.")
    ['put', 'the', 'knife', 's', 'box', 'on', 'table', '2']
    """
    return _WORD.findall(text.lower())


def vocabulary(goals: Iterable[str]) -> list[str]:
    """The words of these goals, but for the rare ones; sorted."""
    count = Counter(word for goal in goals for word in set(words(goal)))
    return sorted(word for word, times in count.items() if times >= LEAST)


def tokens(known: Collection[str]) -> list[str]:
    """The vocabulary of a model from scratch: a token a word, with the blank before it unless it
    begins a line."""
    later = dict.fromkeys([*VERBS, *OBJECTS, *known, UNKNOWN])
    return ["\n", "there", "done", "goal", *VERBS, *(f" {word}" for word in later)]


def short_chat(
    goal: str, done: Sequence[str], there: Iterable[str], known: Collection[str]
) -> list[dict[str, str]]:
    """The prompt for a model from scratch. there: the objects of the scene, if it shall be told."""
    told = [word if word in known else UNKNOWN for word in words(goal)]
    lines = [("there", [*there]), ("done", [*done]), ("goal", told)]
    text = "\n".join(" ".join([name, *what]) for name, what in lines if what or name == "goal")
    return [{"role": "user", "content": text}]


def english_chat(goal: str, done: Sequence[str], there: Iterable[str]) -> list[dict[str, str]]:
    """The prompt for a pretrained model."""
    here = ", ".join(there)
    return [
        {"role": "system", "content": INSTRUCTIONS + ", ".join(VERBS) + "."},
        {
            "role": "user",
            "content": f"In the room: {here}\n" * bool(here)
            + f"Done: {', '.join(done) or 'nothing'}\nGoal: {goal}",
        },
    ]
