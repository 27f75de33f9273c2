"""The rewards of gsm8k in their two readings, and the strict and the lenient judge."""

from __future__ import annotations

import random
import re
import time

import pytest
from conftest import load_cases

from data import Example
from grpo.errors import UserError
from rewards.gsm8k import (
    MODES,
    NOT_IN_TAGS,
    answer_text,
    failure_reason,
    is_correct,
    is_correct_lenient,
    last_number,
    normalise,
    reward_functions,
)

CASES = load_cases("gsm8k_reward_cases")["cases"]
REWARDS = [c for c in CASES if c["kind"].startswith("reward/")]
NAMES = {
    "correctness": "correctness",
    "int": "integer",
    "strict": "strict_format",
    "soft": "soft_format",
    "xmlcount": "xml_count",
}
# Where the cases leave the documented reading open and this project does not take their first
# value: an answer counts inside closed tags only; thousands commas and zeros behind a point are
# how an integer may be written.
CHOSEN = {
    ("reward/cut/no-closing-answer", "correctness"): 0.0,
    ("reward/cut/no-closing-answer", "int"): 0.0,
    ("reward/notags/bare-number", "correctness"): 0.0,
    ("reward/notags/bare-number", "int"): 0.0,
    ("reward/answer/comma", "int"): 0.5,
    ("reward/answer/decimal-zero", "correctness"): 2.0,
}


def example(gold: str = "72") -> Example:
    return Example(messages=[], target="", answer=gold)


def answered(answer: str, reasoning: str = "so") -> str:
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>"


def test_every_case_is_read():
    assert len(REWARDS) == 58 and len(CASES) == 82


@pytest.mark.parametrize("case", REWARDS, ids=lambda c: c["id"])
@pytest.mark.parametrize("mode", MODES)
def test_case_reward(case, mode):
    text, gold = case["input"]["text"], case["input"]["gold"]
    functions = reward_functions(mode)
    assert list(functions) == list(NAMES.values())
    values = {name: function(text, example(gold)) for name, function in functions.items()}
    total = case["expected"][mode]["total"]
    for name, ours in NAMES.items():
        expected = case["expected"][mode][name]
        if mode == "documented" and (case["id"], name) in CHOSEN:
            chosen = CHOSEN[case["id"], name]
            assert chosen in case["unsure"][name]["also_acceptable"]
            total += chosen - expected
            expected = chosen
        assert values[ours] == pytest.approx(expected, abs=1e-9), name
    assert sum(values.values()) == pytest.approx(total, abs=1e-9)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["kind"] == "extract"], ids=lambda c: c["id"]
)
def test_case_extract(case):
    text, gold = case["input"]["text"], case["input"]["gold"]
    assert last_number(text) == case["expected"]["value"]
    assert is_correct_lenient(text, example(gold)) == case["expected"]["match"]


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match="documented, verbatim"):
        reward_functions("v2")


# ---------------------------------------------------------------------------------------------
# The formats against the plain patterns

STRICT = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>", re.DOTALL)
SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)


def random_texts(count: int) -> list[str]:
    """Mostly near the format: a good answer, of which some parts are dropped, doubled, swapped."""
    rng, texts = random.Random(0), []
    good = ["<reasoning>", "\n", "a", "\n", "</reasoning>", "\n", "<answer>", "\n", "7", "\n",
            "</answer>"]  # fmt: skip
    for _ in range(count):
        parts = list(good) * rng.choice((1, 1, 2))
        for _ in range(rng.choice((0, 1, 2, 4))):
            at, other = rng.randrange(len(parts)), rng.choice([*good, " ", "\n\n"])
            parts[at] = rng.choice(("", parts[at] * 2, parts[at] + other, other))
        texts.append("".join(parts))
    return texts


def test_the_formats_are_what_the_plain_patterns_match():
    """The one-pass forms of two patterns that take quadratic time, on 20,000 near misses."""
    verbatim, documented = reward_functions("verbatim"), reward_functions("documented")
    seen = set()
    for text in random_texts(20_000):
        strict, soft = bool(STRICT.fullmatch(text)), bool(SOFT.fullmatch(text))
        assert verbatim["strict_format"](text, example()) == 0.5 * strict, text
        assert verbatim["soft_format"](text, example()) == 0.5 * soft, text
        anywhere = bool(SOFT.search(text))
        assert documented["soft_format"](text, example()) == 0.5 * anywhere, text
        seen.add((strict, soft, anywhere))
    assert seen == {(True,) * 3, (False, True, True), (False, False, True), (False,) * 3}


def test_the_strict_judge_is_stricter_than_the_lenient_one():
    texts = random_texts(3000) + [answered(a) for a in ("7", "$7", "7.", "7.0", "0,007", "-7")]
    judged = {(is_correct(t, example("7")), is_correct_lenient(t, example("7"))) for t in texts}
    assert judged == {(True, True), (False, True), (False, False)}


