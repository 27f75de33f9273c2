"""A batch of (prompt, completions) as one packed sequence in which each prompt stands once.

Eight completions of an 80-token prompt, 120 tokens each, are 80 + 8 x 120 tokens instead of
8 x 200, and there is no padding outside the attention product. An opening that all prompts of the
step share, such as a system prompt, stands once a batch. The last token of a completion is
predicted but predicts nothing, so it is left out of the input.

    group 0: prompt a b, completions x y z and u      group 1: prompt c, completion v w
    input_ids   a b | c | x y | - | v        ("u" is one token: nothing of it is input)
    source      where each completion token is predicted: x from b, y from x, z from y, u from b, …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch

from grpo.attention import PackedLayout, common_length

# Attention pads the completions of prompts of one length to the prompt with most of them, and rows
# to the longest of their like. As if all were padded to the longest, a batch may have this many
# times the budget: a row of 4,096 tokens beside 200 of 16 would have 100 times.
PADDING = 2


@dataclass
class Group:
    """One prompt and some of its completions; `rows` are their indices in the whole step's rows.

    own: for each completion, which of its tokens are learned from; empty for all of them.
    """

    prompt: list[int]
    completions: list[list[int]]
    rows: list[int]
    own: list[list[bool]] = field(default_factory=list)

    def learned(self) -> list[list[bool]]:
        """own, written out."""
        return self.own or [[True] * len(c) for c in self.completions]


@dataclass
class PackedBatch:
    """T packed tokens that predict M completion tokens of n rows, the longest of C tokens.

    What a completion holds that the policy did not write is among the T, and not among the M.
    """

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T], counted anew in every row: a completion follows its prompt
    layout: PackedLayout
    source: torch.Tensor  # [M] the place in T whose hidden state predicts the token
    targets: torch.Tensor  # [M] the completion tokens, the stop token included
    mask: torch.Tensor  # [n, C] bool, True on completion tokens that are learned from
    rows: torch.Tensor  # [n] index of each row in the whole step

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """[M] → [n, C], 0 where there is no token."""
        padded = values.new_zeros(self.mask.shape)
        return padded.masked_scatter(self.mask, values)


def pack(groups: Sequence[Group], device: torch.device | str, common: int = 0) -> PackedBatch:
    """Groups → one packed batch: the `common` tokens with which all prompts begin, the prompts
    without them, then all completions in order."""
    prompts = [g.prompt[common:] for g in groups]
    completions = [c for g in groups for c in g.completions]
    own = [mine for g in groups for mine in g.learned()]
    of_prompt = [i for i, g in enumerate(groups) for _ in g.completions]
    tokens = groups[0].prompt[:common] + [t for p in prompts for t in p]
    positions = [*range(common), *(common + i for p in prompts for i in range(len(p)))]
    prompt_end, end = [], common
    for prompt in prompts:
        end += len(prompt)
        prompt_end.append(end - 1)
    source, targets = [], []
    for completion, mine, prompt in zip(completions, own, of_prompt, strict=True):
        start, length = len(tokens), len(completion) - 1
        source.extend(compress([prompt_end[prompt], *range(start, start + length)], mine))
        targets.extend(compress(completion, mine))
        tokens.extend(completion[:-1])
        first = common + len(prompts[prompt])
        positions.extend(range(first, first + length))
    widest = max(len(mine) for mine in own)
    mask = torch.tensor([mine + [False] * (widest - len(mine)) for mine in own])
    return PackedBatch(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=torch.tensor([positions], device=device),
        layout=PackedLayout(
            prompt_lengths=[len(p) for p in prompts],
            completion_lengths=[len(c) - 1 for c in completions],
            of_prompt=of_prompt,
            device=torch.device(device),
            common=common,
        ),
        source=torch.tensor(source, device=device),
        targets=torch.tensor(targets, device=device),
        mask=mask.to(device),
        rows=torch.tensor([r for g in groups for r in g.rows], device=device),
    )


def micro_batches(
    groups: Sequence[Group], token_budget: int, device: torch.device | str
) -> Iterator[PackedBatch]:
    """Groups in order, as packed batches of at most `token_budget` tokens, PADDING times as many
    once padded.

    A group that does not fit is split, its prompt repeated in each part; a single completion that
    is over the budget by itself is a batch by itself, since it cannot be cut. An opening that all
    prompts share comes on top, once a batch: within the budget it would leave room for few rows,
    and be computed for each few of them.
    """
    common = common_length([group.prompt for group in groups])
    batch: list[Group] = []
    size = _Size()
    for group in groups:
        part: Group | None = None
        prompt = len(group.prompt) - common
        columns = zip(group.completions, group.rows, group.learned(), strict=True)
        for completion, row, own in columns:
            larger = size.with_row(len(completion), prompt if part is None else None)
            if batch and not larger.within(token_budget):
                yield pack(batch, device, common)
                batch, part = [], None
                larger = _Size().with_row(len(completion), prompt)
            if part is None:
                part = Group(group.prompt, [], [])
                batch.append(part)
            part.completions.append(completion)
            part.rows.append(row)
            part.own.append(own)
            size = larger
    if batch:
        yield pack(batch, device, common)


@dataclass(frozen=True)
class _Size:
    """Of a batch that is being filled."""

    tokens: int = 0
    rows: int = 0
    longest_row: int = 0

    def with_row(self, row: int, prompt: int | None) -> _Size:
        """With a completion of `row` tokens, and its prompt unless that is in the batch already."""
        longest = max(self.longest_row, row)
        return _Size(self.tokens + row + (prompt or 0), self.rows + 1, longest)

    def within(self, budget: int) -> bool:
        return self.tokens <= budget and self.rows * self.longest_row <= PADDING * budget
