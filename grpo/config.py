"""Every knob once: its name, its default, its help. The command line is made from this file.

A setting takes its value from the strongest of: an explicit flag, the task's DEFAULTS, those of
FROM_SCRATCH if the model is made from scratch, the preset, the default below. The task has DEFAULTS
for a model made from scratch, whatever the machine, and for a pretrained one on each preset. With
--resume, the saved run's config.json stands in for all but the flags. No torch in here, so that
--help answers at once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import data
from grpo.errors import UserError
from grpo.flags import (
    FlagParser,
    add_flags,
    both_spellings,
    checked,
    option,
    show,
    unknown_flag,
    with_dashes,
)
from grpo.impossible import parse_weights, refuse_flags, refuse_impossible
from grpo.scratch import SCRATCH, made_from_scratch

# A task's Options: a dataclass of its own flags. Only the task's module knows its fields.
Options = Any


@dataclass
class Config:
    """All settings that do not belong to one task. Flat: `config.beta` is `--beta`."""

    # fmt: off
    task: str = option("maze", "what to learn: a file in data/", section="run")
    stage: str = option("all", "which part to run; all = eval, sft, eval, grpo, eval; "
                        "collect = keep the policy's right answers as SFT data",
                        choices=("sft", "grpo", "eval", "collect", "all"))
    preset: str = option("cpu", "settings that suit a laptop, 24 GB (a10) or 48 GB (a6000)",
                         choices=("cpu", "a10", "a6000"))
    output_dir: str | None = option(None, "the run's folder; none = runs/<task>-<date>-<time>")
    resume: str | None = option(None, "go on with the run in this folder, or from one of its "
                                "checkpoints; its saved settings hold unless a flag is given")
    dry_run: bool = option(False, "print settings, tokens a step and memory; train nothing")
    seed: int = option(42, "seed of the data order, the sampling and fresh weights", at_least=0)
    device: str = option("auto", "where to compute; auto = cuda if there is one",
                         choices=("auto", "cpu", "cuda"))
    threads: int = option(0, "CPU threads; 0 = one a physical core", at_least=0)
    checkpoint_every: int = option(100, "steps between checkpoints; 0 = only at the end of a stage",
                                   at_least=0)
    keep_checkpoints: int = option(2, "how many checkpoints of a stage to keep", at_least=1)
    completions_every: int = option(20, "steps between saved samples of completions; 0 = never",
                                    at_least=0)

    model: str = option("Qwen/Qwen2.5-0.5B-Instruct",
                        "a model directory, a hub name, or scratch = a fresh small model",
                        section="model")
    adapter: str | None = option(None, "a trained LoRA adapter to start from; also the reference")
    dtype: str = option("auto", "of the weights; auto = float32 on cpu, bfloat16 on cuda and "
                        "for a large frozen base on a cpu that multiplies it",
                        choices=("auto", "float32", "bfloat16"))
    quantize: str = option("none", "hold the frozen base weights in 4 bits",
                           choices=("none", "nf4"))
    trust_remote_code: bool = option(False, "let a hub model run its own code")
    prompt_format: str = option("chat", "chat = the tokenizer's template, plain = the bare text",
                                choices=("chat", "plain"))
    add_tokens: bool = option(False, "add the task's tokens to a pretrained tokenizer")
    scratch_hidden_size: int = option(192, "width of a fresh model", positive=True)
    scratch_layers: int = option(6, "layers of a fresh model", positive=True)
    scratch_heads: int = option(6, "attention heads of a fresh model", positive=True)
    lora_rank: int = option(32, "rank of the LoRA adapter; 0 = train all weights", at_least=0)
    lora_alpha: int | None = option(None, "LoRA scale is alpha / rank; none = the rank, scale 1",
                                    positive=True)
    lora_targets: str = option("all-linear", "modules with LoRA: all-linear, or as q_proj,v_proj")

    prompts_per_step: int = option(8, "prompts (groups) in one rollout", positive=True,
                                   section="sampling")
    train_levels: str | None = option(None, "sample only the training prompts of these levels: "
                                      "name,name; a wrong name lists them")
    completions_per_step: int | None = option(None, "another way to say prompts-per-step: "
                                              "prompts x num-generations", positive=True)
    num_generations: int = option(8, "completions a prompt (the group), G", positive=True)
    max_prompt_length: int = option(512, "longest prompt in tokens; a longer one is refused",
                                    positive=True)
    max_completion_length: int = option(512, "longest completion in tokens", positive=True)
    turns: int = option(1, "answers an episode: above 1 the task replies and the policy goes on, "
                        "each answer of max-completion-length at most", positive=True)
    temperature: float = option(1.0, "of sampling; all log-probs are of the scaled logits",
                                at_least=0)
    top_k: int = option(0, "sample among the k likeliest tokens; 0 = all", at_least=0)
    top_p: float = option(1.0, "sample in the smallest set of this probability; 1 = all",
                          positive=True, at_most=1)
    min_p: float = option(0.0, "drop tokens below this fraction of the likeliest one's probability",
                          at_least=0, below=1)
    rollout_rows: int = option(64, "rows decoded together", positive=True)
    reward_weights: str | None = option(None, "weights of the rewards: name=value,name=value")
    reward_timeout: float = option(10.0, "seconds a reward may take a completion; 0 = no limit",
                                   at_least=0)

    filter: str = option("none", "which groups to learn from: none = all; else those of which the "
                         "share at full reward, or the mean accuracy, is within the bounds",
                         choices=("none", "full-reward", "accuracy"), section="filter")
    filter_lower: float = option(0.1, "the lower bound", at_least=0, at_most=1)
    filter_upper: float = option(0.9, "the upper bound", at_least=0, at_most=1)
    filter_patience: int = option(20, "stop when no group was kept for so many steps in a row; "
                                  "0 = never", at_least=0)
    buffer_groups: int = option(0, "learn only when steps have kept so many groups, then from all "
                                "of them; 0 = each step learns from its own", at_least=0)
    buffer_updates: int = option(1, "optimizer steps on a full buffer, each on its own part; "
                                 "num-iterations goes over all parts again", positive=True)

    loss_type: str = option("dapo", "how token losses are averaged",
                            choices=("grpo", "bnpo", "dr_grpo", "dapo"), section="loss")
    scale_rewards: str = option("group", "whose standard deviation divides the advantages",
                                choices=("group", "batch", "none"))
    beta: float = option(0.0, "weight of the KL to the reference; 0 = none is loaded", at_least=0)
    epsilon: float = option(0.2, "the ratio is clipped to 1 - epsilon", positive=True, below=1)
    epsilon_high: float | None = option(None, "and to 1 + epsilon-high; none = epsilon",
                                        positive=True)
    delta: float | None = option(None, "upper cap of the ratio before the clip; none = no cap",
                                 positive=True)
    importance_sampling_level: str = option("token", "a ratio for each token or for each sequence",
                                            choices=("token", "sequence"))
    num_iterations: int = option(1, "optimizer steps on each rollout, mu", positive=True)
    mask_truncated_completions: bool = option(False, "leave out completions cut by the length")
    kl_on_zero_std_groups: bool = option(False, "keep the KL of groups whose rewards are all equal")

    max_steps: int = option(500, "GRPO steps: rollouts, also those that only fill a buffer",
                            positive=True, section="optimizer")
    learning_rate: float = option(1e-6, "peak learning rate of GRPO", positive=True)
    lr_scheduler: str = option("cosine", "after the warm-up",
                               choices=("cosine", "linear", "constant"))
    warmup_ratio: float = option(0.1, "part of the steps with a rising rate", at_least=0, at_most=1)
    optimizer: str = option("adamw", "8-bit states take a quarter of the memory; paged ones "
                            "may move from the GPU to the host (on a CPU the same as 8-bit)",
                            choices=("adamw", "adamw_8bit", "paged_adamw_8bit"))
    adam_beta1: float = option(0.9, "AdamW's decay of the gradient's mean", at_least=0, below=1)
    adam_beta2: float = option(0.99, "and of its mean square", at_least=0, below=1)
    weight_decay: float = option(0.0, "decoupled weight decay", at_least=0)
    max_grad_norm: float = option(1.0, "clip the gradient to this norm; 0 = never", at_least=0)
    tokens_per_micro_batch: int = option(8192, "tokens in one backward pass; only memory and "
                                         "speed depend on it", positive=True)
    gradient_checkpointing: bool = option(False, "compute activations twice to hold fewer")

    sft_steps: int = option(500, "steps of the supervised cold start; 0 = none", at_least=0,
                            section="SFT")
    sft_batch_size: int = option(32, "examples a step", positive=True)
    sft_learning_rate: float = option(1e-5, "peak learning rate of SFT", positive=True)
    sft_lr_scheduler: str = option("cosine", "after the warm-up of SFT; constant leaves the "
                                   "cooling down to GRPO", choices=("cosine", "linear", "constant"))

    sft_data: str | None = option(None, 'learn from this JSONL file, {"prompt": text or chat, '
                                  '"completion": text} a line, instead of the task\'s examples')

    collect_prompts: int = option(1000, "training prompts to sample; 0 = all", at_least=0,
                                  section="collecting")
    collect_keep: str = option("shortest", "which of a prompt's right completions to keep",
                               choices=("shortest", "first"))

    eval_examples: int = option(200, "held-out examples; 0 = no evaluation", at_least=0,
                                section="evaluation")
    eval_samples: int = option(1, "1 = greedy only; k > 1 adds k samples each and pass@k",
                               positive=True)
    eval_every: int = option(0, "GRPO steps between evaluations; 0 = before and after only",
                             at_least=0)
    # fmt: on

    @property
    def max_episode_length(self) -> int:
        """The policy's own tokens in all turns of an episode, at most."""
        return self.turns * self.max_completion_length

    def weights_of_rewards(self) -> dict[str, float]:
        """--reward-weights "correctness=2,format=0.5" as a dict; empty where it is not given."""
        return parse_weights(self.reward_weights)


