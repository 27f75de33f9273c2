"""Evaluation: who is right, why the others are not, and the same numbers however it is cut up."""

import json
import random
from dataclasses import replace

import pytest
import torch
from conftest import MARKOV_TOKENS, build_markov, build_tokenizer
from tiny import TEMPLATE, letters_task, policy_of, tiny_policy

import grpo.evaluate
from data import Example
from grpo.errors import UserError
from grpo.evaluate import OUT_OF_TOKENS, Answer, Evaluation, evaluate, table
from grpo.interval import wilson_interval


def example(prompt, answer, level=""):
    return Example([{"role": "user", "content": prompt}], target="", answer=answer, level=level)


def markov_policy(stop=(2, 3)):
    """Greedy: after a comes bc and <eos>; after b, c and <eos>; after d, <end> at once."""
    return policy_of(
        build_markov("grpo"), stop, build_tokenizer(MARKOV_TOKENS, chat_template=TEMPLATE)
    )


EXAMPLES = [
    example("a", "bc", "easy"),
    example("b", "c", "easy"),
    example("d", "", "hard"),
    example("a", "bcd", "hard"),
    example("b", "b", "easy"),
]


def markov_task(**changes):
    return letters_task(
        len,
        evaluation=EXAMPLES,
        is_correct=lambda text, example: text == example.answer,
        failure_reason=lambda text, example: f"{len(text)} letters",
        **changes,
    )


def judge(policy, task, examples, max_new_tokens=6, max_rows=4, **more):
    return evaluate(
        policy, task, examples,
        max_new_tokens=max_new_tokens, prompt_format="chat", max_rows=max_rows, **more,
    )  # fmt: skip


def test_answers_levels_and_reasons():
    found = judge(markov_policy(), markov_task(), EXAMPLES)
    assert [a.text for a in found.answers] == ["bc", "c", "", "bc", "c"]
    assert [a.correct for a in found.answers] == [True, True, True, False, False]
    assert [a.reason for a in found.answers] == ["", "", "", "2 letters", "1 letters"]
    assert [a.tokens for a in found.answers] == [3, 2, 1, 3, 2]
    assert found.accuracy == 0.6
    summary = found.summary()
    assert summary["levels"] == {
        "easy": {"examples": 3, "correct": 2, "accuracy": 2 / 3},
        "hard": {"examples": 2, "correct": 1, "accuracy": 0.5},
    }
    assert summary["failures"] == {"2 letters": 1, "1 letters": 1}
    assert summary["mean_tokens"] == 11 / 5
    assert json.loads(json.dumps(summary)) == summary


def test_the_lenient_judge_stands_beside_the_strict_one():
    task = markov_task(is_correct_lenient=lambda text, example: len(text) == len(example.answer))
    found = judge(markov_policy(), task, EXAMPLES, samples=8, seed=1)
    assert [a.correct_lenient for a in found.answers] == [True, True, True, False, True]
    summary = found.summary()
    assert (summary["correct"], summary["correct_lenient"]) == (3, 4)
    assert summary["accuracy_lenient"] == found.accuracy_lenient == 0.8
    assert summary["accuracy_lenient_95"] == [*wilson_interval(4, 5)]
    strict, lenient = (
        [getattr(a, name) for a in found.answers]
        for name in ("samples_correct", "samples_correct_lenient")
    )
    assert lenient[4] > strict[4] == 0, "what begins with b never is b alone"
    assert summary["pass@8 lenient"] == sum(n > 0 for n in lenient) / 5
    assert summary["pass@1 lenient"] == sum(lenient) / 40 > summary["pass@1"]
    rows = [line.split() for line in table({"start": summary}).splitlines()]
    assert rows[1:3] == [["all", "(5)", "60.0%"], ["lenient", "80.0%"]]
    assert ["pass@8", "lenient", f"{100 * summary['pass@8 lenient']:.1f}%"] in rows


