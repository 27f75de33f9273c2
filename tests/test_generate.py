"""The generator against transformers' generate, and against a sampler that knows no tricks."""

import random

import pytest
import torch
from conftest import KINDS, MARKOV_TOKENS, build_config, build_markov, build_model, load_cases
from test_policy import shake
from tiny import (
    draw,
    plain_logprobs,
    policy_of,
    ragged_prompts,
    tiny_policy,
    tokens_of,
)

import grpo.cache
import grpo.generate
from grpo.decode import Pace
from grpo.errors import UserError
from grpo.folded import FoldedModel
from grpo.generate import generate
from grpo.logprobs import completion_logprobs
from grpo.packing import Group, pack
from grpo.policy import Modules, load_policy
from grpo.sampling import Sampling, sample
from grpo.tokenizer import completion_text

CASES = {case["id"]: case for case in load_cases("generation_cases")["cases"]}
STOPS = {"one": [2], "several": [2, 5, 9, 17, 23], "half of the words": list(range(0, 32, 2))}


def greedy(policy, prompts, length, group=1, max_rows=64):
    return draw(policy, prompts, group, length, temperature=0.0, max_rows=max_rows)


# ---- the cases -----------------------------------------------------------------------------------


WITH_VALUES = [
    name
    for name, case in CASES.items()
    if case["input"].get("fixture") == "markov" and "completions" in case["expected"]
]


@pytest.mark.parametrize("name", WITH_VALUES)
def test_case_with_values(name, monkeypatch):
    case = CASES[name]
    given, expected = case["input"], case["expected"]
    policy = policy_of(build_markov("grpo"), given["eos_token_ids"])
    calls = count_calls(monkeypatch)
    found = [g[0] for g in greedy(policy, given["prompts"], given["max_new_tokens"])]
    assert [c.token_ids for c in found] == expected["completions"], case["why"]
    for completion, wanted in zip(found, expected["logprobs"], strict=True):
        assert completion.logprobs == pytest.approx(wanted, abs=case["tolerance"]["abs"])
    assert [c.finish_reason == "length" for c in found] == expected["truncated"]
    # The mask comes from lengths: a row has as many ones as it has tokens, the stop token included.
    widest = max(len(c.token_ids) for c in found)
    mask = [[int(i < len(c.token_ids)) for i in range(widest)] for c in found]
    assert mask == expected["mask"]
    assert len(calls) <= expected.get("max_model_calls", len(calls))


ALONE = [
    "eos/inside-the-prompt",
    "padding/ragged-gpt2",
    "padding/ragged-llama",
    "padding/any-split",
]


@pytest.mark.parametrize("name", ALONE)
def test_case_a_row_answers_as_it_would_alone(name):
    case = CASES[name]
    given = case["input"]
    kind = given["fixture"].removeprefix("random-")
    policy = policy_of(build_model(kind, attention="grpo"), given["eos_token_ids"])
    alone = [greedy(policy, [p], given["max_new_tokens"])[0][0] for p in given["prompts"]]
    for size in given.get("batch_sizes", [len(given["prompts"])]):
        for start in range(0, len(alone), size):
            part = given["prompts"][start : start + size]
            found = greedy(policy, part, given["max_new_tokens"])
            for (row,), wanted in zip(found, alone[start:], strict=False):
                assert row.token_ids == wanted.token_ids
                assert row.logprobs == pytest.approx(wanted.logprobs, abs=case["tolerance"]["abs"])


def test_case_limit_context(monkeypatch):
    """60 + 10 tokens in 64 positions: one clear error before any work, no index error in it."""
    given, expected = CASES["limit/context"]["input"], CASES["limit/context"]["expected"]
    policy = tiny_policy("gpt2")
    calls = count_calls(monkeypatch)
    prompts = [[3] * n for n in given["prompt_lengths"]]
    with pytest.raises(UserError) as caught:
        greedy(policy, prompts, given["max_new_tokens"])
    assert all(word in str(caught.value) for word in expected["message_mentions"])
    assert not calls
    assert len(greedy(policy, [[3] * 54], 10)[0][0].token_ids) <= 10, "exactly full is allowed"


def test_case_limit_empty_prompt():
    case = CASES["limit/empty-prompt"]
    policy = policy_of(build_markov("grpo"), [2])
    with pytest.raises(UserError, match="prompt 1 is empty"):
        greedy(policy, case["input"]["prompts"], 3)


