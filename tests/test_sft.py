"""The cold start: its loss is the plain one, the prompt is not learned, and stopping is."""

import pytest
import torch
from conftest import KINDS, build_tokenizer
from tiny import (
    TEMPLATE,
    draw,
    gradients_of,
    letters_task,
    plain_logprobs,
    settings,
    tiny_policy,
    training_of,
    weights_of,
)

import grpo.sft
from data import Example
from grpo.errors import UserError
from grpo.sft import supervised_group
from grpo.tokenizer import completion_text, render_prompt

WORDS = ["ab", "cde", "fghijk"]


def run_steps(policy, task, config):
    run = training_of(policy, config, "sft")
    grpo.sft.train(policy, task, config, run)
    return run


def watched_gradients(policy, task, config):
    """(the first step's line, the gradient before its update)."""
    run = training_of(policy, config, "sft")
    found, update = [], run.update
    run.update = lambda: found.append(gradients_of(policy)) or update()
    grpo.sft.train(policy, task, config, run)
    return run.recorder.lines[0], found[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 12, 10_000])
def test_the_loss_is_the_mean_over_all_target_tokens_for_any_split(kind, budget):
    """Targets of 5, 7 and 13 tokens: a mean of micro-batch means would favour the short one."""
    task = letters_task(None, WORDS)
    policy = tiny_policy(kind, dtype=torch.float64)
    line, gradients = watched_gradients(policy, task, settings(tokens_per_micro_batch=budget))

    twin = tiny_policy(kind, dtype=torch.float64)
    losses = []
    for word in WORDS:
        prompt, target = (twin.tokenizer(t).input_ids for t in (word, word * 2))
        losses.append(-plain_logprobs(twin, prompt, [*target, 2]))
    loss = torch.cat(losses).mean()
    loss.backward()
    assert line["loss"] == pytest.approx(loss.item(), abs=1e-9)
    for name, wanted in gradients_of(twin).items():
        assert torch.allclose(gradients[name], wanted, rtol=0, atol=1e-6), name


def test_the_target_ends_with_the_stop_token_that_the_template_closes_turns_with():
    policy = tiny_policy()
    example = letters_task(None).sft[1]
    group = supervised_group(policy, example, 7, settings())
    assert group.prompt == policy.tokenizer("bc").input_ids
    assert group.completions == [policy.tokenizer("bcbc").input_ids + [2]] and group.rows == [7]
    turns = "{% for m in messages %}{{ m['content'] }}<|endoftext|>{% endfor %}"
    tokenizer = build_tokenizer(chat_template=turns, special=["<|endoftext|>"])
    policy = tiny_policy(stop=[2, 31])
    policy.tokenizer = tokenizer
    assert supervised_group(policy, example, 0, settings()).completions[0][-1] == 31


def test_answering_and_stopping_are_learned():
    """Without the stop token in the loss every answer would run on into the length limit."""
    policy = tiny_policy(initializer_range=0.1)
    task = letters_task(None, WORDS)
    run = run_steps(policy, task, settings(sft_steps=60))
    assert run.recorder.lines[-1]["loss"] < 0.05 < run.recorder.lines[0]["loss"]
    for example in task.sft:
        prompt = render_prompt(policy.tokenizer, example.messages, "chat")
        ((row,),) = draw(policy, [prompt], length=20, temperature=0.0)
        assert row.finish_reason == "stop"
        text = completion_text(policy.tokenizer, row.token_ids, policy.stop_token_ids)
        assert text == example.target


def test_every_example_comes_once_an_epoch(monkeypatch):
    seen = []

    def watched(policy, example, *args):
        seen.append(example.answer)
        return supervised_group(policy, example, *args)

    monkeypatch.setattr(grpo.sft, "supervised_group", watched)
    words = list("abcdef")
    run_steps(
        tiny_policy(), letters_task(None, words), settings(sft_steps=6, sft_batch_size=2)
    )
    assert sorted(seen[:6]) == sorted(seen[6:]) == words and seen[:6] != seen[6:]


def test_the_line_of_a_step():
    run = run_steps(tiny_policy(), letters_task(None), settings(sft_steps=2))
    for step, line in enumerate(run.recorder.lines, 1):
        assert (line["stage"], line["step"]) == ("sft", step)
        assert {"loss", "grad_norm", "learning_rate", "step_time"} <= line.keys()
        assert line["tokens_per_second/train"] > 0


def test_every_weight_moves():
    policy = tiny_policy("qwen3")
    before = weights_of(policy)
    run_steps(policy, letters_task(None), settings())
    assert all(not torch.equal(p, before[n]) for n, p in weights_of(policy).items())


def test_an_example_that_the_model_has_no_positions_for_is_left_out_of_its_step():
    """It once ended the run in the middle, and every resumed one at the same step."""
    fits, too_long = letters_task(None, ["ab", "cde"]).sft, letters_task(None, ["f" * 22]).sft
    policy = tiny_policy()  # 64 positions; the long one has 22 + 44 + 1 tokens
    task = letters_task(None, sft=[fits[0], too_long[0], fits[1]])
    run = run_steps(policy, task, settings(sft_steps=2))
    assert len(run.recorder.said) == 1, "one warning a stage, not one a step"
    assert "67 tokens" in run.recorder.said[0] and "64 positions" in run.recorder.said[0]

    # The loss is the mean over the tokens that are left: that of a step without the example.
    line, gradients = watched_gradients(tiny_policy(), task, settings())
    alone = letters_task(None, sft=fits)
    wanted, expected = watched_gradients(tiny_policy(), alone, settings(sft_batch_size=2))
    assert line["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=0, atol=1e-5), name


def test_a_step_with_no_example_that_fits_is_an_error():
    task = letters_task(None, ["f" * 22, "g" * 23, "h" * 24])
    with pytest.raises(UserError, match="step 1 of sft: none of its 3 examples, of 67 tokens"):
        run_steps(tiny_policy(), task, settings())


def test_an_example_without_a_target_is_refused():
    bare = Example([{"role": "user", "content": "a"}], target="", answer="a")
    with pytest.raises(UserError, match="no target"):
        run_steps(tiny_policy(), letters_task(None, sft=[bare]), settings())


def test_a_prompt_without_words_is_refused_before_it_is_trained_on():
    """Its first token would be predicted from nothing, or from another example's last token."""
    empty = Example([{"role": "user", "content": ""}], target="ab", answer="a")
    policy = tiny_policy()
    policy.tokenizer.chat_template = TEMPLATE
    with pytest.raises(UserError, match="empty"):
        run_steps(policy, letters_task(None, sft=[empty]), settings())