# What fits the machine. What fits the task (steps, lengths, learning rates) is the task's DEFAULTS.
PRESETS: dict[str, dict[str, Any]] = {
    # The rows and tokens are for a pretrained model given as --model, in 16 GB.
    "cpu": {
        "model": SCRATCH,
        "rollout_rows": 16,
        "tokens_per_micro_batch": 1280,
    },
    # 24 GB: 1 GB of weights, an fp32 adapter, and most of the rest for the cache and activations.
    "a10": {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "rollout_rows": 64,
        "tokens_per_micro_batch": 8192,
        "gradient_checkpointing": True,
    },
    # 48 GB: three times the weights, and twice the rows and tokens at a time.
    "a6000": {
        "model": "Qwen/Qwen2.5-1.5B-Instruct",
        "rollout_rows": 128,
        "tokens_per_micro_batch": 16384,
        "gradient_checkpointing": True,
    },
}

# Over the preset: a few million weights, for which LoRA and small batches would save nothing.
FROM_SCRATCH: dict[str, Any] = {
    "lora_rank": 0,
    "rollout_rows": 256,
    "tokens_per_micro_batch": 8192,
    "gradient_checkpointing": False,
}

# These say where, how much to print and what to keep; another value trains the same policy.
NOT_TRAINING = {
    "resume", "output_dir", "dry_run", "stage", "preset", "threads", "checkpoint_every",
    "keep_checkpoints", "completions_every", "completions_per_step", "collect_prompts",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> tuple[Config, Options, set[str]]:
    """The settings of one run, from the arguments after the program's name.

    Returns the config, the task's Options and the names of the settings that came as flags.
    Raises UserError, one line, for whatever is misspelt, out of range or impossible together.
    `--help` prints and exits with 0.
    """
    argv = [with_dashes(word) for word in argv]
    # These four decide which other flags there are, and their defaults.
    first = FlagParser(add_help=False)
    add_flags(first, Config, "", {})
    given = vars(first.parse_known_args(argv)[0])
    decisive = ("task", "preset", "model", "resume")
    chosen = {n: checked(Config, n, given[n]) for n in decisive if n in given}
    base, options_class = _base(chosen)

    task = base["task"]
    parser = FlagParser(
        prog="train.py",
        usage="python train.py [--task NAME] [--preset NAME] [--setting VALUE ...]",
        description="Train a language model by GRPO: a supervised start, GRPO, evaluations.",
        epilog=f"In brackets: the value for --task {task} --preset {base['preset']} --model "
        f"{base['model']}. The tasks ({', '.join(data.task_names())}) have flags of their own; see "
        "--task NAME --help.",
    )
    add_flags(parser, Config, "", base)
    add_flags(parser, options_class, f"the {task} task", base)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(_unknown(unknown[0], task, options_class))
    flags = {n: checked(_owner(n, options_class), n, v) for n, v in vars(namespace).items()}
    config, options = _build({**base, **flags}, options_class)
    validate(config)
    refuse_flags(config, set(flags))
    if config.completions_per_step is not None:
        # From here on there is one way to say it.
        config.prompts_per_step = config.completions_per_step // config.num_generations
        config.completions_per_step = None
    if config.output_dir is None:
        config.output_dir = f"runs/{task}-{datetime.now():%Y%m%d-%H%M%S}"
    return *resolved(config, options), set(flags)


def resolved(config: Config, options: Options) -> tuple[Config, Options]:
    """With what the task's flags leave open decided by the task."""
    module = data.task_module(config.task)
    if hasattr(module, "resolve"):
        options = module.resolve(options, made_from_scratch(config.model))
    return config, options


def _base(chosen: dict[str, Any]) -> tuple[dict[str, Any], type]:
    """What holds where no flag is given, and the task's Options class."""
    if chosen.get("resume"):
        config, options = _saved_run(chosen["resume"])
        for name in ("task", "preset"):
            saved = getattr(config, name)
            if chosen.get(name, saved) != saved:
                raise UserError(f"--{name} {chosen[name]}: the run to resume has {saved}")
        base = {**asdict(config), **asdict(options)}
        return {n: v for n, v in base.items() if n not in ("resume", "dry_run")}, type(options)
    task, preset = chosen.get("task", Config.task), chosen.get("preset", Config.preset)
    usual = PRESETS[preset] | _task_defaults(task, preset)
    model = chosen.get("model", usual["model"])
    base: dict[str, Any] = {}
    for values in _layers(task, preset, model).values():
        base |= values
    base |= {"task": task, "preset": preset, "model": model}
    return base, data.task_module(task).Options


def _layers(task: str, preset: str, model: str) -> dict[str, dict[str, Any]]:
    """The settings over the dataclasses' defaults, by where they come from, the weakest first."""
    scratch = made_from_scratch(model)
    return {
        f"preset {preset}": PRESETS[preset],
        "from scratch": FROM_SCRATCH if scratch else {},
        f"task {task}": _task_defaults(task, SCRATCH if scratch else preset),
    }


def _task_defaults(task: str, kind: str) -> dict[str, Any]:
    """A task's DEFAULTS for a preset, or for "scratch"."""
    module = data.task_module(task)
    values = getattr(module, "DEFAULTS", {}).get(kind, {})
    for name in values:
        if _owner(name, module.Options) is None:
            raise UserError(f"data/{task}.py: DEFAULTS[{kind!r}] names no setting: {name}")
    return values


def _saved_run(resume: str) -> tuple[Config, Options]:
    """The settings saved in the run that --resume names, itself or by one of its checkpoints."""
    folder = Path(resume)
    for run in (folder, folder.absolute().parent.parent):
        path = run / "config.json"
        if path.is_file():
            config, options = from_json(path.read_text("utf-8", "replace"), str(path))
            config.output_dir = str(run)
            return config, options
    what = "it has no config.json" if folder.is_dir() else "there is no such folder"
    raise UserError(f"--resume {resume}: {what}; give the folder of a run, such as runs/maze-1")


def _owner(name: str, options_class: type) -> type | None:
    """The dataclass that has this setting, Config or the task's."""
    owners = (Config, options_class)
    return next((o for o in owners if any(f.name == name for f in fields(o))), None)


def _build(values: dict[str, Any], options_class: type) -> tuple[Config, Options]:
    mine = {n: v for n, v in values.items() if _owner(n, options_class) is Config}
    theirs = {n: v for n, v in values.items() if n not in mine}
    return Config(**mine), options_class(**theirs)


def _unknown(word: str, task: str, options_class: type) -> str:
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    for other in data.task_names():
        if any(f.name == name for f in fields(data.task_module(other).Options)):
            return f"{both_spellings(name)} belongs to --task {other}; this is --task {task}"
    return unknown_flag(word, [f.name for o in (Config, options_class) for f in fields(o)])


def validate(config: Config) -> None:
    """Raise UserError for the first value out of range or combination that cannot work."""
    for f in fields(config):
        checked(Config, f.name, getattr(config, f.name))
    refuse_impossible(config)


# ---------------------------------------------------------------------------------------------
# The settings on paper: config.json, --dry-run, and what changed since


def to_json(config: Config, options: Options) -> str:
    """config.json: all settings, the task's own under "options".

    That this start was a resume or a dry run is no setting of the run: it is left out, so that
    resuming changes nothing on the disk by itself.
    """
    values = {**asdict(config), "resume": None, "dry_run": False, "options": asdict(options)}
    return json.dumps(values, indent=2) + "\n"


def from_json(text: str, source: str = "config.json") -> tuple[Config, Options]:
    """The inverse of to_json. A setting that the text lacks has its default.

    Raises UserError, naming source, for text that is no JSON object of known, valid settings.
    Whether they work together is for `validate` to say, once the flags are known too.
    """
    try:
        saved = json.loads(text)
        values = {**saved.pop("options", {}), **saved}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{source}: this is not the JSON of a run's settings; restore the file to resume"
        ) from None
    options_class = data.task_module(values.get("task", Config.task)).Options
    names = [f.name for o in (Config, options_class) for f in fields(o)]
    for name, value in values.items():
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UserError(f"{source}: there is no setting {name}{hint}")
        try:
            values[name] = checked(_owner(name, options_class), name, value)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
    return _build(values, options_class)