def test_case_padding_score_again():
    case = CASES["padding/score-again"]
    given = case["input"]
    policy = policy_of(build_model("gpt2", attention="grpo"), given["eos_token_ids"])
    found = draw(policy, given["prompts"], length=6, temperature=1.0, seed=given["seed"])
    for prompt, (row,) in zip(given["prompts"], found, strict=True):
        scored = plain_logprobs(policy, prompt, row.token_ids)
        assert row.logprobs == pytest.approx(scored.tolist(), abs=case["tolerance"]["abs"])


def test_case_group_members_differ():
    """The first token drawn once and handed to the whole group would make every answer alike."""
    given = CASES["group/members-differ"]["input"]
    policy = policy_of(build_markov("grpo"), given["eos_token_ids"])
    (group,) = draw(policy, given["prompts"], given["group_size"], 1, temperature=50.0, seed=0)
    assert len({tuple(c.token_ids) for c in group}) > 1


def test_case_sampling_frequencies():
    case = CASES["sampling/frequencies"]
    policy = policy_of(build_markov("grpo"), case["input"]["eos_token_ids"])
    (group,) = draw(policy, case["input"]["prompts"], case["input"]["draws"], 1, max_rows=4000)
    for token, probability in case["expected"]["probabilities"].items():
        share = sum(c.token_ids == [int(token)] for c in group) / len(group)
        assert abs(share - probability) <= case["tolerance"]["abs"]


def test_case_sampling_seed():
    given = CASES["sampling/seed"]["input"]
    policy = policy_of(build_markov("grpo"), given["eos_token_ids"])
    runs = [
        tokens_of(draw(policy, given["prompts"], given["group_size"], 8, seed=seed))
        for seed in given["seeds"]
    ]
    assert runs[0] == runs[1] != runs[2]


def test_case_numerics_dropout():
    """An adapter trained with dropout: sampler and scorer must be one policy at the first step."""
    case = CASES["numerics/dropout-off-in-scoring"]
    from peft import LoraConfig, get_peft_model

    from grpo.policy import _switch_off_noise

    lora = case["input"]["lora"]
    model = build_model("llama", attention="grpo")
    model = get_peft_model(
        model, LoraConfig(r=lora["r"], lora_dropout=lora["dropout"], target_modules="all-linear")
    )
    policy = policy_of(model)
    shake(policy.trainable_parameters())
    prompts = case["input"]["prompts"]
    scored = [plain_logprobs(policy, prompts[0], [1, 2, 3]) for _ in range(2)]
    assert not torch.equal(*scored), "dropout was on"
    _switch_off_noise(model.get_base_model())
    for prompt, (row,) in zip(prompts, draw(policy, prompts, length=5), strict=True):
        scored = plain_logprobs(policy, prompt, row.token_ids)
        ratio = (scored - torch.tensor(row.logprobs)).exp()
        assert torch.allclose(ratio, torch.ones_like(ratio), rtol=0, atol=1e-5)


# ---- greedy: batched = alone = transformers ------------------------------------------------------