# ---------------------------------------------------------------------------------------------
# The judges


def test_numbers_are_compared_in_any_way_of_writing_them():
    for gold, answers in {
        "1,080": ["1080", "1,080", "$1,080", "1080.", "1080.00"],
        "-7": ["-7", "-7.0", "-7."],
        "109,200,000": ["109200000", "$109,200,000."],
    }.items():
        for answer in answers:
            assert is_correct(answered(answer), example(gold)), answer
            assert is_correct_lenient(f"That makes {answer} in all.", example(gold)), answer
    assert normalise("12,00") == "12,00", "no thousands"
    assert last_number("it lost −$1,500") == "-1500", "the typographic minus"
    assert last_number("x=-0.50") == "-0.5" and last_number("-0") == "0"
    assert last_number("#### 72\nwhich is 24 more than 48") == "72", "the data's own mark"
    assert last_number("007") == "7" and last_number("a gain of .50") == "0.5"


def test_the_answer_is_in_the_last_block_that_is_opened_and_only_if_it_is_closed():
    assert answer_text("<answer>70</answer> no, <answer> 72 </answer>") == "72"
    assert answer_text("<answer>72</answer> or <answer>70") is None
    assert answer_text("72") is None and answer_text("72</answer>") is None
    assert answer_text("<answer></answer>") == ""


def test_a_failure_says_whether_only_the_tags_are_missing():
    assert failure_reason("It is 72.", example()) == NOT_IN_TAGS
    assert failure_reason("<answer>72 clips</answer>", example()) == NOT_IN_TAGS
    assert failure_reason("It is 70.", example()) == "no answer in the tags"
    assert failure_reason(answered("70"), example()) == "wrong answer"


# ---------------------------------------------------------------------------------------------
# Long outputs

# What would be found, and is missing or too much at the end; repeated to any length.
FLOODS = {
    "opening tags": ("", "<reasoning>\n", ""),
    "closing tags": ("<reasoning>\n", "\n</reasoning>\n", "</answer>"),
    "junctions": ("<reasoning>\n", "a\n</reasoning>\n<answer>\n", ""),
    "junctions with an end": ("<reasoning>\n", "a\n</reasoning>\n<answer>\n", "\n</answer>x"),
    "blanks between": ("<reasoning></reasoning>", " ", "x</answer>"),
    "closed and blank": ("<reasoning>", "</reasoning>  ", "</answer>"),
    "answers": ("", "<answer>7</answer>", "<answer>"),
    "digits": ("<reasoning>\na\n</reasoning>\n<answer>\n", "7", "\n</answer>"),
    "thousands": ("<answer>1", ",000", ",00x</answer>"),
    "thousands in the text": ("1", ",000", ",00x"),
    "numbers": ("", "-$1,1.1 ", "x"),
    "points": ("<answer>", "1.", "</answer>"),
    "zeros": ("<answer>0.", "0", "1x</answer>"),
    "minus signs": ("", "-", "x"),
    "marks": ("", "#### ", ""),
    "letters": ("<reasoning>\n", "a", ""),
}
SCORERS = {
    **{f"{mode} {n}": f for mode in MODES for n, f in reward_functions(mode).items()},
    "strict judge": is_correct,
    "lenient judge": is_correct_lenient,
    "failure": failure_reason,
}


def flood(what: str, length: int) -> str:
    head, part, tail = FLOODS[what]
    return head + part * ((length - len(head) - len(tail)) // len(part)) + tail


def seconds(function, text: str) -> float:
    """Of this process's own time, the least of five calls: other processes do not count."""
    best = []
    for _ in range(5):
        start = time.process_time()
        function(text, example())
        best.append(time.process_time() - start)
    return min(best)


@pytest.mark.parametrize("what", FLOODS)
def test_a_text_four_times_as_long_takes_about_four_times_as_long(what):
    """The plain patterns take sixteen times as long, minutes for 100,000 characters. What takes
    less than a millisecond cannot be measured, and is no trouble."""
    short, long = flood(what, 50_000), flood(what, 200_000)
    for name, function in SCORERS.items():
        after = seconds(function, long)
        if after > 1e-3:
            assert after / seconds(function, short) < 10, name


@pytest.mark.parametrize("mode", MODES)
def test_a_number_too_long_to_convert_is_scored_all_the_same(mode):
    """int() of more than 4,300 digits raises."""
    values = {n: f(answered("7" * 5000), example("7")) for n, f in reward_functions(mode).items()}
    assert values["correctness"] == 0.0 and values["integer"] == 0.5
    assert last_number("7" * 5000) == "7" * 5000