def changed_settings(saved: tuple[Config, Options], now: tuple[Config, Options]) -> list[str]:
    """A line for each setting that would train another policy: "num_generations was 4, is now 8".

    Each argument is (config, options).
    """
    before, after = ({**asdict(c), **asdict(o)} for c, o in (saved, now))
    return [
        f"{name} was {show(before.get(name))}, is now {show(value)}"
        for name, value in after.items()
        if name not in NOT_TRAINING and before.get(name) != value
    ]


def describe(config: Config, options: Options, explicit: set[str]) -> str:
    """A table for --dry-run: setting, value, and where the value came from.

    "derived": decided from other settings or by the machine, where the default leaves it open.
    """
    defaults = {f.name: f.default for owner in (config, options) for f in fields(owner)}
    origins = dict.fromkeys(defaults, "default")
    for origin, values in _layers(config.task, config.preset, config.model).items():
        origins |= dict.fromkeys(values, origin)
    if config.resume:
        origins = dict.fromkeys(defaults, "saved run")
    origins |= dict.fromkeys(explicit, "flag")
    if "completions_per_step" in explicit:
        origins["prompts_per_step"] = "flag"
    rows = []
    for name, value in {**asdict(config), **asdict(options)}.items():
        if name == "completions_per_step":
            continue  # parse has turned it into prompts_per_step
        origin = origins[name]
        if origin == "default" and value != defaults[name]:
            origin = "derived"
        rows.append((name, show(value), origin))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"{n:<{widths[0]}}  {v:<{widths[1]}}  {o}" for n, v, o in rows)