@pytest.mark.parametrize("stop, block", [*((stop, 64) for stop in STOPS), ("several", 5)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_greedy_is_transformers_generate(kind, stop, block, monkeypatch):
    """Ragged prompts in one batch, with one stop id and with several (Qwen and Gemma have them)."""
    monkeypatch.setattr(grpo.cache, "BLOCK", block)
    policy = tiny_policy(kind, STOPS[stop])
    theirs = build_model(kind, attention="eager")
    prompts = ragged_prompts(10, seed=1)
    found = [g[0] for g in greedy(policy, prompts, 12, max_rows=4)]
    reasons = set()
    for prompt, row in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        output = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=STOPS[stop],
            pad_token_id=0,
        )
        assert row.token_ids == output[0, len(prompt) :].tolist()
        assert row.finish_reason == ("stop" if row.token_ids[-1] in STOPS[stop] else "length")
        reasons.add(row.finish_reason)
    if stop == "several":
        assert reasons == {"stop", "length"}, "both ways of ending should occur here"
    alone = [greedy(policy, [p], 12)[0][0] for p in prompts]
    assert [c.token_ids for c in alone] == [c.token_ids for c in found]


def test_every_stop_id_stops():
    """With only the first of several ids honoured, the others' rows all run into the limit."""
    policy = policy_of(build_markov("grpo"), [2, 3])
    (group,) = draw(policy, [[1]], 200, 40)
    assert {c.token_ids[-1] for c in group if c.finish_reason == "stop"} == {2, 3}
    assert all(not {2, 3} & set(c.token_ids[:-1]) for c in group)


# ---- retire and refill ---------------------------------------------------------------------------


@torch.no_grad()
def simple_generate(policy, prompts, group, length, sampling, seed):
    """One row after another, the whole text through the model for every token."""
    table = torch.rand(
        len(prompts) * group, length, generator=torch.Generator().manual_seed(seed)
    )
    rows = []
    for row in range(len(prompts) * group):
        ids, logprobs = [], []
        while len(ids) < length and not (ids and ids[-1] in policy.stop_token_ids):
            text = torch.tensor([prompts[row // group] + ids])
            token, logprob = sample(
                policy.model(text).logits[:, -1],
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                sampling.min_p,
                uniforms=table[row, len(ids)][None],
            )
            ids.append(token.item())
            logprobs.append(logprob.item())
        rows.append((ids, logprobs))
    return rows


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("block", [64, 2, 1])
def test_refilled_rows_are_those_of_a_sampler_without_a_batch(seed, block, monkeypatch):
    """Groups larger and smaller than the batch, rows that end at their first token, chunked
    prefill, tokens in one block or several: whatever is in flight beside it, a row's tokens and
    log-probs are its own."""
    monkeypatch.setattr(grpo.cache, "BLOCK", block)
    rng = random.Random(seed)
    kind, stop = rng.choice(KINDS), STOPS[rng.choice(list(STOPS))]
    policy = tiny_policy(kind, stop, initializer_range=0.3)  # flatter: more kinds of rows
    prompts = ragged_prompts(rng.randint(1, 7), seed=seed)
    group, length, max_rows = rng.randint(1, 5), rng.randint(1, 8), rng.randint(1, 9)
    sampling = Sampling(rng.choice([0.7, 1.0, 1.5]), *rng.choice([(0, 1.0), (5, 0.9), (0, 0.8)]))
    ended = []
    found = generate(
        policy, prompts, group, length, sampling, torch.Generator().manual_seed(seed),
        max_rows, ended.append,
    )  # fmt: skip
    assert [len(g) for g in found] == [group] * len(prompts)
    assert ended == [1] * len(prompts) * group
    rows = [c for g in found for c in g]
    wanted = simple_generate(policy, prompts, group, length, sampling, seed)
    for row, (ids, logprobs) in zip(rows, wanted, strict=True):
        assert row.token_ids == ids
        assert row.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert row.finish_reason == ("stop" if ids[-1] in stop else "length")


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("prefill", [1, 6, 10_000])
def test_the_size_of_the_batch_changes_nothing(monkeypatch, max_rows, prefill):
    monkeypatch.setattr(grpo.generate, "PREFILL_TOKENS", prefill)
    policy = tiny_policy("qwen3", STOPS["half of the words"])
    prompts = ragged_prompts(6, seed=2) + [[7]]
    found = draw(policy, prompts, 4, 6, max_rows=max_rows)
    wanted = draw(policy, prompts, 4, 6, max_rows=28)
    assert tokens_of(found) == tokens_of(wanted)
    lengths = {len(c.token_ids) for g in found for c in g}
    assert {1, 6} <= lengths, "rows that end at once and rows that never do"


def test_every_row_may_end_at_its_first_token(monkeypatch):
    policy = tiny_policy(stop=range(32))
    found = draw(policy, ragged_prompts(5), 3, 8, max_rows=2)
    assert [[(len(c.token_ids), c.finish_reason) for c in g] for g in found] == [
        [(1, "stop")] * 3
    ] * 5
    calls = count_calls(monkeypatch)
    draw(policy, ragged_prompts(5), 3, 8, max_rows=15)
    assert [rows for (rows, _), _ in calls] == [1], "one prefill and not a single decode step"


def test_a_prompt_is_computed_once_for_its_whole_group(monkeypatch):
    policy = tiny_policy()
    prompts = ragged_prompts(4, seed=3, low=5)
    calls = count_calls(monkeypatch)
    found = draw(policy, prompts, 8, 6, max_rows=5)
    computed = sum(rows * width for (rows, width), _ in calls)
    written = sum(len(c.token_ids) - 1 for g in found for c in g)  # a last token is not run
    assert computed == sum(map(len, prompts)) + written


def test_identical_prompts_stay_two_groups():
    policy = tiny_policy()
    first, second = draw(policy, [[5, 6], [5, 6]], 8, 6)
    assert tokens_of([first]) != tokens_of([second])
    assert len(first) == len(second) == 8


def test_no_prompt_no_completion():
    assert draw(tiny_policy(), [], 4, 5) == []


# ---- log-probs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}])
@torch.no_grad()
def test_sampler_and_scorer_agree_in_float32(kind, sampling):
    """Tempered, full vocabulary, whatever was cut off before the draw: else ratio 1 is lost."""
    policy = tiny_policy(kind)
    prompts = ragged_prompts(5, seed=5)
    found = draw(policy, prompts, 3, 8, temperature=0.7, max_rows=4, **sampling)
    for prompt, group in zip(prompts, found, strict=True):
        for row in group:
            scored = plain_logprobs(policy, prompt, row.token_ids, 0.7)
            assert row.logprobs == pytest.approx(scored.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_sampler_and_scorer_agree_in_bfloat16(kind):
    """Logits of a few nats, as real models have them: at most 0.1, on average 0.02 of a nat.

    (Measured on these models: 0.04 and 0.006. The two paths round in different places.)
    """
    policy = tiny_policy(kind, dtype=torch.bfloat16, initializer_range=0.2)
    prompts = ragged_prompts(5, seed=5)
    found = draw(policy, prompts, 4, 8)
    groups = [
        Group(p, [c.token_ids for c in g], list(range(4)))
        for p, g in zip(prompts, found, strict=True)
    ]
    batch = pack(groups, "cpu")
    scored, _ = completion_logprobs(policy, batch, 1.0)
    assert scored.dtype == torch.float32
    sampled = torch.tensor([p for g in found for c in g for p in c.logprobs])
    gap = (scored[batch.mask] - sampled).abs()
    assert gap.max() < 0.1 and gap.mean() < 0.02


def test_a_models_generation_config_is_not_obeyed_in_secret():
    """model.generate applies its generation config's top_k; the scorer knows nothing of it."""
    policy = tiny_policy()
    plain = tokens_of(draw(policy, [[5, 6]], 16, 4))
    settings = policy.model.generation_config
    settings.top_k, settings.top_p, settings.temperature = 1, 0.1, 0.01
    settings.repetition_penalty, settings.suppress_tokens = 5.0, [3, 4]
    assert tokens_of(draw(policy, [[5, 6]], 16, 4)) == plain
    assert len({tuple(ids) for ids in plain[0]}) > 4


def test_the_adapter_takes_part_in_the_rollout(saved_model):
    """Completions of the bare base would be scored by another policy than wrote them."""
    policy = load_policy(build_config(model=saved_model("qwen2"), lora_rank=4))
    base = tokens_of(greedy(policy, [[5, 6, 7]], 8))
    shake(policy.trainable_parameters())
    ((row,),) = greedy(policy, [[5, 6, 7]], 8)
    assert [[row.token_ids]] != base
    scored = plain_logprobs(policy, [5, 6, 7], row.token_ids)
    assert row.logprobs == pytest.approx(scored.tolist(), abs=1e-4)


def test_gradient_checkpointing_leaves_the_rollout_alone(saved_model):
    directory = saved_model("llama")
    found = [
        tokens_of(draw(load_policy(build_config(model=directory, **changes)), [[5, 6]], 4, 6))
        for changes in ({}, {"gradient_checkpointing": True})
    ]
    assert found[0] == found[1]


def test_rollouts_keep_no_graph(monkeypatch):
    policy = tiny_policy()
    calls = count_calls(monkeypatch)
    draw(policy, [[5, 6]], 2, 3)
    assert calls and not any(hidden.requires_grad for _, hidden in calls)


# ---- a common opening, and the pace of a GPU -----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_common_opening_is_computed_once_and_changes_nothing(kind, monkeypatch):
    """Also for prompts that are prefilled later, when the opening is in the cache only."""
    policy = tiny_policy(kind)
    prompts = [[7, 8, 9, 3, *p] for p in ragged_prompts(6, seed=5)]
    wanted = draw(policy, prompts, 2, 7, max_rows=3)
    monkeypatch.setattr("grpo.attention.SHORTEST_COMMON", 4)
    calls = count_calls(monkeypatch)
    found = draw(policy, prompts, 2, 7, max_rows=3)
    assert tokens_of(found) == tokens_of(wanted)
    for mine, theirs in zip(sum(found, []), sum(wanted, []), strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert len([width for (_, width), _ in calls if width > 1]) > 1, "one prefill is no test"
    written = sum(len(c.token_ids) - 1 for g in found for c in g)
    computed = sum(rows * width for (rows, width), _ in calls)
    assert computed == 4 + sum(len(p) - 4 for p in prompts) + written


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps, width", [(1, 4), (3, 4), (8, 16)])
def test_the_pace_of_a_gpu_gives_the_same_completions(kind, steps, width):
    """Spare rows, places behind the mask, rows that run on after their stop token: all dropped."""
    policy = tiny_policy(kind, stop=[2, 5, 9])
    prompts = ragged_prompts(5, seed=6)
    wanted = draw(policy, prompts, 3, 10, max_rows=6)
    pace = Pace(steps=steps, bucketed=True, width_bucket=width, cuda_graphs=False)
    found = draw(policy, prompts, 3, 10, max_rows=6, pace=pace)
    assert tokens_of(found) == tokens_of(wanted)
    assert {c.finish_reason for g in found for c in g} == {"stop", "length"}
    for mine, theirs in zip(sum(found, []), sum(wanted, []), strict=True):
        assert mine.finish_reason == theirs.finish_reason
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_a_captured_step_takes_over_the_rows_of_another(monkeypatch):
    """A CUDA graph replays the addresses it was captured with. Here a replay runs the captured
    step again, on whatever its own tensors hold by then: the same contract."""
    replays = []

    def captured(step, width, pool):
        def replay():
            replays.append(width)
            return step(width)

        return replay, pool

    monkeypatch.setattr("grpo.decode.capture", captured)
    policy = tiny_policy(stop=[2, 5, 9])
    prompts = ragged_prompts(5, seed=6)
    wanted = draw(policy, prompts, 3, 10, max_rows=6)
    pace = Pace(steps=2, bucketed=True, width_bucket=4, cuda_graphs=True)
    found = draw(policy, prompts, 3, 10, max_rows=6, pace=pace)
    assert tokens_of(found) == tokens_of(wanted)
    assert len(replays) > 10 and len(set(replays)) > 1


# ---- randomness ----------------------------------------------------------------------------------


def test_the_generator_moves_by_the_table_alone():
    """Where the random stream goes on must not depend on how long the answers were."""
    states = []
    for stop in ([], range(32)):
        generator = torch.Generator().manual_seed(3)
        generate(tiny_policy(stop=stop), [[5]], 4, 6, Sampling(), generator)
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_greedy_asks_for_no_randomness():
    policy, generator = tiny_policy(), torch.Generator().manual_seed(3)
    before = generator.get_state()
    generate(policy, [[5]], 2, 6, Sampling(0.0), generator)
    assert torch.equal(before, generator.get_state())


def test_the_global_random_state_is_left_alone():
    policy = tiny_policy()
    outside = torch.get_rng_state()
    draw(policy, [[5]], 2, 6)
    assert torch.equal(outside, torch.get_rng_state())


def test_text_for_the_rewards_ends_before_the_stop_token(make_tokenizer):
    tokenizer = make_tokenizer(MARKOV_TOKENS)
    policy = policy_of(build_markov("grpo"), [2, 3], tokenizer)
    texts = [
        completion_text(tokenizer, row.token_ids, policy.stop_token_ids)
        for (row,) in greedy(policy, [[1, 4], [1, 7]], 6)
    ]
    assert texts == ["bc", ""]


def count_calls(monkeypatch) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """(shape of the ids, hidden states) of every run of a model from here on, folded or not."""
    calls = []

    def counted(run):
        def hidden_states(self, input_ids, position_ids, layout):
            assert input_ids.shape == position_ids.shape
            hidden = run(self, input_ids, position_ids, layout)
            calls.append((tuple(input_ids.shape), hidden))
            return hidden

        return hidden_states

    for kind in (FoldedModel, Modules):
        monkeypatch.setattr(kind, "hidden_states", counted(kind.hidden_states))
    return calls


@pytest.mark.parametrize("block", [64, 4])
def test_what_memory_held_before_does_not_reach_the_answers(block, monkeypatch):
    """The cache is not cleared as a whole; a masked NaN in it would spread, for 0 x NaN is NaN.

    Rows of different age: a young one is masked where it has not been, in a slot of a short one.
    """
    monkeypatch.setattr(grpo.cache, "BLOCK", block)
    policy, prompts = tiny_policy("llama", STOPS["several"]), ragged_prompts(10, seed=1)
    clean = draw(policy, prompts, group=2, length=20, max_rows=5)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        assert draw(policy, prompts, group=2, length=20, max_rows=5) == clean
    finally:
        torch.use_deterministic_algorithms(False)
