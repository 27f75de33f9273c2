"""The GRPO loop: its gradient against the formulas written out, and what it must never push."""

import copy
import gc
import itertools
import json
from pathlib import Path

import pytest
import torch
from conftest import KINDS, build_config, build_tokenizer, load_cases
from test_packing import written_out_loss
from test_policy import shake
from tiny import (
    TEMPLATE,
    draw,
    gradients_of,
    letters_task,
    one_token_probability,
    plain_logprobs,
    policy_of,
    settings,
    share_of,
    tiny_policy,
    training_of,
    weights_of,
)

import grpo.filtering
import grpo.loop
from data import Example
from grpo.advantages import group_advantages, zero_std_groups
from grpo.filtering import learnable_groups, scored_groups
from grpo.generate import Completion
from grpo.logprobs import completion_logprobs
from grpo.loop import fixed_logprobs, train
from grpo.loss import kl_k3
from grpo.metrics import Rollout, logprob_gap
from grpo.packing import Group, micro_batches, pack
from grpo.policy import load_policy

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
METRICS = {
    "reward", "reward_std", "rewards/letters/mean", "frac_reward_zero_std", "loss", "kl", "entropy",
    "clip_ratio/low_mean", "clip_ratio/high_mean", "grad_norm", "sampler_gap",
    "learning_rate", "step_time",
    "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "tokens_per_second/rollout", "tokens_per_second/train",
}  # fmt: skip


def odd_reward(text):
    """Any number that differs from text to text."""
    return sum(map(ord, text)) % 7 / 7 + 0.1 * len(text)


def run_steps(policy, task, config, monkeypatch=None):
    """Train; returns (training, the rollouts, if there is a monkeypatch to catch them)."""
    run = training_of(policy, config)
    rollouts = [] if monkeypatch is None else watched_rollouts(monkeypatch)
    train(policy, task, config, run)
    return run, rollouts


def watched_rollouts(monkeypatch) -> list[Rollout]:
    """The list in which every rollout from here on will be."""
    rollouts, draw = [], grpo.loop.sample_group_completions

    def watched(*args):
        rollouts.append(draw(*args))
        return rollouts[-1]

    monkeypatch.setattr(grpo.loop, "sample_group_completions", watched)
    return rollouts


@pytest.fixture
def directory(saved_model):
    return saved_model("qwen2", build_tokenizer(chat_template=TEMPLATE))


# ---- the whole step against the formulas ---------------------------------------------------------