def test_without_a_lenient_judge_nothing_is_said_of_it():
    found = judge(markov_policy(), markov_task(), EXAMPLES, samples=2)
    assert found.accuracy_lenient is None and found.answers[0].correct_lenient is None
    text = json.dumps(found.summary()) + table({"start": found.summary()})
    assert "lenient" not in text
    old = {"accuracy": 0.5, "examples": 4, "levels": {}}
    new = {**old, "accuracy_lenient": 0.75}
    assert table({"start": old, "after": new}).splitlines()[2].split() == ["lenient", "-", "75.0%"]


def test_a_level_with_a_slash_counts_in_the_row_above_it_too():
    answers = [
        Answer(example("a", "b", level), "", correct, "", 1)
        for level, correct in (("a/x", True), ("a/y", False), ("b", True))
    ]
    summary = Evaluation(answers, levels=("b", "a", "a/y", "a/x")).summary()
    found = summary["levels"]
    assert [(name, row["examples"], row["accuracy"]) for name, row in found.items()] == [
        ("b", 1, 1.0), ("a", 2, 0.5), ("a/y", 1, 0.0), ("a/x", 1, 1.0)
    ]  # fmt: skip
    shown = [line.split(" (")[0] for line in table({"eval": summary}).splitlines()[2:]]
    assert shown == ["b", "a", "a/y", "a/x"], "sorted again by the numbers, rows left their split"


@pytest.mark.parametrize(
    "appeared, order, wanted",
    [
        ("10 steps,5+ steps,9 steps", "", "5+ steps,9 steps,10 steps"),
        ("hard,easy,medium", "", "hard,easy,medium"),
        ("hard,beyond,easy", "easy,medium,hard", "easy,hard,beyond"),
    ],
)
def test_levels_come_by_difficulty_and_not_as_they_appear(appeared, order, wanted):
    examples = [example("a", "bc", level) for level in appeared.split(",")]
    task = markov_task(levels=order.split(","))
    summary = judge(markov_policy(), task, examples).summary()
    assert list(summary["levels"]) == wanted.split(",")


def test_a_cut_answer_ran_out_of_tokens_unless_it_is_right_already():
    found = judge(markov_policy(), markov_task(), EXAMPLES, max_new_tokens=2)
    assert [a.reason for a in found.answers] == ["", "", "", OUT_OF_TOKENS, "1 letters"]
    found = judge(markov_policy(stop=[]), markov_task(), EXAMPLES, max_new_tokens=1)
    assert {a.reason for a in found.answers if not a.correct} == {OUT_OF_TOKENS}


def test_the_stop_token_is_no_part_of_the_answer():
    """"<end>" behind a right answer would make it wrong, and every accuracy 0."""
    found = judge(markov_policy(), markov_task(), EXAMPLES[:3])
    assert found.accuracy == 1.0


@pytest.mark.parametrize("chunk", [1, 2, 128])
@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_chunks_and_rows_change_no_answer(monkeypatch, chunk, max_rows):
    policy, rng = tiny_policy("qwen3", stop=[2, 5, 9]), random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(9)]
    examples = [example(p, p[0]) for p in prompts]
    task = letters_task(len)
    wanted = judge(policy, task, examples)
    monkeypatch.setattr(grpo.evaluate, "FULL_BATCHES", chunk)
    assert judge(policy, task, examples, max_rows=max_rows).answers == wanted.answers


def test_pass_at_k_counts_the_examples_with_a_right_sample():
    found = judge(markov_policy(), markov_task(), EXAMPLES, samples=16, seed=1)
    right = [a.samples_correct for a in found.answers]
    assert all(0 < n < 16 for n in right[:2]) and right[3] < 16
    summary = found.summary()
    assert summary["samples"] == 16
    assert summary["pass@16"] == sum(n > 0 for n in right) / 5
    assert summary["pass@1"] == pytest.approx(sum(right) / 80)
    assert summary["accuracy"] == 0.6, "the greedy answers are what accuracy counts"
    greedy = judge(markov_policy(), markov_task(), EXAMPLES)
    assert [a.text for a in found.answers] == [a.text for a in greedy.answers]
    assert "pass@1" not in greedy.summary()


