"""Episodes of several turns: what is said, what is heard, and which of it is learned from."""

import pytest
import torch
from conftest import build_tokenizer
from tiny import (
    draw,
    gradients_of,
    letters_task,
    plain_logprobs,
    settings,
    share_of,
    tiny_policy,
    training_of,
)

from grpo.answers import answer_of, row_of
from grpo.collect import sample
from grpo.config import parse
from grpo.episodes import play
from grpo.errors import UserError
from grpo.evaluate import evaluate
from grpo.logprobs import completion_logprobs
from grpo.loop import train
from grpo.packing import Group, micro_batches, pack
from grpo.sampling import Sampling
from grpo.startup import load_task
from grpo.tokenizer import encode_reply, render_prompt

STOP = set(range(2, 18))  # half of the vocabulary ends a turn: turns are short
CHATML = (
    "{% for m in messages %}<s>{{ m['role'][:1] }} {{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>a {% endif %}"
)


def episodes_of(policy, task, turns, length=6, temperature=0.0, size=1, **more):
    prompts = [render_prompt(policy.tokenizer, e.messages, "chat") for e in task.train]
    return prompts, play(
        policy, task, prompts, task.train, size, length, Sampling(temperature), turns=turns,
        prompt_format="chat", max_rows=4, **more,
    )  # fmt: skip


def replying(reply, **changes):
    return letters_task(share_of("a"), reply=reply, **changes)


def test_each_turn_continues_the_ids_of_all_turns_before_it():
    policy = tiny_policy(stop=STOP)
    prompts, groups = episodes_of(policy, replying(lambda text, example: "no"), turns=3)
    heard = encode_reply(policy.tokenizer, "no", "chat")
    turns = []
    for prompt, (episode,) in zip(prompts, groups, strict=True):
        expected, context = [], list(prompt)
        while len(expected) < 3 and (not expected or expected[-1].finish_reason == "stop"):
            expected.append(draw(policy, [context], temperature=0.0, length=6)[0][0])
            context += expected[-1].token_ids + heard
        assert prompt + episode.completion.token_ids == context[: -len(heard)]
        assert episode.completion.logprobs == pytest.approx(
            [p for c in expected for p in c.logprobs], abs=1e-5
        )
        turns.append(len(expected))
    assert max(turns) > 1  # or nothing was tested


def test_the_tokens_of_the_world_are_marked_as_not_the_policys():
    policy = tiny_policy(stop=STOP)
    _, groups = episodes_of(policy, replying(lambda text, example: "no"), turns=2)
    heard = encode_reply(policy.tokenizer, "no", "chat")
    two_turns = [e.completion for (e,) in groups if e.completion.own]
    assert two_turns
    for completion in two_turns:
        others = [
            t for t, own in zip(completion.token_ids, completion.own, strict=True) if not own
        ]
        assert others == heard
        assert len(completion.logprobs) == sum(completion.own)


def test_rewards_see_the_last_answer_and_the_turns_before_it():
    policy = tiny_policy(stop=STOP)
    asked = []

    def reply(text, example):
        asked.append((text, len(example.messages)))
        return "no"

    task = replying(reply)
    _, groups = episodes_of(policy, task, turns=2)
    for example, (episode,) in zip(task.train, groups, strict=True):
        if episode.completion.own:
            first, answer = episode.example.messages[-2:]
            assert episode.example.messages[:-2] == example.messages
            assert (first["role"], answer) == ("assistant", {"role": "user", "content": "no"})
            assert (first["content"], 1) in asked
        else:
            assert episode.example == example


@pytest.mark.parametrize("ends", ["no reply", "cut by its length", "no room"])
def test_an_episode_ends_there(ends):
    stop = {31} if ends == "cut by its length" else STOP
    policy = tiny_policy(stop=stop, max_position_embeddings=10 if ends == "no room" else 64)
    task = replying(lambda text, example: None if ends == "no reply" else "no no no")
    _, groups = episodes_of(policy, task, turns=2)
    assert not any(e.completion.own for (e,) in groups)


def test_a_reply_is_what_the_chat_template_writes_between_two_answers():
    letters = list("abcdefghijklmnopqrstuvwxyz-? \n")
    tokenizer = build_tokenizer(
        ["<pad>", "<s>", "<e>", *letters], special=["<s>", "<e>"], chat_template=CHATML
    )
    first = [{"role": "user", "content": "hi"}]
    more = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "no"}]
    said = tokenizer("yes<e>", add_special_tokens=False).input_ids
    whole = render_prompt(tokenizer, first + more, "chat")
    assert (
        render_prompt(tokenizer, first, "chat") + said + encode_reply(tokenizer, "no", "chat")
        == whole
    )


