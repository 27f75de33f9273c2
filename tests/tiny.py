"""What the tests of the core share: policies around tiny models, toy tasks, a recorder of lists."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import build_model, build_tokenizer

from data import Example, Task
from grpo.config import Config
from grpo.generate import generate
from grpo.optimizer import build_optimizer
from grpo.policy import Policy
from grpo.sampling import Sampling
from grpo.training import Training

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def policy_of(model, stop=(2,), tokenizer=None, **more) -> Policy:
    """A policy around a model as it is, in train() mode as load_policy leaves it."""
    model.config.use_cache = False
    return Policy(
        model=model.train(),
        tokenizer=tokenizer,
        stop_token_ids=sorted(stop),
        device=torch.device("cpu"),
        dtype=next(model.parameters()).dtype,
        **more,
    )


def tiny_policy(kind="llama", stop=(2,), dtype=torch.float32, seed=0, **changes) -> Policy:
    """build_model with this project's attention and a tokenizer of letters."""
    model = build_model(kind, attention="grpo", seed=seed, **changes).to(dtype)
    return policy_of(model, stop, build_tokenizer(chat_template=TEMPLATE))


def ragged_prompts(count, seed=0, low=1, high=9) -> list[list[int]]:
    """Prompts of low .. high tokens over the ids 3 .. 31."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, 32, (n,), generator=generator).tolist() for n in lengths]


def plain_logprobs(policy, prompt, completion, temperature=1.0) -> torch.Tensor:
    """[C] by transformers' own forward pass of one row: no layout, no packing, no chunks."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = policy.model(ids).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(completion)), torch.tensor(completion)]


def draw(
    policy, prompts, group=1, length=8, temperature=1.0, seed=0, max_rows=64, pace=None, **sampling
):
    """generate(...) in one line."""
    return generate(
        policy,
        prompts,
        group,
        length,
        Sampling(temperature, **sampling),
        torch.Generator().manual_seed(seed),
        max_rows,
        pace=pace,
    )


def one_token_probability(policy, prompt, token) -> float:
    with torch.no_grad():
        return policy.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)[token].item()


def tokens_of(groups) -> list[list[list[int]]]:
    return [[c.token_ids for c in group] for group in groups]


# ---- tasks ---------------------------------------------------------------------------------------


def letters_task(reward, prompts=("a", "bc", "d"), **changes) -> Task:
    """Prompts of letters and one reward, reward(text) -> number or None."""
    examples = [Example([{"role": "user", "content": p}], target=p * 2, answer=p) for p in prompts]
    task = Task(
        name="letters",
        train=examples,
        sft=examples,
        evaluation=examples,
        reward_functions={"letters": lambda text, example: reward(text)},
        is_correct=lambda text, example: text.startswith(example.answer),
    )
    return replace(task, **changes)


def share_of(letter):
    """A reward: what part of the text is this letter."""
    return lambda text: text.count(letter) / max(len(text), 1)


# ---- training ------------------------------------------------------------------------------------


class ListRecorder:
    """Keeps what a run reports in lists."""

    def __init__(self, run_dir):
        self.run_dir = Path(run_dir)
        self.lines: list[dict] = []
        self.kept: list[tuple[str, int, list[dict]]] = []
        self.said: list[str] = []

    def metrics(self, stage, step, values):
        self.lines.append({"stage": stage, "step": step, **values})

    def completions(self, stage, step, rows):
        self.kept.append((stage, step, list(rows)))

    @contextmanager
    def progress(self, stage, total, initial=0):
        yield SimpleNamespace(step=lambda metrics: None, say=self.said.append)


def settings(**changes) -> Config:
    """A GRPO step of 3 prompts x 4 completions of up to 5 tokens, at a rate that shows."""
    small = {
        "prompts_per_step": 3,
        "num_generations": 4,
        "max_prompt_length": 16,
        "max_completion_length": 5,
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
        "warmup_ratio": 0.0,
        "max_steps": 1,
        "sft_steps": 1,
        "sft_batch_size": 3,
        "sft_learning_rate": 1e-2,
        "sft_lr_scheduler": "constant",
        "checkpoint_every": 0,
        "completions_every": 0,
        "rollout_rows": 8,
        "reward_timeout": 0.0,
        "seed": 0,
    }
    return Config(**{**small, **changes})


def training_of(policy, config, stage="grpo", run_dir=None) -> Training:
    """A stage's training around a recorder of lists; without run_dir it saves nothing."""
    run = Training(
        stage=stage,
        policy=policy,
        optimizer=build_optimizer(
            policy.trainable_parameters(),
            kind=config.optimizer,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        ),
        recorder=ListRecorder(run_dir or "nowhere"),
        config=config,
        total_steps=config.max_steps if stage == "grpo" else config.sft_steps,
        stop=SimpleNamespace(requested=False),
        generator=torch.Generator().manual_seed(config.seed),
    )
    if run_dir is None:
        run.save = lambda: None
    return run


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def gradients_of(policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.trainable_parameters().items()}
