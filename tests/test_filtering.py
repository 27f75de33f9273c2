"""The online filter and the buffer: which groups are kept, when they are learned from, and how."""

import math

import pytest
import torch
from test_loop import odd_reward, run_steps, watched_rollouts
from test_packing import written_out_loss
from tiny import (
    gradients_of,
    letters_task,
    plain_logprobs,
    settings,
    tiny_policy,
    training_of,
    weights_of,
)

from data import Example
from data.maze_grid import MOVES
from grpo.advantages import group_advantages
from grpo.checkpoint import load_checkpoint, save_checkpoint
from grpo.config import validate
from grpo.errors import UserError
from grpo.filtering import Buffer, ScoredGroup, check_filter, kept_groups
from grpo.generate import Completion
from grpo.loop import train
from grpo.metrics import Rollout
from rewards import gsm8k, maze, weighted_sum

KEEPS_ALL = {"filter": "accuracy", "filter_lower": 0.0, "filter_upper": 1.0}


def judged(table, weights=None):
    """A rollout of one prompt whose completions earned this table."""
    count = len(next(iter(table.values())))
    rewards = weighted_sum(table, weights or {}, count)
    texts, example = [str(i) for i in range(count)], Example([], "", "")
    return Rollout([[3]], [example] * count, [], texts, 1.0, table, rewards)


def keeps(rollout, task, weights=None, **changes):
    config = settings(num_generations=len(rollout.texts), **changes)
    (kept,) = kept_groups(rollout, task, weights or {}, config)
    return kept


# ---- the filter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, bounds, kept",
    [
        ([1.5, 0.4, 0.125, 1.5, 0.5, 0.8, 0.25, 0.0], (1 / 8, 7 / 8), True),
        ([0.5, 0.4, 0.125, 0.25], (1 / 4, 3 / 4), False),
        ([1.5] * 4, (1 / 4, 3 / 4), False),
        ([1.0, 1.2, 1.1, 1.4], (0.1, 0.9), False),  # above 1, and yet not full
        ([1.5] + [0.0] * 9, (0.1, 0.9), True),  # the bounds belong to it
        ([1.5] * 9 + [0.0], (0.1, 0.9), True),
        ([1.5, None, None, 1.5], (0.1, 0.9), False),  # all that were scored are full
        ([None] * 4, (0.0, 1.0), False),
    ],
)
def test_a_group_is_kept_by_its_share_of_full_rewards(rewards, bounds, kept):
    task = letters_task(odd_reward, highest_rewards={"letters": 1.5})
    changes = dict(zip(("filter_lower", "filter_upper"), bounds, strict=True))
    assert keeps(judged({"letters": rewards}), task, filter="full-reward", **changes) == kept
    assert keeps(judged({"letters": rewards}), task, filter="none", **changes)


def test_full_reward_is_of_the_functions_that_apply_with_their_weights():
    """0.3 is less than 0.1 + 0.2 in floating point, and still full."""
    task = letters_task(odd_reward, highest_rewards={"a": 0.1 + 0.2, "b": 2.0})
    table, weights = {"a": [0.3, 0.3], "b": [None, 1.0]}, {"a": 3.0}
    assert keeps(judged(table, weights), task, weights, filter="full-reward")  # 1 of 2
    assert not keeps(judged(table, {"b": 0.0}), task, {"b": 0.0}, filter="full-reward")  # both


