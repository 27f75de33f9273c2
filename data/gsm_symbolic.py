"""The gsm_symbolic task: problems in gsm8k's style, made up as many as one likes, without a file.

The templates are those of reasoning-gym (Apache-2.0), after GSM-Symbolic (arXiv 2410.05229): a
gsm8k problem with other names and numbers each time, and its worked solution. Prompt, rewards and
evaluation are gsm8k's. Held-out problems have the same templates as the training ones, so this is
easier than gsm8k, and the two tasks' figures do not compare.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from data import Task
from data.word_problems import SETTINGS, Problem, WordProblemOptions, make_task, refuse_scratch
from grpo.config import option
from grpo.errors import UserError
from rewards.gsm8k import GOLD_MARK

DEFAULTS = SETTINGS
PACKAGE, VERSION = "reasoning_gym", "0.1.25"
INSTALL = f"pip install --no-deps reasoning-gym=={VERSION}"
MODULES = ("generators_00_49", "generators_50_99")
# Of the 100 templates: those that the package itself marks as not right yet, then those whose
# answer loses a fraction on the way (78/12 = 6).
MARKED = {32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98}
ROUNDED = {2, 3, 4, 49, 60, 75, 99}

_WHOLE = re.compile(r"[0-9]+")
_RESIDUE = re.compile(r"[0-9]\.[0-9]{5}")  # 0.6666666666666666: no one would write it

Template = Callable[[random.Random], dict[str, Any]]


@dataclass
class Options(WordProblemOptions):
    """The gsm_symbolic task's own flags."""

    # fmt: off
    symbolic_train: int = option(7000, "problems to make up for SFT and GRPO", positive=True,
                                 at_most=100_000)
    symbolic_held_out: int = option(500, "how many problems to hold out", positive=True,
                                    at_most=2000)
    # fmt: on


def load(options: Options, seed: int, from_scratch: bool) -> Task:
    """The task for these flags; seed chooses the training problems, never the held-out ones."""
    templates = load_templates()
    held_out = make_problems(templates, options.symbolic_held_out, "held-out")
    tested = {p.question for p in held_out}
    training = make_problems(templates, options.symbolic_train, f"train/{seed}", tested)
    return make_task("gsm_symbolic", training, held_out, options)


def resolve(options: Options, from_scratch: bool) -> Options:
    refuse_scratch("gsm_symbolic", from_scratch)
    return options


def make_problems(
    templates: list[Template], count: int, stream: str, refused: Collection[str] = ()
) -> list[Problem]:
    """So many problems of different questions, none of them refused; the same for a stream.

    The package numbers its problems by seed + index, so that the problems of two seeds near each
    other are the same ones: here each has a generator of its own.
    """
    found: dict[str, Problem] = {}
    attempt = 0
    while len(found) < count:
        rng = random.Random(f"{stream}/{attempt}")
        problem = usable(rng.choice(templates)(rng))
        if problem is not None and problem.question not in refused:
            found[problem.question] = problem
        attempt += 1
    return list(found.values())


def usable(made: dict[str, Any]) -> Problem | None:
    """What a template made, as a problem; None unless its answer is a whole number, not negative,
    and its text free of the residue of binary fractions."""
    solution, _, gold = made["metadata"]["answer_cot"].rpartition(GOLD_MARK)
    gold, stated = made["answer"].strip(), gold.strip().removesuffix(".0")
    if gold != stated or not _WHOLE.fullmatch(gold) or _RESIDUE.search(made["question"] + solution):
        return None
    return Problem(made["question"].strip(), solution.strip(), gold)


def load_templates() -> list[Template]:
    """The templates that are right, by their number. UserError if the package is not installed.

    Only their two modules are run. The package as a whole has a hundred other tasks and wants
    eleven more packages for them, one of which has to be compiled; these two want nothing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"--task gsm_symbolic needs the package reasoning-gym: {INSTALL}")
    root = spec.submodule_search_locations[0]
    there = {name: module for name, module in sys.modules.items() if is_part(name)}
    for name in there:
        del sys.modules[name]
    hull = ModuleType(PACKAGE)  # so that `from reasoning_gym.utils import ...` finds that one file
    hull.__path__ = [root]
    sys.modules[PACKAGE] = hull
    try:
        modules = [run_module(Path(root, "arithmetic", "gsm_symbolic", f"{n}.py")) for n in MODULES]
        numbers = [n for n in range(100) if n not in MARKED | ROUNDED]
        return [getattr(modules[n // 50], f"generate_{n}") for n in numbers]
    except (OSError, ImportError, AttributeError) as error:
        raise UserError(
            f"this version of reasoning-gym is made otherwise ({error}): {INSTALL}"
        ) from None
    finally:
        for name in [name for name in sys.modules if is_part(name)]:
            del sys.modules[name]
        sys.modules.update(there)


def is_part(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def run_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
