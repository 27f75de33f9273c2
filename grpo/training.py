"""What SFT and GRPO share: the state of a stage, and what happens between two of its steps.

A step either happens wholly or not at all: a number that is not finite, Ctrl-C or a full disk
leave the weights of the last whole step, saved, and one line that says how to go on.
"""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo.checkpoint import (
    load_checkpoint,
    load_into,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from grpo.config import Config
from grpo.distributed import any_rank, is_first, sum_gradients
from grpo.errors import UserError
from grpo.filtering import Buffer
from grpo.interrupt import StopRequest
from grpo.optimizer import Optimizer, learning_rate_at
from grpo.policy import Policy
from grpo.record import Progress, Recorder

if TYPE_CHECKING:
    from grpo.metrics import Rollout


def step_indices(step: int, count: int, total: int, seed: int) -> list[int]:
    """The `count` examples of a step: all `total` in a fresh shuffle every epoch.

    A function of its arguments alone, so that a resumed run goes on in the same order without any
    state of its own.

    >>> sorted(step_indices(0, 2, 4, seed=1) + step_indices(1, 2, 4, seed=1))
    [0, 1, 2, 3]
    """
    places = range(step * count, (step + 1) * count)
    return [_order(total, seed, place // total)[place % total] for place in places]


@lru_cache(maxsize=2)  # kept from step to step: 400,000 examples take 18 ms to shuffle
def _order(total: int, seed: int, epoch: int) -> list[int]:
    shuffle = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(total, generator=shuffle).tolist()


@dataclass
class Training:
    """One stage: everything that a step changes is in here, or in the policy's weights."""

    stage: str  # "sft" or "grpo"
    policy: Policy
    optimizer: Optimizer
    recorder: Recorder
    config: Config
    total_steps: int
    stop: StopRequest
    generator: torch.Generator  # of the sampling, on the CPU
    step: int = 0  # whole steps done
    buffer: Buffer = field(default_factory=Buffer)  # of GRPO: kept groups that wait for more
    warned: set[str] = field(default_factory=set)
    saved_step: int = 0
    mid_step: bool = False  # whether the weights have moved since the last whole step
    bar: Progress | None = None

    def steps(self) -> Iterator[int]:
        """The steps still to do, until the last or a request to stop; then saves."""
        with self.recorder.progress(self.stage, self.total_steps, self.step) as self.bar:
            while self.step < self.total_steps and not any_rank(self.stop.requested):
                self._remember()
                yield self.step
        self.save()

    def finish_step(self, metrics: dict[str, float]) -> None:
        """Count the step, write its line, and save where a checkpoint is due."""
        self.step += 1
        self.mid_step = False
        self._remember()
        self.recorder.metrics(self.stage, self.step, metrics)
        self.bar.step(metrics)
        if self.config.checkpoint_every and self.step % self.config.checkpoint_every == 0:
            self.save()
        if self.buffer.barren(self.config) and self.step < self.total_steps:
            self.save()
            raise UserError(self._nothing_kept(metrics["reward"]))

    def _remember(self) -> None:
        """A checkpoint always holds the state between two steps, also when one fails."""
        self.random_before = random_state({"sampling": self.generator})
        self.buffer_before = self.buffer

    def _nothing_kept(self, reward: float) -> str:
        c = self.config
        return (
            f"step {self.step} of {self.stage}: --filter {c.filter} has kept no group for "
            f"{c.filter_patience} steps (--filter-patience): none was between --filter-lower "
            f"{c.filter_lower:g} and --filter-upper {c.filter_upper:g}, and the mean reward is "
            f"{reward:.3g}. The prompts are too hard for the policy or too easy; the weights are "
            "saved; to go on, with other bounds or more --num-generations: python train.py "
            f"--resume {shlex.quote(str(self.recorder.run_dir))}"
        )

    def keep_completions(self, rows: Iterable[dict]) -> None:
        """Write this step's completions where a sample is due: the first step, then every N."""
        every = self.config.completions_every
        if every and self.step % every == 0:
            self.recorder.completions(self.stage, self.step + 1, rows)

    def warn(self, lines: Sequence[str]) -> None:
        """Print each kind of warning once a stage, above the bar; digits do not make a new kind."""
        for line in lines:
            kind = "".join(c for c in line if not c.isdigit())
            if kind not in self.warned:
                self.warned.add(kind)
                self.bar.say(f"warning (step {self.step + 1}): {line}")

    # ---- the update, guarded ------------------------------------------------------------------

    def require_finite(self, value: float | torch.Tensor, what: str) -> float:
        """The value as a float. If it is not finite: save the last whole step, raise UserError."""
        number = value.item() if isinstance(value, torch.Tensor) else value
        if not math.isfinite(number):
            self.save()
            kept = f"the weights after step {self.saved_step} are saved"
            raise UserError(
                f"step {self.step + 1} of {self.stage}: the {what} is {number}; it was not trained "
                f"on, and {kept if self.saved_step else 'nothing was trained before'}. Lower the "
                "learning rate or look at the rewards, then go on: python train.py --resume "
                f"{shlex.quote(str(self.recorder.run_dir))}"
            )
        return number

    def require_scored(self, rollout: Rollout) -> None:
        """Save the last whole step, raise UserError if no reward function applied to anything."""
        if any(reward is not None for reward in rollout.rewards):
            return
        self.save()
        raise UserError(
            f"step {self.step + 1} of {self.stage}: no reward function scored any of the "
            f"{len(rollout.rewards)} completions ({', '.join(rollout.reward_table)}): each gave "
            "None or NaN, or took longer than --reward-timeout. Mend them, then go on: python "
            f"train.py --resume {shlex.quote(str(self.recorder.run_dir))}"
        )

    def set_learning_rate(self, peak: float, scheduler: str) -> None:
        """The rate of this step on the schedule that rises to `peak`."""
        warmup = self.config.warmup_ratio
        self.optimizer.set_learning_rate(
            learning_rate_at(self.step, self.total_steps, peak, scheduler, warmup)
        )

    def update(self) -> float:
        """Sum the gradient over the ranks, clip and check it, step; its norm before the clip."""
        sum_gradients(self.optimizer.masters.values())
        norm = self.optimizer.clip_grad_norm(self.config.max_grad_norm or math.inf)
        self.require_finite(norm, "gradient norm")
        self.optimizer.step()
        self.mid_step = True
        return norm

    # ---- saving and resuming ------------------------------------------------------------------

    @contextlib.contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Whatever ends the stage before its time, the last whole step is saved first."""
        try:
            yield
        except Exception:
            with contextlib.suppress(UserError):  # the first failure is the one to tell
                self.save()
            raise

    def save(self) -> None:
        """Write a checkpoint of the last whole step, unless that is on the disk already.

        With num_iterations > 1 a step can fail after its first update: then the weights are of no
        whole step, and the checkpoint before it stands.
        """
        if self.saved_step == self.step or self.mid_step:
            return
        if is_first():  # the others have the same state
            weights = {n: p.detach() for n, p in self.policy.trainable_parameters().items()}
            waiting = self.buffer_before.state_tensors()
            save_checkpoint(
                self.recorder.run_dir,
                self.stage,
                self.step,
                {"model": weights, "optimizer": self.optimizer.state_tensors()}
                | ({"buffer": waiting} if waiting else {}),
                {"random": self.random_before, "warned": sorted(self.warned)},
                self.config.keep_checkpoints,
            )
        self.saved_step = self.step

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint of this stage, bit for bit."""
        tensors, state = load_checkpoint(checkpoint)
        load_into(self.policy.trainable_parameters(), tensors["model"], str(checkpoint))
        self.optimizer.load_state_tensors(tensors["optimizer"])
        restore_random_state({"sampling": self.generator}, state["random"])
        self.buffer = Buffer.of_state_tensors(tensors.get("buffer", {}))
        self.warned = set(state["warned"])
        self.step = self.saved_step = state["step"]
