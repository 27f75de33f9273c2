"""The batched generator: G completions of each prompt, with the log-prob of every token.

The prompt is computed once a group, and an opening that all prompts share once for all of them.
Rows that have finished leave the batch and the next ones of the queue take their place, so that
the matrix products stay full. Sampling reads one uniform number a token from a table made
beforehand, [rows, tokens]: a row's completion does not depend on which other rows happen to be in
flight, nor on how often the host looks at the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo.attention import common_length
from grpo.cache import KeyValueCache, PrefillLayout
from grpo.decode import ON_CPU, ON_CUDA, DecodeStep, Graphs, Pace, power_of_two
from grpo.errors import UserError
from grpo.policy import Policy
from grpo.sampling import Sampling, draw_tokens

PREFILL_TOKENS = 16_384  # prompts are computed together up to this many tokens, to bound memory


@dataclass
class Completion:
    """Token ids up to and including the stop token, and the sampler's log-prob of each.

    own: for an episode of several turns (grpo/episodes.py), which tokens are the policy's and not
    the world's; logprobs has those alone. Empty where all of them are.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""  # "stop" or "length"
    own: list[bool] = field(default_factory=list)

    def own_tokens(self) -> list[bool]:
        """own, written out."""
        return self.own or [True] * len(self.token_ids)


@dataclass
class _Prompt:
    """A prompt whose keys and values are in the cache."""

    index: int
    length: int
    logits: Tensor  # [V] that predict the first token of each of its rows
    live_rows: int