def test_accuracy_is_the_reward_that_the_task_names_or_else_its_judge():
    table = {"format": [0.5] * 4, "prefix": [0.1, 0.2, 0.3, 0.0]}  # their sum is a bit over 0.6
    named = letters_task(odd_reward, accuracy="prefix")
    asked = []
    judge = letters_task(odd_reward, is_correct=lambda t, e: asked.append(t) or t in "012")
    for task, mean in ((named, 0.15), (judge, 0.75)):
        kept_by = {(0.0, 1.0): True, (mean, mean): True, (mean + 0.01, 1.0): False}
        for (lower, upper), kept in {**kept_by, (0.0, mean / 2): False}.items():
            limits = {"filter_lower": lower, "filter_upper": upper}
            assert keeps(judged(table), task, filter="accuracy", **limits) == kept, limits
    assert asked == [*"0123"] * 4


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_dropped_rows_never_touch_the_advantages_of_kept_ones(monkeypatch, scale):
    """The batch's standard deviation, too, is that of the kept rows alone."""
    right = iter([1, 0] * 2 + [0] * 4 + [1, 1, 1, 0])
    task = letters_task(odd_reward, is_correct=lambda text, example: bool(next(right)))
    config = settings(filter="accuracy", scale_rewards=scale)
    run, (rollout,) = run_steps(tiny_policy(), task, config, monkeypatch)
    assert rollout.kept == [True, False, True]
    alone = group_advantages(rollout.rewards[:4] + rollout.rewards[8:], 4, scale).tolist()
    assert rollout.advantages == alone[:4] + [0.0] * 4 + alone[4:] and any(alone)
    (line,) = run.recorder.lines
    assert (line["filter/kept"], line["filter/dropped"], line["filter/buffer"]) == (2, 1, 0)
    assert line["reward"] == pytest.approx(sum(rollout.rewards) / 12), "of all, filtered or not"


PATH = "".join(list(MOVES)[:2])
PERFECT = {
    "maze": (maze, f"<think>\na\n</think>\n\n{PATH}\n", maze.MazeAnswer(PATH), {"thinks": True}),
    "maze, direct": (maze, PATH, maze.MazeAnswer(PATH, thinks=False), {"thinks": False}),
    "gsm8k": (gsm8k, "<reasoning>\na\n</reasoning>\n<answer>\n7\n</answer>\n", "7", {}),
}


@pytest.mark.parametrize("name", PERFECT)
def test_a_perfect_answer_earns_what_the_task_says_is_highest(name):
    module, text, answer, more = PERFECT[name]
    functions = module.reward_functions("documented", **more)
    earned = {n: f(text, Example([], "", answer)) for n, f in functions.items()}
    assert earned == module.highest_rewards("documented", **more)
    assert module.highest_rewards("verbatim") == {}


# ---- the buffer ----------------------------------------------------------------------------------


def test_all_that_waits_is_due_at_once_when_there_is_enough():
    def rollout(*kept):
        rows = [Completion([5, 2], [-1.0, -2.0], "stop") for _ in kept]
        return Rollout([[i] for i in range(len(kept))], [], rows, [], 1.0, kept=list(kept),
                       advantages=[1.0] * len(kept))  # fmt: skip

    config = settings(num_generations=1, buffer_groups=6, buffer_updates=3)
    due, buffer = Buffer().add(rollout(True, False, True), config)
    assert due == [] and [g.prompt for g in buffer.groups] == [[0], [2]]
    for barren in (1, 2):
        due, buffer = buffer.add(rollout(False, False), config)
        assert due == [] and len(buffer.groups) == 2 and buffer.barren_steps == barren
    due, buffer = buffer.add(rollout(True, True, True, True, True), config)
    assert buffer == Buffer(), "what is left for later was written by an older policy"
    assert [[g.prompt for g in part] for part in due] == [[[0], [2]], [[0], [1]], [[2], [3], [4]]]
    assert Buffer().add(rollout(False), settings())[0] == [], "an update of nothing"


