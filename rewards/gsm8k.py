"""The rewards of the arithmetic tasks (gsm8k, gsm_symbolic), in the two readings of --reward-mode.

| name          | pays       |                                                                     |
| ------------- | ---------- | ------------------------------------------------------------------- |
| correctness   | 2.0        | the answer is the gold one                                          |
| integer       | 0.5        | the answer is an integer                                            |
| strict_format | 0.5        | the four tags with their line breaks, and nothing around them       |
| soft_format   | 0.5        | a reasoning block, then an answer block                             |
| xml_count     | up to 0.5  | 0.125 a tag that stands once, less 0.001 a character after the last |

documented is what the source says of its rewards, verbatim what its published code computes.
Where the saying leaves room, documented means: the answer is what the last <answer> that is closed
holds, so a bare "72" or an answer cut off earns nothing for it; 1,200 and 72.0 are 1200 and 72,
$72 and 72. are 72 but no integers, +72 is an integer but not 72; strict wants each tag once, soft
looks anywhere in the text; xml_count has no floor, and one line break after the end is free.

Every function is linear in the length of the text, since a policy may write thousands of tokens.
"""

from __future__ import annotations

import re

from data import Example, RewardFunction
from grpo.errors import UserError

MODES = ("documented", "verbatim")
REASONING, REASONING_END = "<reasoning>", "</reasoning>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
GOLD_MARK = "####"  # before the gold answer, in the data and in what some models write
NOT_IN_TAGS = "right, but not in the tags"

_INTEGER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+")
# A minus behind a letter or a digit is a hyphen: pages 10-15.
_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
# Between the blocks. Possessive: blanks that no <answer> follows are read once.
_JUNCTION = re.compile(rf"{REASONING_END}\s*+{ANSWER}")
_STRICT_JUNCTION = f"\n{REASONING_END}\n{ANSWER}\n"


def reward_functions(mode: str) -> dict[str, RewardFunction]:
    """By name, in the order of the table. example.answer is the gold answer as the data has it."""
    modes = {"documented": _documented, "verbatim": _verbatim}
    if mode not in modes:
        raise UserError(f"--reward-mode: '{mode}' is none of {', '.join(MODES)}")
    return modes[mode]()


def highest_rewards(mode: str) -> dict[str, float]:
    """What a perfect answer earns of each. {} for verbatim: its strict format wants no line break
    at the end, and its xml_count then charges the whole text."""
    if mode != "documented":
        return {}
    formats = {"integer": 0.5, "strict_format": 0.5, "soft_format": 0.5, "xml_count": 0.5}
    return {"correctness": 2.0, **formats}


# ---------------------------------------------------------------------------------------------
# The evaluation


def is_correct(text: str, example: Example) -> bool:
    """Strict: the last closed <answer> holds the gold answer and nothing else."""
    return _is_gold(answer_text(text), example)


def is_correct_lenient(text: str, example: Example) -> bool:
    """The number that the text ends up with is the gold one, in whatever form it is given."""
    return last_number(text) == last_number(example.answer)


def failure_reason(text: str, example: Example) -> str:
    """Why the strict judge said no."""
    if is_correct_lenient(text, example):
        return NOT_IN_TAGS
    return "no answer in the tags" if answer_text(text) is None else "wrong answer"


def answer_text(text: str) -> str | None:
    """What the last <answer> holds, stripped; None if there is none or it is not closed."""
    _, opened, rest = text.rpartition(ANSWER)
    answer, closed, _ = rest.partition(ANSWER_END)
    return answer.strip() if opened and closed else None


def normalise(answer: str) -> str:
    """Without a leading $, commas between thousands, a full stop, zeros at the end of a decimal.

    >>> [normalise(a) for a in ("$1,080.", "72.0", "-7", "1.200", "72 clips")]
    ['1080', '72', '-7', '1.2', '72 clips']
    """
    answer = answer.strip().removeprefix("$").removesuffix(".").strip()
    if _GROUPED.fullmatch(answer):
        answer = answer.replace(",", "")
    if _DECIMAL.fullmatch(answer):
        answer = answer.rstrip("0").removesuffix(".")
    return answer