def generate(
    policy: Policy,
    prompts: Sequence[list[int]],
    num_generations: int,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    max_rows: int = 64,
    on_finish: Callable[[int], None] = lambda rows: None,
    uniforms: Tensor | None = None,
    pace: Pace | None = None,
) -> list[list[Completion]]:
    """[P] prompts → [P][G] completions; `on_finish(1)` is called as each row ends.

    generator: on the CPU, read only when `sampling` draws. uniforms: [P G, max_new_tokens] in its
    place. max_rows: rows decoded together. pace: by the device unless given.
    Raises UserError for an empty prompt, one that leaves no room for max_new_tokens, and a model
    that answers NaN.
    """
    _check(prompts, max_new_tokens, policy.context_length)
    with torch.no_grad():
        model = policy.folded() or policy.modules  # kept for training: not of inference mode
    rows = len(prompts) * num_generations
    if sampling.temperature > 0 and uniforms is None:
        uniforms = torch.rand(rows, max_new_tokens, generator=generator)
    pace = pace or (ON_CUDA if policy.device.type == "cuda" else ON_CPU)
    with torch.inference_mode():
        decoding = _Decoding(
            policy, model, prompts, num_generations, max_new_tokens, sampling, uniforms, max_rows,
            on_finish, pace,
        )  # fmt: skip
        while decoding.queue or decoding.active:
            decoding.admit()
            if decoding.active:
                decoding.advance()
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

    def __init__(
        self,
        policy,
        model,
        prompts,
        group,
        max_new_tokens,
        sampling,
        uniforms,
        max_rows,
        on_finish,
        pace,
    ):
        self.model = model
        self.device, self.group = policy.device, group
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.uniforms = None if uniforms is None else uniforms.to(self.device)
        self.on_finish, self.pace = on_finish, pace
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
        common = common_length(prompts)
        self.opening = prompts[0][:common] if prompts else []
        self.prompts = [p[common:] for p in prompts]
        self.cache = KeyValueCache(
            layers=policy.num_layers,
            prompts=self.max_prompts,
            rows=power_of_two(self.max_rows) if pace.bucketed else self.max_rows,
            prompt_length=max(map(len, self.prompts), default=0),
            row_length=self._width(max_new_tokens),
            common=common,
            growing=not pace.bucketed,
        )
        self.step: DecodeStep | None = None  # None: the rows have changed since the last one
        self.graphs = Graphs() if pace.cuda_graphs else None

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
            first = len(self.active)
            self.active += fresh
            self.cache.blocks.add_rows(len(fresh))
            self.of_prompt += slot
            self.step = None
            uniforms = None if self.uniforms is None else self.uniforms[fresh, 0]
            tokens, logprobs = draw_tokens(logits, self.sampling, uniforms)
            self._take([tokens.tolist()], [logprobs.tolist()], first)

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
        common = len(self.opening)
        with_opening = common if self.cache.prompt is None else 0  # the first time only
        layout = PrefillLayout(
            prompt_lengths=lengths,
            completion_lengths=[],
            of_prompt=[],
            device=self.device,
            common=with_opening,
            cache=self.cache,
            first_slot=len(self.live),
        )
        tokens = self.opening[:with_opening] + [t for p in prompts for t in p]
        positions = [*range(with_opening), *(common + i for n in lengths for i in range(n))]
        hidden = self.model.hidden_states(
            torch.tensor([tokens], device=self.device),
            torch.tensor([positions], device=self.device),
            layout,
        )[0]
        ends = with_opening - 1 + torch.tensor(lengths, device=self.device).cumsum(0)
        logits = self.model.head(hidden[ends])
        for i, length, row_logits in zip(indices, lengths, logits, strict=True):
            self.live.append(_Prompt(i, length, row_logits, live_rows=self.group))

    # ---- decoding: the same rows until one of them ends ----------------------------------------

    def advance(self):
        """Some tokens for every active row; then look at them, and retire the finished rows."""
        grown = [len(self.completions[row].token_ids) + self.pace.steps for row in self.active]
        needed = [min(tokens, self.max_new_tokens) for tokens in grown]
        self.cache.make_room(needed, self.pace.width_bucket)
        width = self._width(max(needed)) if self.pace.bucketed else self.cache.width
        if self.step is None:
            self.step = self._next_step()
        tokens, logprobs = [], []
        for _ in range(self.pace.steps):
            if self.graphs:
                self.step, (drawn, logprob) = self.graphs.run(self.step, width)
            else:
                drawn, logprob = self.step(width)
            tokens.append(drawn)
            logprobs.append(logprob)
        self._take(torch.stack(tokens).tolist(), torch.stack(logprobs).tolist(), first=0)

    def _width(self, tokens: int) -> int:
        bucket = self.pace.width_bucket
        return -(-tokens // bucket) * bucket

    def _next_step(self) -> DecodeStep:
        rows = power_of_two(len(self.active)) if self.pace.bucketed else len(self.active)
        spare = rows - len(self.active)  # filled up with rows that nobody reads
        completions = [self.completions[row] for row in self.active]
        return DecodeStep(
            model=self.model,
            cache=self.cache,
            sampling=self.sampling,
            uniforms=self.uniforms,
            rows=self.active + [0] * spare,
            tokens=[c.token_ids[-1] for c in completions] + [0] * spare,
            # The last token is not in the cache yet.
            lengths=[len(c.token_ids) - 1 for c in completions] + [0] * spare,
            of_prompt=self.of_prompt,
            prompt_lengths=[p.length for p in self.live],
            common=len(self.opening),
            device=self.device,
            grid=(self.max_prompts, self.group) if self.pace.bucketed else None,
        )

    def _take(self, tokens: list[list[int]], logprobs: list[list[float]], first: int):
        """[steps][rows from `first` on]: append what belongs to each row, retire the finished."""
        finished = []
        for place in range(first, len(self.active)):
            completion = self.completions[self.active[place]]
            for token_row, logprob_row in zip(tokens, logprobs, strict=True):
                token = token_row[place - first]
                completion.token_ids.append(token)
                completion.logprobs.append(logprob_row[place - first])
                if token in self.stop:
                    completion.finish_reason = "stop"
                elif len(completion.token_ids) == self.max_new_tokens:
                    completion.finish_reason = "length"
                if completion.finish_reason:
                    finished.append(place)
                    break
        for place in reversed(finished):
            self._retire(place)

    def _retire(self, place: int):
        """Free a finished row, and its prompt after the group's last; the last ones move down."""
        self.step = None
        slot = self.of_prompt[place]
        last = len(self.active) - 1
        self.cache.free_row(place)
        if place != last:
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
