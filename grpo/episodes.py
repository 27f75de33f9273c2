"""Episodes: the policy answers, hears what came of it, and answers again.

A task with `Task.reply` says what the world answers to a completion. An episode is then one long
completion: the policy's tokens of every turn and, between them, the reply as the chat template
writes it. Only the policy's own tokens are learned from, and the reward of the end is that of all
of them. The ids of a turn are never decoded and encoded again: the next turn continues them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from data import Example, Task
from grpo.generate import Completion, generate
from grpo.policy import Policy
from grpo.sampling import Sampling
from grpo.tokenizer import completion_text, encode_reply


@dataclass
class Episode:
    """completion: the whole of it. text: what the policy said last. example: the one asked, with
    the turns before that in its messages, as rewards and judges need it."""

    completion: Completion
    text: str
    example: Example


def play(
    policy: Policy,
    task: Task,
    prompts: Sequence[list[int]],
    examples: Sequence[Example],
    num_generations: int,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    turns: int,
    prompt_format: str,
    max_rows: int,
    uniforms: Tensor | None = None,
    on_finish: Callable[[int], None] = lambda rows: None,
) -> list[list[Episode]]:
    """[P] prompts, those of the examples → [P][G] episodes of at most `turns` answers.

    Each is of max_new_tokens at most. An episode ends where the task has no reply, where an answer
    is cut by its length, and where the next one would not fit the model's positions. uniforms:
    [P G, turns max_new_tokens]. Everything else as in `generate`.
    """
    groups = generate(
        policy,
        prompts,
        num_generations,
        max_new_tokens,
        sampling,
        max_rows=max_rows,
        uniforms=None if uniforms is None else uniforms[:, :max_new_tokens],
        on_finish=on_finish,
    )
    episodes = [
        Episode(completion, said(policy, completion), example)
        for example, group in zip(examples, groups, strict=True)
        for completion in group
    ]
    for turn in range(1, turns):
        going = list(going_on(policy, task, episodes, prompts, max_new_tokens, prompt_format))
        if not going:
            break
        rows, contexts, replies, heard = zip(*going, strict=True)
        own = slice(turn * max_new_tokens, (turn + 1) * max_new_tokens)
        answers = generate(
            policy,
            contexts,
            1,
            max_new_tokens,
            sampling,
            max_rows=max_rows,
            uniforms=None if uniforms is None else uniforms[list(rows), own],
            on_finish=lambda finished: on_finish(0),  # the episode has been counted
        )
        for row, reply, ids, (answer,) in zip(rows, replies, heard, answers, strict=True):
            episodes[row] = extended(policy, episodes[row], reply, ids, answer)
    size = num_generations
    return [episodes[i : i + size] for i in range(0, len(episodes), size)]


def going_on(policy, task, episodes, prompts, max_new_tokens, prompt_format):
    """(row, the tokens to continue, the reply, its tokens) of each episode that has a next turn."""
    size, limit = len(episodes) // len(prompts), policy.context_length
    for row, episode in enumerate(episodes):
        if episode.completion.finish_reason != "stop":
            continue
        reply = task.reply(episode.text, episode.example)
        if reply is None:
            continue
        heard = encode_reply(policy.tokenizer, reply, prompt_format)
        context = prompts[row // size] + episode.completion.token_ids + heard
        if limit is None or len(context) + max_new_tokens <= limit:
            yield row, context, reply, heard


def extended(
    policy: Policy, episode: Episode, reply: str, heard: list[int], answer: Completion
) -> Episode:
    """The episode after another turn. heard: the tokens of the reply."""
    before = episode.completion
    completion = Completion(
        token_ids=before.token_ids + heard + answer.token_ids,
        logprobs=before.logprobs + answer.logprobs,
        finish_reason=answer.finish_reason,
        own=before.own_tokens() + [False] * len(heard) + answer.own_tokens(),
    )
    turn = [{"role": "assistant", "content": episode.text}, {"role": "user", "content": reply}]
    example = replace(episode.example, messages=[*episode.example.messages, *turn])
    return Episode(completion, said(policy, answer), example)


def said(policy: Policy, completion: Completion) -> str:
    return completion_text(policy.tokenizer, completion.token_ids, policy.stop_token_ids)
