"""The batched generator: G completions of each prompt, with the log-prob of every token.

The prompt is computed once a group. Rows that have finished leave the batch at once and the next
ones of the queue take their place, so that the matrix products stay full. Sampling draws one
uniform number a token from a table made beforehand, [rows, tokens]: a row's completion does not
depend on which other rows happen to be in flight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from grpo.attention import DecodeLayout, KeyValueCache, PrefillLayout
from grpo.errors import UserError
from grpo.policy import Policy
from grpo.sampling import sample

PREFILL_TOKENS = 16_384  # prompts are computed together up to this many tokens, to bound memory


@dataclass
class Sampling:
    """How a token is drawn. Log-probs are always of the tempered, untruncated distribution."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off



@dataclass
class Completion:
    """Token ids up to and including the stop token, and the sampler's log-prob of each."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""  # "stop" or "length"


@dataclass
class _Prompt:
    """A prompt whose keys and values are in the cache."""

    index: int
    length: int
    logits: torch.Tensor  # [V] that predict the first token of each of its rows
    live_rows: int


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: Sequence[list[int]],
    num_generations: int,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    max_rows: int = 64,
    on_finish: Callable[[int], None] = lambda rows: None,
) -> list[list[Completion]]:
    """[P] prompts → [P][G] completions; `on_finish(1)` is called as each row ends.

    generator: on the CPU, read only when `sampling` draws. max_rows: rows decoded together.
    Raises UserError for an empty prompt, one that leaves no room for max_new_tokens, and a model
    that answers NaN.
    """
    _check(prompts, max_new_tokens, policy.context_length)
    rows = len(prompts) * num_generations
    uniforms = None
    if sampling.temperature > 0:
        uniforms = torch.rand(rows, max_new_tokens, generator=generator).to(policy.device)
    decoding = _Decoding(
        policy, prompts, num_generations, max_new_tokens, sampling, uniforms, max_rows, on_finish
    )
    while decoding.queue or decoding.active:
        decoding.admit()
        if decoding.active:
            decoding.step()
    flat = decoding.completions
    if not all(math.isfinite(p) for c in flat for p in c.logprobs):
        # Rows of a broken model are all alike: GRPO would see no spread and go on without a word.
        raise UserError(
            "the model's probabilities are not numbers (NaN): its weights are broken, or its "
            "precision is too low; go back to a checkpoint, or try --dtype float32"
        )
    return [flat[i : i + num_generations] for i in range(0, rows, num_generations)]


def _check(prompts, max_new_tokens: int, context_length: int | None):
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty: there is nothing to continue")
        if context_length and len(prompt) + max_new_tokens > context_length:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and --max-completion-length is "
                f"{max_new_tokens}: together they do not fit the model's {context_length} "
                "positions; lower one of them"
            )


class _Decoding:
    """The state of one call: the queue, the rows in flight, the prompts that they continue.

    Row j of `active` uses row j of the cache, prompt i of `live` uses slot i; a row is its index
    in the output.
    """

    def __init__(self, policy, prompts, group, max_new_tokens, sampling, uniforms, max_rows, done):
        self.policy, self.prompts, self.group = policy, prompts, group
        self.max_new_tokens, self.sampling, self.uniforms = max_new_tokens, sampling, uniforms
        self.on_finish = done
        rows = len(prompts) * group
        self.completions = [Completion() for _ in range(rows)]
        self.queue = list(range(rows))[::-1]  # taken from the end
        self.active: list[int] = []
        self.of_prompt: list[int] = []  # slot in `live` of each active row
        self.live: list[_Prompt] = []
        self.max_rows = min(max_rows, rows)
        # Twice the prompts of a full batch, so that stragglers do not keep new prompts out.
        self.max_prompts = min(len(prompts), 2 * -(-self.max_rows // group))
        self.stop = set(policy.stop_token_ids)
        self.cache = KeyValueCache(
            layers=policy.num_layers,
            prompts=self.max_prompts,
            rows=self.max_rows,
            prompt_length=max(len(p) for p in prompts) if prompts else 0,
            row_length=max_new_tokens,
        )

    # ---- admission: rows of the queue take free places ----------------------------------------

    def admit(self):
        """Fill the free rows from the queue; each new row's first token comes from its prompt."""
        while self.queue and len(self.active) < self.max_rows:
            if not self._prefill_needed():
                return
            free = self.max_rows - len(self.active)
            slots = {p.index: slot for slot, p in enumerate(self.live)}
            fresh = []
            while self.queue and len(fresh) < free and self.queue[-1] // self.group in slots:
                fresh.append(self.queue.pop())
            slot = [slots[row // self.group] for row in fresh]
            logits = torch.stack([self.live[s].logits for s in slot])
            self.active += fresh
            self.of_prompt += slot
            self._append(logits, first=len(self.active) - len(fresh))

    def _prefill_needed(self) -> bool:
        """Compute the prompts that the queue's next rows need; False if no slot is free for any."""
        known = {p.index for p in self.live}
        free = self.max_rows - len(self.active)
        upcoming = {row // self.group: None for row in self.queue[-free:][::-1]}
        new = [i for i in upcoming if i not in known][: self.max_prompts - len(self.live)]
        while new:
            chunk, tokens = [], 0
            while new and (not chunk or tokens + len(self.prompts[new[0]]) <= PREFILL_TOKENS):
                tokens += len(self.prompts[new[0]])
                chunk.append(new.pop(0))
            self._prefill(chunk)
        return self.queue[-1] // self.group in {p.index for p in self.live}

    def _prefill(self, indices: list[int]):
        prompts = [self.prompts[i] for i in indices]
        lengths = [len(p) for p in prompts]
        device = self.policy.device
        layout = PrefillLayout(
            prompt_lengths=lengths,
            completion_lengths=[],
            of_prompt=[],
            device=device,
            cache=self.cache,
            first_slot=len(self.live),
        )
        hidden = self.policy.hidden_states(
            torch.tensor([[t for p in prompts for t in p]], device=device),
            torch.tensor([[i for n in lengths for i in range(n)]], device=device),
            layout,
        )[0]
        ends = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self.policy.head(hidden[ends])
        for i, length, row_logits in zip(indices, lengths, logits, strict=True):
            self.live.append(_Prompt(i, length, row_logits, live_rows=self.group))

    # ---- one token for every active row -------------------------------------------------------

    def step(self):
        """Run the model on the last token of every active row and append the next one."""
        device = self.policy.device
        grown = [len(self.completions[row].token_ids) for row in self.active]
        layout = DecodeLayout(
            cache=self.cache,
            prompt_lengths=[p.length for p in self.live],
            of_prompt=self.of_prompt,
            row_lengths=[n - 1 for n in grown],  # the last token is not in the cache yet
            device=device,
        )
        tokens = [self.completions[row].token_ids[-1] for row in self.active]
        positions = [
            self.live[s].length + n - 1 for s, n in zip(self.of_prompt, grown, strict=True)
        ]
        hidden = self.policy.hidden_states(
            torch.tensor(tokens, device=device)[:, None],
            torch.tensor(positions, device=device)[:, None],
            layout,
        )
        self._append(self.policy.head(hidden[:, 0]), first=0)

    def _append(self, logits: torch.Tensor, first: int):
        """Sample a token for active rows from `first` on, [A - first, V]; retire the finished."""
        rows = self.active[first:]
        uniforms = None
        if self.sampling.temperature > 0:
            at = [len(self.completions[row].token_ids) for row in rows]
            uniforms = self.uniforms[torch.tensor(rows), torch.tensor(at)]
        tokens, logprobs = sample(
            logits,
            self.sampling.temperature,
            self.sampling.top_k,
            self.sampling.top_p,
            self.sampling.min_p,
            uniforms=uniforms,
        )
        finished = []
        for place, token, logprob in zip(
            range(first, len(self.active)), tokens.tolist(), logprobs.tolist(), strict=True
        ):
            completion = self.completions[self.active[place]]
            completion.token_ids.append(token)
            completion.logprobs.append(logprob)
            if token in self.stop:
                completion.finish_reason = "stop"
            elif len(completion.token_ids) == self.max_new_tokens:
                completion.finish_reason = "length"
            if completion.finish_reason:
                finished.append(place)
        for place in reversed(finished):
            self._retire(place)

    def _retire(self, place: int):
        """Free a finished row, and its prompt after the group's last; the last ones move down."""
        slot = self.of_prompt[place]
        last = len(self.active) - 1
        if place != last:
            length = len(self.completions[self.active[last]].token_ids)
            self.cache.move_row(last, place, length)
            self.active[place], self.of_prompt[place] = self.active[last], self.of_prompt[last]
        self.active.pop()
        self.of_prompt.pop()
        self.on_finish(1)

        self.live[slot].live_rows -= 1
        if self.live[slot].live_rows:
            return
        last = len(self.live) - 1
        if slot != last:
            self.cache.move_prompt(last, slot)
            self.live[slot] = self.live[last]
            self.of_prompt = [slot if s == last else s for s in self.of_prompt]
        self.live.pop()
