"""Rewards -> advantages: the cases of tests/cases/advantage_cases.json about them, and the rest."""

import json
from pathlib import Path

import pytest
import torch

from grpo.advantages import group_advantages, zero_std_groups
from grpo.errors import UserError
from rewards import weighted_sum

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "cases/advantage_cases.json").read_text())[
        "cases"
    ]
}
VALUE_CASES = [name for name in CASES if not name.startswith("error/")]


def total_rewards(case) -> list[float | None]:
    """The case's rewards of each function, through the real weighted sum."""
    rows = case["input"]["rewards_per_function"]  # [N][functions]
    weights = {f"f{i}": w for i, w in enumerate(case["input"]["weights"])}
    table = {
        name: [float("nan") if row[i] == "NaN" else row[i] for row in rows]
        for i, name in enumerate(weights)
    }
    return weighted_sum(table, weights, len(rows))


def advantages_of(case, rewards=None):
    settings = case["input"]
    return group_advantages(
        total_rewards(case) if rewards is None else rewards,
        settings["group_size"],
        settings["scale_rewards"],
        settings["eps"],
    )


def close(values, expected, tolerance) -> bool:
    return all(
        abs(x - y) <= tolerance["abs"] + tolerance["rel"] * abs(y)
        for x, y in zip(values, expected, strict=True)
    )


@pytest.mark.filterwarnings("ignore:reward .* returned NaN")
@pytest.mark.parametrize("name", VALUE_CASES)
def test_case(name):
    case = CASES[name]
    advantages = advantages_of(case).tolist()
    assert close(advantages, case["expected"]["advantages"], case["tolerance"]), case["why"]
    for row in case["expected"].get("exactly_zero", []):
        assert advantages[row] == 0.0, case["why"]
    for mistake, wrong in case.get("wrong_values", {}).items():
        assert not close(advantages, wrong, case["tolerance"]), mistake


@pytest.mark.parametrize("name", VALUE_CASES)
def test_case_from_a_float32_tensor(name):
    """The rewards may come as a float32 tensor with NaN for the unscored; dead groups stay dead."""
    case = CASES[name]
    rewards = [float("nan") if r is None else r for r in case["expected"]["rewards"]]
    advantages = advantages_of(case, torch.tensor(rewards, dtype=torch.float32)).tolist()
    loose = {"abs": max(case["tolerance"]["abs"], 1e-3), "rel": 1e-4}
    assert close(advantages, case["expected"]["advantages"], loose), case["why"]
    for row in case["expected"].get("exactly_zero", []):
        assert advantages[row] == 0.0, case["why"]


def test_the_last_bit_of_a_sum_is_no_signal():
    """0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1: a group that differs only so must not be trained on."""
    rewards = [sum(row) for row in CASES["equal/sum-of-functions"]["input"]["rewards_per_function"]]
    assert len(set(rewards)) > 1, "the sums should differ in their last bit, or this tests nothing"
    for scale in ("group", "batch", "none"):
        assert group_advantages(rewards, 4, scale).tolist() == [0.0] * 4
    assert zero_std_groups(rewards, 4).tolist() == [True]


def test_rewards_that_do_not_divide_into_groups():
    case = CASES["error/group-size-does-not-divide"]
    with pytest.raises(UserError) as error:
        group_advantages(case["input"]["returned"], case["input"]["group_size"])
    for text in case["expected"]["message_mentions"]:
        assert text in str(error.value)


def test_infinity_does_not_reach_the_advantages():
    """One inf would make the whole group NaN, and NaN weights end a run."""
    with pytest.raises(UserError, match="completion 1 is infinite"):
        group_advantages([1.0, float("inf"), 0.0, 0.0], 4)


def test_unknown_scaling_is_refused_by_name():
    with pytest.raises(UserError, match="'grup'"):
        group_advantages([1.0, 0.0], 2, "grup")


def test_identical_prompts_are_two_groups():
    """Groups are by index; merged by the text of the prompt, the easy half would look bad."""
    cases = json.loads((Path(__file__).parent / "cases/generation_cases.json").read_text())["cases"]
    case = next(c for c in cases if c["id"] == "group/identical-prompts")
    assert advantages_of(case, case["input"]["rewards"]).tolist() == case["expected"]["advantages"]


def test_zero_std_groups_are_those_without_advantage():
    rewards = [1.0, 1.0, 0.0, 1.0, None, 2.0, None, None, 1e6, 1e6 + 1e-9, 0.0, 1e-6]
    dead = zero_std_groups(rewards, 2)
    assert dead.tolist() == [True, False, True, True, True, False]
    advantages = group_advantages(rewards, 2).view(-1, 2)
    assert (advantages == 0).all(dim=1).tolist() == dead.tolist()


def test_output_is_float32_of_every_row():
    advantages = group_advantages([0.0, 1.0, 2.0, None], 2)
    assert advantages.shape == (4,) and advantages.dtype == torch.float32
    assert advantages.isfinite().all()


def test_no_rewards_no_advantages():
    for scale in ("group", "batch", "none"):
        assert group_advantages([], 4, scale).shape == (0,)


def test_one_group_does_not_move_another():
    """Normalised over the batch instead of the group, group 0 would see group 1's scale."""
    quiet = group_advantages([0.0, 1.0, 0.0, 0.5], 2)[:2]
    loud = group_advantages([0.0, 1.0, 0.0, 500.0], 2)[:2]
    assert torch.equal(quiet, loud)