def last_number(text: str) -> str | None:
    """The number that a text ends up with, as plain digits; None if there is none.

    It is the last one in the last <answer>, closed or not; without one, the first behind the last
    ####; without that, the last of all. Numbers are compared as text: no number is too long.

    >>> [last_number(t) for t in ("It costs $1,200.50, not 7%.", "#### 8,000", "pages 10-15", "no")]
    ['7', '8000', '15', None]
    """
    if ANSWER in text:
        text = text.rpartition(ANSWER)[2].partition(ANSWER_END)[0]
    elif GOLD_MARK in text:
        found = _NUMBER.search(text, text.rindex(GOLD_MARK) + len(GOLD_MARK))
        return _plain(found.group()) if found else None
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def _plain(number: str) -> str:
    whole, _, decimals = number.lstrip("-−$").replace(",", "").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    plain = f"{whole}.{decimals}" if decimals else whole
    return f"-{plain}" if number[0] in "-−" and plain != "0" else plain


def _is_gold(answer: str | None, example: Example) -> bool:
    return answer is not None and normalise(answer) == normalise(example.answer)


# ---------------------------------------------------------------------------------------------
# documented


def _documented() -> dict[str, RewardFunction]:
    return {
        "correctness": lambda text, example: 2.0 * is_correct(text, example),
        "integer": lambda text, example: 0.5 * bool(_INTEGER.fullmatch(answer_text(text) or "")),
        "strict_format": lambda text, example: 0.5 * _is_strict(text),
        "soft_format": lambda text, example: 0.5 * _is_soft(text),
        "xml_count": _xml_count,
    }


def _is_strict(text: str) -> bool:
    tags = (REASONING, REASONING_END, ANSWER, ANSWER_END)
    if any(text.count(tag) != 1 for tag in tags):
        return False
    return _is_verbatim_strict(text.removesuffix("\n"))


def _is_soft(text: str) -> bool:
    """Whether <reasoning>.*?</reasoning>\\s*<answer>.*?</answer> is anywhere in it, in one pass:
    blocks meet between the first tag that opens and the last that closes."""
    start, end = text.find(REASONING), text.rfind(ANSWER_END)
    return start >= 0 and bool(_JUNCTION.search(text, start + len(REASONING), max(end, 0)))


def _xml_count(text: str, example: Example) -> float:
    marks = (f"{REASONING}\n", f"{REASONING_END}\n", f"{ANSWER}\n", ANSWER_END)
    tail = text.rpartition(ANSWER_END)[2] if ANSWER_END in text else ""
    extra = len(tail.removeprefix("\n"))
    return 0.125 * sum(text.count(mark) == 1 for mark in marks) - 0.001 * extra


# ---------------------------------------------------------------------------------------------
# verbatim


def _verbatim() -> dict[str, RewardFunction]:
    return {
        "correctness": lambda text, example: 2.0 * (_verbatim_answer(text) == example.answer),
        "integer": lambda text, example: 0.5 * _verbatim_answer(text).isdigit(),
        "strict_format": lambda text, example: 0.5 * _is_verbatim_strict(text),
        "soft_format": lambda text, example: 0.5 * _is_verbatim_soft(text),
        "xml_count": _verbatim_xml_count,
    }


def _verbatim_answer(text: str) -> str:
    """Text without the tags is all answer."""
    return text.rpartition(ANSWER)[2].partition(ANSWER_END)[0].strip()


def _is_verbatim_strict(text: str) -> bool:
    """All of it is <reasoning>\\n.*?\\n</reasoning>\\n<answer>\\n.*?\\n</answer>, where the dot
    matches line breaks too. The first junction leaves the most room behind it."""
    start, end = f"{REASONING}\n", f"\n{ANSWER_END}"
    if not (text.startswith(start) and text.endswith(end)):
        return False
    return text.find(_STRICT_JUNCTION, len(start), len(text) - len(end)) >= 0


def _is_verbatim_soft(text: str) -> bool:
    """All of it is <reasoning>.*?</reasoning>\\s*<answer>.*?</answer>, likewise."""
    if not (text.startswith(REASONING) and text.endswith(ANSWER_END)):
        return False
    return bool(_JUNCTION.search(text, len(REASONING), len(text) - len(ANSWER_END)))


def _verbatim_xml_count(text: str, example: Example) -> float:
    """The two marks of the answer charge what comes after it: the first all that is behind the line
    with </answer>, which is the whole text if no line break ends it, the second one less."""
    total = 0.125 * (text.count(f"{REASONING}\n") == 1)
    total += 0.125 * (text.count(f"\n{REASONING_END}\n") == 1)
    if text.count(f"\n{ANSWER}\n") == 1:
        # Not rpartition: of two closing tags that share a line break the source sees the first.
        total += 0.125 - 0.001 * len(text.split(f"\n{ANSWER_END}\n")[-1])
    if text.count(f"\n{ANSWER_END}") == 1:
        total += 0.125 - 0.001 * (len(text.rpartition(f"\n{ANSWER_END}")[2]) - 1)
    return total