@pytest.mark.parametrize("budget", [10_000, 14])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_each_update_of_a_full_buffer_has_the_gradient_of_the_formulas(
    monkeypatch, loss_type, budget
):
    """Two rollouts fill it. The second update is of groups that the policy wrote before the first:
    its ratio is to that policy, and its loss is divided by its own rows and tokens."""
    config = settings(
        **KEEPS_ALL, buffer_groups=6, buffer_updates=2, max_steps=2, loss_type=loss_type,
        tokens_per_micro_batch=budget, epsilon=0.05,
    )  # fmt: skip
    policy = tiny_policy("llama", [2, 5, 9, 17, 23], torch.float64)
    plain = tiny_policy("llama", dtype=torch.float64)
    run, rollouts = training_of(policy, config), watched_rollouts(monkeypatch)
    updates, update = [], run.update

    def watched():
        updates.append((weights_of(policy), gradients_of(policy)))
        return update()

    run.update = watched
    train(policy, letters_task(odd_reward), config, run)
    first, last = run.recorder.lines
    assert math.isnan(first["loss"]) and math.isnan(first["grad_norm"])
    assert first["filter/buffer"] == 3 and last["filter/buffer"] == 0
    assert last["clip_ratio/low_mean"] + last["clip_ratio/high_mean"] > 0
    assert last["sampler_gap"] < 1e-4
    rows = [
        (r.prompts[i // 4], c.token_ids, r.advantages[i])
        for r in rollouts
        for i, c in enumerate(r.completions)
    ]
    with torch.no_grad():
        olds = [plain_logprobs(plain, prompt, ids) for prompt, ids, _ in rows]
    options = {
        name: getattr(config, name)
        for name in ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta",
                     "beta", "max_completion_length")
    }  # fmt: skip
    assert len(updates) == 2
    for part, (weights, gradients) in zip((slice(12), slice(12, 24)), updates, strict=True):
        plain.model.load_state_dict(weights, strict=False)
        plain.model.zero_grad()
        logps = [plain_logprobs(plain, prompt, ids) for prompt, ids, _ in rows[part]]
        advantages = torch.tensor([a for _, _, a in rows[part]], dtype=torch.float64)
        lengths = [len(ids) for _, ids, _ in rows[part]]
        here = [p.detach() for p in logps]
        loss = written_out_loss(logps, olds[part], here, advantages, lengths, options)
        loss.backward()
        wanted = gradients_of(plain)
        scale = max(g.abs().max() for g in wanted.values())
        assert scale > 1e-5
        for name, gradient in gradients.items():
            assert (gradient - wanted[name]).abs().max() / scale < 1e-5, name


@pytest.mark.parametrize("groups", [0, 2])
def test_a_buffer_comes_back_from_a_checkpoint_as_it_was(tmp_path, groups):
    """Also one without groups: how long nothing has been kept is part of it."""
    rows = [Completion([7, 2], [-0.1, -1 / 3], "stop"), Completion([4], [-2.0], "length")]
    found = (ScoredGroup([3, 4], rows, [0.1, -0.1]), ScoredGroup([5], rows[1:], [0.7]))
    buffer = Buffer(found[:groups], barren_steps=3)
    path = save_checkpoint(tmp_path, "grpo", 1, {"buffer": buffer.state_tensors()}, {}, 1)
    assert Buffer.of_state_tensors(load_checkpoint(path)[0]["buffer"]) == buffer
    assert Buffer().state_tensors() == {} and Buffer.of_state_tensors({}) == Buffer()


# ---- refused at the start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"filter_lower": 0.95}, "--filter-lower 0.95 is above --filter-upper 0.9"),
        ({"buffer_groups": 2}, "--buffer-groups gathers what a --filter keeps"),
        ({"filter": "accuracy", "buffer_updates": 2}, "give --buffer-groups too"),
        ({**KEEPS_ALL, "buffer_groups": 2, "buffer_updates": 3}, "cannot be parted"),
        ({**KEEPS_ALL, "buffer_groups": 16, "max_steps": 5}, "never be full.* 15 groups"),
        ({**KEEPS_ALL, "buffer_groups": 16, "max_steps": 5, "completions_per_step": 8},
         "never be full.* 10 groups"),
        ({"filter_upper": 1.5}, "filter_upper"),
    ],
)  # fmt: skip
def test_settings_that_could_keep_or_learn_nothing_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        validate(settings(**changes))
    validate(settings(**KEEPS_ALL, buffer_groups=15, buffer_updates=15, max_steps=5))


@pytest.mark.parametrize(
    "task, weights, words",
    [
        ({}, {}, "does not say how high its reward 'letters' can get.*--filter accuracy"),
        ({"highest_rewards": {"letters": 1.0}}, {"letters": -1.0}, "'letters' has the weight -1"),
        ({"accuracy": "leters"}, {}, "'leters' as its accuracy.*there are: letters"),
    ],
)
def test_a_task_that_cannot_answer_the_filter_is_refused(task, weights, words):
    with pytest.raises(UserError, match=words):
        check_filter(settings(filter="full-reward"), letters_task(odd_reward, **task), weights)
    check_filter(settings(filter="accuracy"), letters_task(odd_reward), weights)
    check_filter(settings(filter="full-reward"), letters_task(odd_reward), {"letters": 0.0})