STEPS = {
    "plain": {},
    "beta": {"beta": 0.2, "temperature": 0.7},
    "clip higher": {"epsilon": 0.05, "epsilon_high": 0.15, "scale_rewards": "batch"},
    "delta": {"delta": 1.25, "beta": 0.05, "scale_rewards": "none"},
    "truncated": {"mask_truncated_completions": True, "temperature": 1.3},
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_both_updates_of_a_rollout_have_the_gradient_of_the_formulas(
    monkeypatch, loss_type, name, level
):
    """From the task to the gradient, in float64: sampling, rewards, advantages, packing, old
    log-probs fixed before the first update, reference, aggregation over the step."""
    config = settings(
        loss_type=loss_type, importance_sampling_level=level, num_iterations=2,
        tokens_per_micro_batch=[10_000, 14][len(name) % 2], learning_rate=3e-3, **STEPS[name],
    )  # fmt: skip
    kind = KINDS[(list(STEPS).index(name) + len(level)) % len(KINDS)]
    policy = tiny_policy(kind, [2, 5, 9, 17, 23], torch.float64)
    if config.beta:
        policy.reference = tiny_policy(kind, dtype=torch.float64, seed=1).model
        policy.reference.requires_grad_(False)
    plain = tiny_policy(kind, dtype=torch.float64)  # the twin that is computed the plain way

    run = training_of(policy, config)
    updates, update = [], run.update

    def watched():
        updates.append((weights_of(policy), gradients_of(policy)))
        return update()

    run.update = watched
    rollouts = watched_rollouts(monkeypatch)
    train(policy, letters_task(odd_reward), config, run)

    (rollout,) = rollouts
    size = config.num_generations
    rows = [
        (rollout.prompts[i // size], c.token_ids, rollout.advantages[i])
        for i, c in enumerate(rollout.completions)
        if not (config.mask_truncated_completions and c.finish_reason == "length")
    ]
    dead = zero_std_groups(rollout.rewards, size).repeat_interleave(size).tolist()
    if name == "truncated":
        assert 0 < len(rows) < len(rollout.completions), "some rows should be cut, not all"
    lengths = [len(c) for _, c, _ in rows]

    def logps(model):
        return [plain_logprobs(model, p, c, config.temperature) for p, c, _ in rows]

    with torch.no_grad():
        olds = logps(plain)
        references = logps(policy_of(policy.reference)) if config.beta else olds
    options = {
        name_: getattr(config, name_)
        for name_ in ("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta",
                      "beta", "max_completion_length")
    }  # fmt: skip
    assert len(updates) == 2
    for weights, gradients in updates:
        plain.model.load_state_dict(weights, strict=False)
        plain.model.zero_grad()
        # A reference where the policy is has no gradient: that of groups whose rewards are equal,
        # which count in the denominators and nowhere else.
        here = [p.detach() for p in logps(plain)]
        pulled = references if config.beta else here
        if config.beta:  # then no row is masked, and rows are in step with dead
            pulled = [h if d else r for r, h, d in zip(references, here, dead, strict=True)]
        advantages = torch.tensor([a for _, _, a in rows], dtype=torch.float64)
        written_out_loss(logps(plain), olds, pulled, advantages, lengths, options).backward()
        wanted = gradients_of(plain)
        scale = max(g.abs().max() for g in wanted.values())
        assert scale > 1e-5
        for parameter, gradient in gradients.items():
            gap = (gradient - wanted[parameter]).abs().max() / scale
            assert gap < 1e-5, parameter
    assert not updates[0][1].keys() - updates[1][1].keys()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_token_budget_changes_no_update(loss_type):
    results = []
    for budget in (1, 20, 10_000):
        policy = tiny_policy("qwen3", [2, 5, 9], torch.float64)
        config = settings(loss_type=loss_type, tokens_per_micro_batch=budget, max_steps=2)
        run, _ = run_steps(policy, letters_task(odd_reward), config)
        results.append((weights_of(policy), run.recorder.lines))
    for weights, lines in results[1:]:
        for name, tensor in weights.items():
            # In the mean: Adam makes a whole step of a gradient that is nothing but rounding.
            assert (tensor - results[0][0][name]).abs().mean() < 1e-5, name
        for line, wanted in zip(lines, results[0][1], strict=True):
            for metric in METRICS - {"step_time"}:
                if not metric.startswith("tokens_per_second"):
                    assert line[metric] == pytest.approx(wanted[metric], abs=1e-5), metric


# ---- the first step ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {"lora_rank": 0}])
def test_at_the_first_step_kl_is_0_and_every_ratio_is_1(saved_model, monkeypatch, kind, changes):
    """Exactly, and the sampler's log-probs are the scorer's: dropout, temperature or a stray
    adapter would show here first."""
    directory = saved_model(kind, build_tokenizer(chat_template=TEMPLATE))
    policy = load_policy(build_config(model=directory, beta=0.1, **changes))
    gaps, score = [], grpo.loop.completion_logprobs

    def watched(policy, batch, *args, **kwargs):
        out = score(policy, batch, *args, **kwargs)
        gaps.append((batch, out[0].detach()))
        return out

    monkeypatch.setattr(grpo.loop, "completion_logprobs", watched)
    config = settings(beta=0.1, temperature=0.8, num_iterations=2, loss_type="grpo", max_steps=1)
    losses, grpo_loss = [], grpo.loop.grpo_loss

    def loss_of(*args, **kwargs):
        losses.append(grpo_loss(*args, **kwargs))
        return losses[-1]

    monkeypatch.setattr(grpo.loop, "grpo_loss", loss_of)
    run, (rollout,) = run_steps(policy, letters_task(odd_reward), config, monkeypatch)
    loss, parts = losses[0]
    assert parts["kl"] == 0 and parts["clip_low"] == parts["clip_high"] == 0
    # With loss_type grpo the advantages of a group add up to nothing, so the loss does too.
    assert abs(loss.item()) < 1e-6
    for batch, logp in gaps[:3]:  # old, reference, first update
        assert logprob_gap(rollout.completions, batch, logp) < 1e-4
        assert torch.equal(logp, gaps[0][1]), "old, reference and policy agree to the last bit"
    assert losses[1][1]["kl"] > 0, "and after an update they do not"
    assert run.recorder.lines[0]["kl"] > 0
    assert run.recorder.lines[0]["sampler_gap"] < 1e-4


def test_the_line_of_a_step_has_the_names_that_users_of_trl_know():
    run, _ = run_steps(tiny_policy(), letters_task(odd_reward), settings(max_steps=2))
    for step, line in enumerate(run.recorder.lines, 1):
        assert line["stage"] == "grpo" and line["step"] == step
        assert line.keys() - {"stage", "step"} == METRICS
        assert all(isinstance(v, (int, float)) for n, v in line.items() if n != "stage")


def test_the_learning_rate_follows_its_schedule():
    config = settings(max_steps=4, lr_scheduler="linear", learning_rate=1e-3)
    run, _ = run_steps(tiny_policy(), letters_task(odd_reward), config)
    rates = [line["learning_rate"] for line in run.recorder.lines]
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


# ---- bandits: the sign of everything at once -----------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.02])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_rewarded_token_gets_likelier_and_a_punished_one_rarer(sign, loss_type, beta):
    policy = tiny_policy(initializer_range=0.1)
    if beta:
        policy.reference = copy.deepcopy(policy.model).requires_grad_(False)
    (token,) = policy.tokenizer("e").input_ids
    before = one_token_probability(policy, policy.tokenizer("a").input_ids, token)
    config = settings(
        max_steps=4, max_completion_length=1, num_generations=64, prompts_per_step=1,
        loss_type=loss_type, beta=beta, learning_rate=3e-3,
    )  # fmt: skip
    task = letters_task(lambda text: sign * (text == "e"), prompts=["a"])
    run_steps(policy, task, config)
    after = one_token_probability(policy, policy.tokenizer("a").input_ids, token)
    assert after > 1.3 * before if sign > 0 else after < before / 1.3


def test_a_bandit_by_lora(saved_model):
    """Log-probs taken from the rollout, without a graph, leave B at 0 and nothing is learned."""
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    directory = saved_model("qwen2", tokenizer, initializer_range=0.1)
    policy = load_policy(build_config(model=directory, lora_rank=4, beta=0.0))
    (token,) = tokenizer("e").input_ids
    prompt = tokenizer("a").input_ids
    before = one_token_probability(policy, prompt, token)
    config = settings(max_steps=6, max_completion_length=1, num_generations=64, prompts_per_step=1)
    run_steps(policy, letters_task(lambda text: text == "e", prompts=["a"]), config)
    assert one_token_probability(policy, prompt, token) > 2 * before


def test_stopping_is_learned():
    """The stop token left out of the loss: the policy never learns to end its answers."""
    policy = tiny_policy(initializer_range=0.1)
    prompt = policy.tokenizer("a").input_ids
    before = one_token_probability(policy, prompt, 2)
    config = settings(
        max_steps=6, max_completion_length=3, num_generations=64, prompts_per_step=1
    )
    run, _ = run_steps(policy, letters_task(lambda text: -len(text), prompts=["a"]), config)
    assert one_token_probability(policy, prompt, 2) > max(2 * before, 0.1)
    lengths = [line["completions/mean_length"] for line in run.recorder.lines]
    assert lengths[-1] < lengths[0]


# ---- what moves and what does not ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_moves_in_one_step(kind):
    policy = tiny_policy(kind)
    before = weights_of(policy)
    run_steps(policy, letters_task(odd_reward), settings())
    for name, tensor in weights_of(policy).items():
        assert not torch.equal(tensor, before[name]), name
        assert tensor.isfinite().all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_weight_moves_and_no_frozen_one(directory, checkpointing):
    policy = load_policy(
        build_config(model=directory, lora_rank=4, gradient_checkpointing=checkpointing)
    )
    config = settings(beta=0.04)
    for step in range(2):
        before = weights_of(policy)
        run_steps(policy, letters_task(odd_reward), config)
        trained = policy.trainable_parameters()
        for name, tensor in weights_of(policy).items():
            moved = not torch.equal(tensor, before[name])
            # B starts at 0, and while it is 0 no gradient reaches A: A moves from the second step.
            expected = name in trained and (step > 0 or "lora_A" not in name)
            assert moved == expected, f"{name} at step {step + 1}"


def test_the_reference_stays_where_it_was():
    policy = tiny_policy()
    policy.reference = copy.deepcopy(policy.model).requires_grad_(False)
    before = {n: p.clone() for n, p in policy.reference.named_parameters()}
    run, _ = run_steps(policy, letters_task(odd_reward), settings(beta=0.1, max_steps=3))
    assert all(torch.equal(p, before[n]) for n, p in policy.reference.named_parameters())
    assert [line["kl"] > 1e-6 for line in run.recorder.lines] == [False, True, True]


def test_case_reference_without_adapter(saved_model):
    """The case numerics/reference-without-adapter: the reference is the adapter switched off."""
    cases = {case["id"]: case for case in load_cases("generation_cases")["cases"]}
    given = cases["numerics/reference-without-adapter"]["input"]
    policy = load_policy(
        build_config(model=saved_model("llama"), lora_rank=given["lora"]["r"], beta=0.1)
    )
    trained = policy.trainable_parameters()
    base = {n: p for n, p in weights_of(policy).items() if n not in trained}
    config = settings(beta=0.1)

    def kl():
        found = draw(policy, given["prompts"], length=given["max_new_tokens"])
        batch = pack([Group(given["prompts"][0], [found[0][0].token_ids], [0])], "cpu")
        logp, _ = completion_logprobs(policy, batch, 1.0)
        ((_, reference),) = fixed_logprobs(policy, [batch], config)
        again, _ = completion_logprobs(policy, batch, 1.0)
        assert torch.equal(logp, again), "the adapter is on again behind the reference's pass"
        return kl_k3(reference - logp).sum().item()

    assert kl() == 0
    shake(trained)
    assert kl() > 0
    after = weights_of(policy)
    assert all(torch.equal(after[n], p) for n, p in base.items())
    ids = torch.tensor(given["prompts"])
    with torch.no_grad():
        before = policy.model(ids).logits
        with pytest.raises(ZeroDivisionError), policy.reference_mode():
            raise ZeroDivisionError
        assert torch.equal(policy.model(ids).logits, before)


# ---- groups that teach nothing -------------------------------------------------------------------


def moved(policy, task, config) -> bool:
    before = weights_of(policy)
    run, _ = run_steps(policy, task, config)
    after = weights_of(policy)
    assert all(line["loss"] == line["loss"] for line in run.recorder.lines)
    return any(not torch.equal(after[n], before[n]) for n in before)


def test_groups_without_spread_cost_no_backward_pass_and_change_nothing(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a group of equal rewards was computed")

    monkeypatch.setattr(grpo.loop, "completion_logprobs", never)
    config = settings(max_steps=2, weight_decay=0.5, num_iterations=2)
    policy = tiny_policy()
    assert not moved(policy, letters_task(lambda text: 0.1 + 0.2 + 0.3), config)
    half = itertools.cycle([None, 0.5])
    run, _ = run_steps(policy, letters_task(lambda text: next(half)), config)
    assert [line["frac_reward_zero_std"] for line in run.recorder.lines] == [1.0, 1.0]
    assert run.recorder.lines[0]["grad_norm"] == 0


@pytest.mark.parametrize("asked", [False, True])
def test_the_kl_of_groups_without_spread_pushes_only_if_asked_for(asked):
    """All answers right, and yet the policy drifts: the KL term alone was pulling."""
    policy = tiny_policy()
    policy.reference = tiny_policy(seed=1).model.requires_grad_(False)
    config = settings(beta=0.5, kl_on_zero_std_groups=asked)
    assert moved(policy, letters_task(lambda text: 1.0), config) == asked


def rollout_of(rewards, lengths=None, cut=()):
    """Two prompts x 3 completions with these rewards; the rows of `cut` ran into the limit."""
    lengths = lengths or [1, 2, 3, 1, 2, 3]
    example = Example([], "", "")
    return Rollout(
        prompts=[[5], [5]],
        examples=[example] * 6,
        completions=[
            Completion([4] * n, [-1.0] * n, "length" if i in cut else "stop")
            for i, n in enumerate(lengths)
        ],
        texts=[""] * 6,
        seconds=1.0,
        rewards=rewards,
        kept=[True, True],
        advantages=group_advantages(rewards, 3).tolist(),
    )


def learnable(rollout, config):
    return learnable_groups(scored_groups(rollout), config)


def test_groups_without_spread_count_in_the_denominators():
    """Left out of the totals they would make the others' steps larger, the fewer there are."""
    config = settings(num_generations=3)
    groups, rows, tokens = learnable(rollout_of([1.0, 1.0, 1.0, 0.0, 1.0, 0.0]), config)
    assert [g.rows for g in groups] == [[3, 4, 5]]
    assert (rows, tokens) == (6, 12)


def test_cut_completions_leave_numerator_and_denominator():
    config = settings(num_generations=3, mask_truncated_completions=True)
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    groups, rows, tokens = learnable(rollout_of(rewards, cut=(2, 3, 4, 5)), config)
    assert [g.rows for g in groups] == [[0, 1]] and (rows, tokens) == (2, 3)
    assert [len(c) for c in groups[0].completions] == [1, 2]
    config.mask_truncated_completions = False
    groups, rows, tokens = learnable(rollout_of(rewards, cut=(2, 3, 4, 5)), config)
    assert [g.rows for g in groups] == [[0, 1, 2], [3, 4, 5]] and (rows, tokens) == (6, 12)


def test_a_step_whose_completions_are_all_cut_changes_nothing():
    policy = tiny_policy(stop=[])
    assert not moved(policy, letters_task(odd_reward), settings(mask_truncated_completions=True))


def test_groups_are_by_index_never_by_text():
    """Two equal prompts in one step: merged by their text, each would judge the other's rows."""
    groups, _, _ = learnable(
        rollout_of([1.0, 0.0, 1.0, 5.0, 4.0, 5.0]), settings(num_generations=3)
    )
    assert [g.rows for g in groups] == [[0, 1, 2], [3, 4, 5]]
    run, _ = run_steps(
        tiny_policy(), letters_task(odd_reward, prompts=["a"]), settings(prompts_per_step=3)
    )
    assert run.step == 1, "more prompts a step than there are examples"


def test_rows_that_no_reward_scored_have_no_part_in_it(monkeypatch):
    task = letters_task(lambda text: None if "a" in text or len(text) < 3 else float(len(text)))
    policy = tiny_policy(initializer_range=0.1)
    config = settings(num_generations=16)
    run, (rollout,) = run_steps(policy, task, config, monkeypatch)
    unscored = [a for a, r in zip(rollout.advantages, rollout.rewards, strict=True) if r is None]
    assert unscored and not any(unscored) and any(rollout.advantages)
    scored = [r for r in rollout.rewards if r is not None]
    assert run.recorder.lines[0]["reward"] == pytest.approx(sum(scored) / len(scored))


# ---- what is learned from is what was written ----------------------------------------------------


def test_training_never_encodes_a_completion_again(monkeypatch):
    """[a, b] decodes to "ab", which encodes to one other token: its log-prob would be trained."""
    words = ["<pad>", "<bos>", "<eos>", *"abcdefghijklmnopqrstuvwx? \n", "ab", "<|endoftext|>"]
    tokenizer = build_tokenizer(words, chat_template=TEMPLATE)
    ids = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer(tokenizer.decode(ids)).input_ids != ids
    policy = tiny_policy(initializer_range=0.05, vocab_size=32)
    policy.tokenizer = tokenizer
    seen = []

    def watched(groups, *args):
        seen.extend(c for g in groups for c in g.completions)
        return micro_batches(groups, *args)

    monkeypatch.setattr(grpo.filtering, "micro_batches", watched)
    config = settings(num_generations=32)
    _, (rollout,) = run_steps(policy, letters_task(odd_reward), config, monkeypatch)
    assert seen == [c.token_ids for c in rollout.completions]
    again = [tokenizer(t).input_ids for t in rollout.texts]
    assert any(a != c.token_ids for a, c in zip(again, rollout.completions, strict=True))


def test_rewards_see_no_stop_token_and_nothing_behind_it():
    seen = []
    policy = tiny_policy(stop=[2, 9, 10], initializer_range=0.1)
    task = letters_task(lambda text: seen.append(text) or odd_reward(text))
    run_steps(policy, task, settings(num_generations=16))
    assert len(seen) == 48 and "" in seen
    assert not any("<eos>" in text or "g" in text or "h" in text for text in seen)


def test_completions_are_kept_with_their_prompts_and_rewards():
    config = settings(max_steps=5, completions_every=2)
    run, _ = run_steps(tiny_policy(), letters_task(odd_reward), config)
    assert [(stage, step) for stage, step, _ in run.recorder.kept] == [
        ("grpo", 1), ("grpo", 3), ("grpo", 5),
    ]  # fmt: skip
    rows = run.recorder.kept[0][2]
    assert len(rows) == 12 and json.loads(json.dumps(rows)) == rows
    assert all(row["reward"] == row["rewards"]["letters"] for row in rows)


def test_alarms_are_said_once():
    numbers = itertools.count()
    task = letters_task(odd_reward, alarms=lambda batch: [f"{next(numbers)} answers are odd"])
    run, _ = run_steps(tiny_policy(), task, settings(max_steps=3))
    assert run.recorder.said == ["warning (step 1): 0 answers are odd"]


def test_evaluation_comes_when_it_is_due():
    steps = []
    run = training_of(policy := tiny_policy(), config := settings(max_steps=5, eval_every=2))
    train(policy, letters_task(odd_reward), config, run, lambda: steps.append(run.step))
    assert steps == [2, 4]


# ---- many updates a rollout, many steps ----------------------------------------------------------


def test_old_logprobs_stay_those_of_the_rollout():
    """Taken anew at each update every ratio is 1, and nothing is ever clipped."""
    config = settings(num_iterations=4, learning_rate=0.05, epsilon=0.1)
    run, _ = run_steps(tiny_policy(), letters_task(odd_reward), config)
    line = run.recorder.lines[0]
    assert line["clip_ratio/low_mean"] + line["clip_ratio/high_mean"] > 0.05
    config = settings(num_iterations=1, learning_rate=0.05, epsilon=0.1, max_steps=3)
    run, _ = run_steps(tiny_policy(), letters_task(odd_reward), config)
    for line in run.recorder.lines:
        assert line["clip_ratio/low_mean"] == line["clip_ratio/high_mean"] == 0


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "gradient_checkpointing": True}])
def test_no_tensor_outlives_its_step(directory, changes):
    """A list of losses with their graphs, a cache that is kept: memory creeps up and up."""
    policy = load_policy(build_config(model=directory, beta=0.1, **changes))
    config = settings(beta=0.1, max_steps=8, eval_every=1, num_iterations=2)
    run = training_of(policy, config)
    counts = {}

    def count():
        if run.step in (3, 8):
            gc.collect()
            found = (issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            counts[run.step] = sum(found)

    train(policy, letters_task(odd_reward), config, run, count)
    assert counts[8] <= counts[3]


def test_a_letter_is_learned():
    """Reward: the share of the letter e. From about 1 in 30 to more than half in 25 steps."""
    policy = tiny_policy(initializer_range=0.1)
    config = settings(
        max_steps=25, prompts_per_step=3, num_generations=16, max_completion_length=6,
        learning_rate=5e-3, rollout_rows=48,
    )  # fmt: skip
    run, _ = run_steps(policy, letters_task(share_of("e")), config)
    rewards = [line["reward"] for line in run.recorder.lines]
    assert sum(rewards[:2]) / 2 < 0.15 and sum(rewards[-2:]) / 2 > 0.5


def test_shaken_adapters_are_trained_from_where_they_are(directory):
    """The ratio is to the policy that wrote the answers, not to its base."""
    policy = load_policy(build_config(model=directory, lora_rank=4, beta=0.1))
    shake(policy.trainable_parameters())
    run, _ = run_steps(policy, letters_task(odd_reward), settings(beta=0.1))
    line = run.recorder.lines[0]
    assert line["kl"] > 0.01 and line["clip_ratio/low_mean"] == 0 == line["clip_ratio/high_mean"]


def test_the_loop_can_be_read_in_one_sitting():
    assert len(Path(grpo.loop.__file__).read_text("utf-8").splitlines()) < 250