def test_only_own_tokens_are_predicted_and_they_see_the_others():
    policy = tiny_policy(dtype=torch.float64)
    prompt, completions = [3, 4], [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 2]]
    own = [[True, False, False, True, True], [True, True], [True, True, False, True]]
    whole = [plain_logprobs(policy, prompt, c) for c in completions]
    for budget in (1, 9, 1000):
        groups = [Group(prompt, completions, [0, 1, 2], own)]
        found = {}
        for batch in micro_batches(groups, budget, "cpu"):
            logp, _ = completion_logprobs(policy, batch, 1.0)
            for row, values, mask in zip(batch.rows.tolist(), logp, batch.mask, strict=True):
                found[row] = values[mask]
        for row, (expected, mine) in enumerate(zip(whole, own, strict=True)):
            assert torch.allclose(found[row], expected[torch.tensor(mine)], atol=1e-10)


def test_no_gradient_comes_from_the_tokens_of_the_world():
    policy = tiny_policy(dtype=torch.float64)
    prompt, completion, own = [3, 4], [5, 6, 7, 8], [True, False, False, True]
    batch = pack([Group(prompt, [completion], [0], [own])], "cpu")
    completion_logprobs(policy, batch, 1.0)[0].sum().backward()
    packed = gradients_of(policy)
    policy.model.zero_grad()
    plain_logprobs(policy, prompt, completion)[torch.tensor(own)].sum().backward()
    for name, gradient in gradients_of(policy).items():
        assert torch.allclose(packed[name], gradient, atol=1e-9), name


def test_sampler_and_scorer_agree_on_all_turns_and_the_loss_counts_own_tokens_alone():
    policy = tiny_policy(stop=STOP)
    task = replying(lambda text, example: "no")
    run = training_of(policy, settings(turns=3, max_steps=2, max_completion_length=4))
    train(policy, task, run.config, run)
    for line in run.recorder.lines:
        assert line["sampler_gap"] < 1e-4
        assert line["completions/max_length"] <= 3 * 4  # what the world says is not counted
    assert max(line["completions/max_length"] for line in run.recorder.lines) > 4


def test_the_last_answer_decides_so_a_policy_learns_to_use_its_second_turn():
    """The reward is the last answer's alone: without credit to later turns it could not rise."""
    policy = tiny_policy(stop=STOP)
    task = replying(lambda text, example: None if example.messages[1:] else "no")
    config = settings(turns=2, max_steps=40, max_completion_length=3, num_generations=8)
    run = training_of(policy, config)
    train(policy, task, config, run)
    rewards = [line["reward"] for line in run.recorder.lines]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_turns_are_refused_where_the_task_does_not_reply():
    config, options, _ = parse(["--task", "maze", "--turns", "2"])
    with pytest.raises(UserError, match="--turns 2: the task maze replies to no answer"):
        load_task(config, options)


# ---- where else episodes are played --------------------------------------------------------------


def test_an_evaluation_judges_the_last_answer_and_keeps_the_turns_before_it():
    policy = tiny_policy(stop=STOP)
    task = replying(
        lambda text, example: "no", is_correct=lambda text, example: len(example.messages) == 3
    )
    found = evaluate(
        policy, task, task.evaluation, max_new_tokens=6, prompt_format="chat", max_rows=4, turns=2
    )
    _, groups = episodes_of(policy, task, turns=2)
    for answer, (episode,) in zip(found.answers, groups, strict=True):
        assert (answer.text, answer.tokens) == (episode.text, len(episode.completion.logprobs))
        assert answer.example.messages + answer.turns == episode.example.messages
        assert answer.correct == bool(answer.turns)
        assert answer_of(row_of(0, answer), answer.example) == answer
    assert any(a.correct for a in found.answers)


def test_what_is_collected_of_an_episode_is_its_last_answer_with_the_turns_before_as_its_prompt():
    policy = tiny_policy(stop=STOP)
    task = replying(
        lambda text, example: "no", is_correct=lambda text, example: len(example.messages) == 3
    )
    config = settings(turns=2, num_generations=8)
    rows = [found["row"] for found in sample(policy, task, config, range(3), lambda rows: None)]
    kept = [row for row in rows if row]
    assert kept
    assert all([m["role"] for m in r["prompt"]] == ["user", "assistant", "user"] for r in kept)