def test_samples_are_those_of_the_seed():
    def samples(**how):
        found = judge(markov_policy(), markov_task(), EXAMPLES, samples=32, **how)
        return [a.samples_correct for a in found.answers]

    assert samples(seed=3) == samples(seed=3, max_rows=64) != samples(seed=4)
    assert samples(seed=3, temperature=0.01) == [32, 32, 32, 0, 0]


def test_evaluating_changes_nothing():
    """It happens between two steps: weights, training mode and random state are the run's own."""
    policy = tiny_policy()
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    state = torch.get_rng_state()
    judge(policy, letters_task(len), letters_task(len).evaluation, samples=3)
    assert torch.equal(state, torch.get_rng_state()) and policy.model.training
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())
    assert all(p.grad is None for p in policy.model.parameters())


def test_progress_counts_every_row():
    ended = []
    judge(markov_policy(), markov_task(), EXAMPLES, samples=3, on_finish=ended.append)
    assert sum(ended) == 5 * (1 + 3)


@pytest.mark.parametrize("samples", [1, 4])
def test_no_examples_no_crash(samples):
    found = judge(markov_policy(), markov_task(), [], samples=samples)
    assert found.accuracy == 0 and found.summary()["accuracy_95"] == [0.0, 1.0]


def test_a_broken_model_is_not_a_model_of_accuracy_0():
    policy = tiny_policy()
    with torch.no_grad():
        policy.head.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="not numbers"):
        judge(policy, letters_task(len), letters_task(len).evaluation)


# ---- numbers and tables --------------------------------------------------------------------------


@pytest.mark.parametrize("right, count", [(0, 1), (0, 200), (1, 1), (200, 200), (37, 50)])
def test_the_interval_holds_the_share_and_stays_between_0_and_1(right, count):
    low, high = wilson_interval(right, count)
    assert 0 <= low <= right / count <= high <= 1 and high - low > 0.01
    assert wilson_interval(count - right, count) == pytest.approx((1 - high, 1 - low))


def test_the_table_has_a_row_a_level_and_a_column_an_evaluation():
    def summary(*right):
        answers = [Answer(e, "", ok, "", 1) for e, ok in zip(EXAMPLES, right, strict=True)]
        return Evaluation(answers).summary()

    text = table({"start": summary(*[False] * 5), "after_grpo": summary(*[True] * 4, False)})
    assert [line.split() for line in text.splitlines()] == [
        ["start", "after_grpo"],
        ["all", "(5)", "0.0%", "80.0%"],
        ["easy", "(3)", "0.0%", "66.7%"],
        ["hard", "(2)", "0.0%", "100.0%"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns stand under their names"


def test_the_table_has_a_row_for_each_pass_at_k():
    right = zip(EXAMPLES, (4, 1, 0, 0, 0), strict=True)
    sampled = Evaluation([Answer(e, "", False, "wrong", 1, n) for e, n in right], samples=4)
    greedy = Evaluation([Answer(EXAMPLES[0], "", True, "", 1)])
    text = table({"start": greedy.summary(), "after_grpo": sampled.summary()})
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["pass@4", "-", "40.0%"],
        ["pass@1", "-", "25.0%"],
    ]
    assert len({len(line) for line in text.splitlines()}) == 1


def test_the_table_survives_a_level_that_only_one_evaluation_has():
    one, other = ({"accuracy": 0.5, "examples": 2, "levels": levels} for levels in (
        {"easy": {"accuracy": 0.5, "examples": 2}}, {},
    ))  # fmt: skip
    assert "-" in table({"start": one, "after_sft": other}).splitlines()[2]
    assert "easy" in table({"start": other, "after_sft": one})


def test_measures_are_means_over_all_and_by_level():
    policy = tiny_policy()
    task = letters_task(len, measures={"letters": lambda text, example: len(example.answer)})
    levels = [replace(e, level=level) for e, level in zip(task.evaluation, "xyx", strict=True)]
    found = evaluate(
        policy, task, levels, max_new_tokens=2, prompt_format="chat", max_rows=4
    ).summary()
    assert found["measures"] == {"letters": 4 / 3}  # of a, bc, d
    assert {n: row["measures"]["letters"] for n, row in found["levels"].items()} == {"x": 1, "y": 2}
    assert "letters" in table({"start": found})
