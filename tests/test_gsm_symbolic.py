"""The gsm_symbolic task: made-up problems, from the templates of a package that may be missing."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
import types
from pathlib import Path

import pytest

from data import gsm_symbolic
from data.gsm_symbolic import (
    INSTALL,
    MARKED,
    PACKAGE,
    ROUNDED,
    VERSION,
    Options,
    load,
    load_templates,
    make_problems,
    usable,
)
from grpo.errors import UserError

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
with_package = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason=f"reasoning-gym is not there: {INSTALL}"
)


def made(question="2+2?", solution="2+2 = 4\n#### 4", answer="4") -> dict:
    return {"question": question, "answer": answer, "metadata": {"answer_cot": solution}}


def questions(examples) -> list[str]:
    return [e.messages[-1]["content"] for e in examples]


def counting(rng: random.Random) -> dict:
    """A template with fifty questions, some of them without a usable answer."""
    n = rng.randrange(100)
    answer = f"{n / 2:g}"
    return made(f"Half of {n}?", f"{n}/2 = {answer}\n#### {answer}", answer)


# ---------------------------------------------------------------------------------------------
# Without the package


def test_problems_are_whole_distinct_and_the_same_for_a_stream():
    problems = make_problems([counting], 20, "a")
    assert len({p.question for p in problems}) == 20
    assert all(p.gold.isdigit() for p in problems)
    assert make_problems([counting], 20, "a") == problems
    assert make_problems([counting], 20, "b") != problems
    refused = {p.question for p in problems}
    others = make_problems([counting], 30, "b", refused)  # 20 and 30 are all that there are
    assert not refused & {p.question for p in others}


@pytest.mark.parametrize(
    ("given", "gold"),
    [
        (made(), "4"),
        (made(solution="2+2 = 4.0\n#### 4.0"), "4"),
        (made(solution="2+2 = 4\n#### 5"), None),
        (made(solution="#### 4.5", answer="4.5"), None),
        (made(solution="2-6 = -4\n#### -4", answer="-4"), None),
        (made(solution="6 x 0.6666666666666666 = 4.0\n#### 4"), None),
        (made(question="What is 0.3333333 of 12?"), None),
    ],
)
def test_a_problem_is_used_if_its_answer_is_whole_and_its_text_fit_to_be_read(given, gold):
    problem = usable(given)
    assert (problem and problem.gold) == gold


def test_a_missing_package_is_told_with_the_command_that_gets_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(INSTALL)):
        load(Options(), 0, False)


def test_another_layout_of_the_package_is_told_too(monkeypatch, tmp_path):
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    with pytest.raises(UserError, match=re.escape(INSTALL)):
        load_templates()
    assert PACKAGE not in sys.modules


def test_the_command_names_the_version_that_the_tests_pass_with():
    assert f"{PACKAGE}=={VERSION}" in CONSTRAINTS.read_text().splitlines()
    assert INSTALL.endswith(f"=={VERSION}")


# ---------------------------------------------------------------------------------------------
# With it


@pytest.fixture(scope="module")
def templates():
    return load_templates()


@with_package
def test_training_and_held_out_problems_never_meet():
    task = load(Options(symbolic_train=3000), 1, False)
    assert len(task.train) == 3000 and len(task.evaluation) == 500
    train, held_out = set(questions(task.train)), set(questions(task.evaluation))
    assert len(train) == 3000 and len(held_out) == 500 and not train & held_out


@with_package
def test_the_seed_chooses_the_training_problems_and_not_the_held_out_ones():
    few = Options(symbolic_train=200, symbolic_held_out=50)
    first, again, other = (load(few, seed, False) for seed in (1, 1, 2))
    assert again.train == first.train and again.evaluation == first.evaluation
    assert other.evaluation == first.evaluation
    # The package's own numbering, seed + index, would make all but one the same.
    assert len(set(questions(other.train)) & set(questions(first.train))) < 10


@with_package
def test_every_solution_is_a_target_that_earns_everything():
    task = load(Options(symbolic_train=1000), 0, False)
    for example in [*task.train, *task.evaluation]:
        assert sum(f(example.target, example) for f in task.reward_functions.values()) == 4.0
        assert task.is_correct(example.target, example) and example.level.endswith("steps")


@with_package
def test_the_package_itself_is_neither_run_nor_left_behind(templates):
    """Running it takes eleven more packages. And whoever has run it keeps theirs."""
    assert len(templates) == 100 - len(MARKED | ROUNDED)
    assert not any(gsm_symbolic.is_part(name) for name in sys.modules)
    theirs = types.ModuleType(PACKAGE)
    theirs.__spec__ = importlib.util.find_spec(PACKAGE)
    sys.modules[PACKAGE] = theirs
    try:
        assert len(load_templates()) == len(templates)
        assert sys.modules[PACKAGE] is theirs
    finally:
        del sys.modules[PACKAGE]


# "48+24 = 72" or "$3 x 4 = $12", where nothing before it belongs to the same sum.
NUMBER = r"\$?[0-9]+(?:\.[0-9]+)?"
START = r"(?<![\w.)/%*+÷$-])(?<![+*/x÷%-] )(?<![\d)] )"
SUM = re.compile(rf"{START}({NUMBER}(?: ?[+-] ?{NUMBER})+) ?= ?({NUMBER})(?![\d.,/%])")
PRODUCT = re.compile(rf"{START}({NUMBER}) ?([*x/÷]) ?({NUMBER}) ?= ?({NUMBER})(?![\d.,/%])")


def sums(text: str):
    """(what is computed, its value, the value that the text gives)"""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    for left, right in SUM.findall(text):
        terms = re.findall(r"[+-]?[0-9.]+", re.sub(r"[ $]", "", left))
        yield left, sum(map(float, terms)), float(right.lstrip("$"))
    for a, sign, b, right in PRODUCT.findall(text):
        left, (a, b) = f"{a}{sign}{b}", (float(x.lstrip("$")) for x in (a, b))
        yield left, a * b if sign in "*x" else a / b, float(right.lstrip("$"))


@with_package
def test_the_sums_in_the_solutions_are_right(templates):
    """A template that cuts a remainder away (78/12 = 6) has a wrong gold answer and pays it."""
    checked = 0
    for number, template in enumerate(templates):
        for i in range(40):
            given = template(random.Random(i))
            if usable(given) is not None:
                for left, value, said in sums(given["metadata"]["answer_cot"]):
                    checked += 1
                    assert abs(value - said) < 0.006, (number, left, value, said)
    assert checked > 5000
