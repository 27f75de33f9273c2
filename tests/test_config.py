"""The settings: what a mistake on the command line gets as an answer."""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest

import data
from grpo.config import (
    FROM_SCRATCH,
    NOT_TRAINING,
    PRESETS,
    Config,
    changed_settings,
    describe,
    from_json,
    option,
    parse,
    to_json,
    validate,
)
from grpo.errors import UserError
from grpo.scratch import SCRATCH_TEMPLATE


@dataclass
class ToyOptions:
    toy_size: int = option(5, "side of the toy; 100% plastic", positive=True)
    toy_shape: str = option("auto", "of the toy", choices=("auto", "ball", "cube"))
    toy_colour: str = option("red", "of the toy", choices=("red", "blue"))


@dataclass
class OtherOptions:
    other_path: str | None = option(None, "of the other task")


def resolve(options, from_scratch):
    shape = "ball" if from_scratch else "cube"
    return replace(options, toy_shape=shape) if options.toy_shape == "auto" else options


@pytest.fixture(autouse=True)
def two_tasks(monkeypatch):
    """Tasks of this test's own: it must not depend on what data/ holds."""
    modules = {
        "toy": SimpleNamespace(
            Options=ToyOptions,
            DEFAULTS={
                "scratch": {"learning_rate": 3e-4, "toy_size": 3, "rollout_rows": 24},
                "cpu": {"learning_rate": 2e-5},
                "a10": {"learning_rate": 1e-5, "model": "toys/toy-1b"},
            },
            resolve=resolve,
        ),
        "other": SimpleNamespace(Options=OtherOptions),
    }
    monkeypatch.setattr(data, "task_names", lambda: sorted(modules))
    monkeypatch.setattr(data, "task_module", lambda name: modules[name])
    monkeypatch.setattr(Config, "task", "toy")


def refused(*argv):
    """The one-line message with which these flags are refused."""
    with pytest.raises(UserError) as caught:
        parse(list(argv))
    message = str(caught.value)
    assert "\n" not in message
    return message


def saved_run(folder, *argv):
    """A run directory with the config.json of these flags."""
    config, options, _ = parse([*argv, "--output-dir", str(folder)])
    folder.mkdir()
    (folder / "config.json").write_text(to_json(config, options))
    return config, options


# -- where a value comes from -------------------------------------------------------------------


def test_a_flag_beats_the_task_which_beats_the_preset_which_beats_the_default():
    config, options, explicit = parse(["--toy-size", "4", "--beta", "0.1"])
    assert (config.beta, options.toy_size) == (0.1, 4)  # flags
    assert config.learning_rate == 3e-4 and config.rollout_rows == 24  # the task, over the preset
    assert config.lora_rank == 0 == FROM_SCRATCH["lora_rank"]
    assert config.tokens_per_micro_batch == FROM_SCRATCH["tokens_per_micro_batch"]
    assert config.temperature == 1.0
    assert explicit == {"toy_size", "beta"}
    config, _, explicit = parse(["--preset", "a10"])
    assert config.rollout_rows == PRESETS["a10"]["rollout_rows"]
    assert (config.model, config.learning_rate) == ("toys/toy-1b", 1e-5)  # the task's, on an a10
    assert explicit == {"preset"}


def test_a_pretrained_model_on_a_cpu_gets_none_of_the_scratch_model_s_settings():
    """It once did: full fine-tuning of half a billion weights at a hundred times their rate."""
    config, options, _ = parse(["--model", "some/model"])
    assert (config.learning_rate, config.lora_rank) == (2e-5, Config.lora_rank)
    assert config.rollout_rows == PRESETS["cpu"]["rollout_rows"] < FROM_SCRATCH["rollout_rows"]
    assert (options.toy_size, options.toy_shape) == (5, "cube")


def test_a_model_from_scratch_has_its_settings_on_any_machine(tmp_path):
    for preset in PRESETS:
        config, options, _ = parse(["--preset", preset, "--model", "scratch"])
        assert (config.learning_rate, config.lora_rank, options.toy_shape) == (3e-4, 0, "ball")
        assert not config.gradient_checkpointing
    # An export of one is one too: --stage eval and further training of it.
    (tmp_path / "chat_template.jinja").write_text(SCRATCH_TEMPLATE)
    config, options, _ = parse(["--stage", "eval", "--model", str(tmp_path)])
    assert (config.lora_rank, config.rollout_rows, options.toy_shape) == (0, 24, "ball")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff another one")
    assert parse(["--model", str(tmp_path)])[1].toy_shape == "cube"


def test_a_task_decides_what_its_flags_leave_open():
    assert parse([])[1].toy_shape == "ball"
    assert parse(["--toy-shape", "cube"])[1].toy_shape == "cube"
    assert '"toy_shape": "ball"' in to_json(*parse([])[:2])


def test_a_flag_equal_to_the_default_still_counts_as_given():
    config, _, explicit = parse(["--learning-rate", "1e-6"])
    assert config.learning_rate == 1e-6 and explicit == {"learning_rate"}


def test_underscores_equals_signs_none_and_switches_are_understood():
    config, options, _ = parse(
        ["--learning_rate=2e-5", "--epsilon_high", "none", "--no-dry-run", "--toy_colour=blue",
         "--mask_truncated_completions", "--output-dir", "my_run"]
    )  # fmt: skip
    assert config.learning_rate == 2e-5 and config.epsilon_high is None
    assert config.mask_truncated_completions and not config.dry_run
    assert options.toy_colour == "blue" and config.output_dir == "my_run"


def test_the_run_gets_a_folder_of_its_own():
    assert parse([])[0].output_dir.startswith("runs/toy-2")


def test_completions_per_step_is_another_way_to_say_prompts_per_step():
    config, _, _ = parse(["--completions-per-step", "12", "--num-generations", "4"])
    assert (config.prompts_per_step, config.completions_per_step) == (3, None)


def test_every_setting_has_help_and_the_presets_name_settings():
    assert all(len(f.metadata["help"]) > 5 for f in fields(Config))
    names = {f.name for f in fields(Config)}
    assert names >= NOT_TRAINING
    for values in (*PRESETS.values(), FROM_SCRATCH):
        assert set(values) <= names
    assert all("model" in preset for preset in PRESETS.values())


def test_help_shows_all_flags_in_sections_with_the_task_s_own(capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    for f in (*fields(Config), *fields(ToyOptions)):
        assert "--" + f.name.replace("_", "-") in text
    for section in ("run:", "model:", "sampling:", "loss:", "optimizer:", "SFT:", "evaluation:",
                    "the toy task:"):  # fmt: skip
        assert f"\n{section}\n" in text
    assert "[0.0003]" in text  # the task's learning rate, not the general default
    with pytest.raises(SystemExit):
        parse(["--model", "some/model", "--help"])
    text = capsys.readouterr().out
    assert "[2e-05]" in text and "[some/model]" in text and "[0.0003]" not in text


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "mentions"),
    [
        # settings/misspelt, settings/text-for-a-number, settings/group-of-one,
        # settings/batch-not-divisible of the robustness cases
        (["--learning_rte", "1e-5"], ["learning_rte", "learning_rate"]),
        (["--max-steps", "ten"], ["max_steps", "ten", "whole number"]),
        (["--num-generations", "1"], ["group", "2"]),
        (["--completions-per-step", "6", "--num-generations", "4"], ["6", "4"]),
        # near misses
        (["--max-step", "3"], ["--max-step", "--max-steps"]),  # no silent abbreviation
        (["--toy-sise", "3"], ["--toy-size"]),
        (["--loss-type", "daop"], ["daop", "grpo, bnpo, dr_grpo, dapo", "did you mean dapo"]),
        (["--preset", "a60000"], ["a6000"]),
        (["--other-path", "x"], ["--task other"]),
        (["--other_path", "x"], ["other_path"]),
        (["learning_rate=3"], ["learning_rate=3", "--name value"]),
        (["--max-steps"], ["--max-steps", "value"]),
        (["--dry-run=yes"], ["--dry-run", "no value"]),
        # ranges
        (["--max-steps", "2.5"], ["2.5", "whole number"]),
        (["--learning-rate", "nan"], ["nan"]),
        (["--learning-rate", "inf"], ["inf"]),
        (["--learning-rate", "0"], ["above 0"]),
        (["--top-p", "1.5"], ["at most 1"]),
        (["--min-p", "1"], ["below 1"]),
        (["--adam-beta2", "1"], ["below 1"]),
        (["--beta", "-1"], ["at least 0"]),
        (["--toy-size", "0"], ["toy_size", "above 0"]),
        (["--reward-weights", "a=1,b=x"], ["b=x", "name=number"]),
        (["--reward-weights", "a=nan"], ["a=nan"]),
    ],
)
def test_a_wrong_flag_or_value_is_named_with_what_would_be_right(argv, mentions):
    message = refused(*argv)
    for text in mentions:
        assert text in message


@pytest.mark.parametrize(
    ("argv", "mentions"),
    [
        ("--adapter a --model m --lora-rank 0", "--lora-rank"),
        ("--adapter a --lora-rank 8", "--model"),  # of a fresh model
        ("--quantize nf4 --model m --lora-rank 0", "--lora-rank"),
        ("--quantize nf4 --lora-rank 8", "scratch"),
        ("--add-tokens", "scratch"),
        ("--stage eval", "untrained"),
        ("--stage sft --sft-steps 0", "no step"),
        ("--scratch-heads 5", "width"),
        ("--scratch-hidden-size 20 --scratch-heads 3", "use 18"),
        ("--scratch-hidden-size 6 --scratch-heads 2", "even width; use 8"),
        ("--temperature 0", "equal"),
        ("--top-k 1", "equal"),
        ("--stage eval --model m --eval-samples 4 --temperature 0", "equal"),
        ("--delta 1.2", "1.2"),
        ("--delta 1.25 --epsilon-high 0.28", "1.28"),
        ("--kl-on-zero-std-groups", "--beta"),
        ("--completions-per-step 8 --num-generations 4 --prompts-per-step 3", "2 prompts"),
        # given by hand, and without effect
        ("--scratch-layers 3 --model m", "this is m"),
        ("--lora-alpha 8", "--lora-rank 0"),  # of a fresh model
        ("--lora-targets q_proj --model m --lora-rank 0", "--lora-rank 0"),
        ("--filter-lower 0.2", "bound of --filter"),
        ("--filter-upper 0.5 --filter none", "bound of --filter"),
        ("--collect-keep first", "--stage collect"),
        ("--sft-data f --stage grpo", "no SFT"),
        ("--train-levels easy --stage sft", "no training prompts"),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_the_reason(argv, mentions):
    assert mentions in refused(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--adapter a --model m",
        "--quantize nf4 --model m --add-tokens",
        "--stage sft --temperature 0",  # nothing is sampled
        "--stage eval --model m",
        "--delta 1.5 --epsilon-high 0.28",
        "--kl-on-zero-std-groups --beta 0.04",
        "--completions-per-step 8 --num-generations 4 --prompts-per-step 2",
        "--lora-alpha 8 --model m",
        "--filter-lower 0.2 --filter accuracy",
        "--sft-data f --stage sft",
    ],
)
def test_the_same_combinations_are_allowed_where_they_can_work(argv):
    parse(argv.split())


def test_the_flags_of_a_fresh_model_may_stay_where_its_export_goes_on(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(SCRATCH_TEMPLATE, newline="")
    parse(["--scratch-layers", "3", "--model", str(tmp_path)])


def test_a_config_made_in_python_is_checked_too():
    with pytest.raises(UserError, match="group"):
        validate(Config(num_generations=1))
    with pytest.raises(UserError, match="max_steps"):
        validate(Config(max_steps="ten"))


def test_reward_weights_are_read():
    config, _, _ = parse(["--reward-weights", "correctness=2, soft format=0.5"])
    assert config.weights_of_rewards() == {"correctness": 2.0, "soft format": 0.5}
    assert parse([])[0].weights_of_rewards() == {}


# -- config.json, --resume, --dry-run -----------------------------------------------------------


def test_config_json_gives_back_the_same_settings():
    config, options, _ = parse(["--delta", "3", "--mask-truncated-completions", "--toy-size", "9"])
    assert from_json(to_json(config, options)) == (config, options)


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("", "restore"),
        ("[1]", "restore"),
        ('{"beta": "much"}', "much"),
        ('{"max_steps": true}', "max_steps"),
        ('{"seed": null}', "seed"),
        ('{"bata": 1}', "beta"),
    ],
)
def test_a_damaged_config_json_is_named(text, mentions):
    with pytest.raises(UserError, match=r"config\.json") as caught:
        from_json(text)
    assert mentions in str(caught.value)


def test_resume_takes_the_saved_settings_and_flags_change_them(tmp_path):
    before = saved_run(tmp_path / "a", "--num-generations", "4", "--learning-rate", "1e-5",
                       "--max-steps", "7")  # fmt: skip
    run = str(tmp_path / "a")
    config, options, _ = parse(["--resume", run])
    assert options.toy_shape == "ball"
    assert (config.num_generations, config.max_steps, config.output_dir) == (4, 7, run)
    assert changed_settings(before, (config, options)) == []
    # checkpoint/other-settings: names and both values
    config, options, _ = parse(
        ["--resume", run, "--num-generations", "8", "--learning-rate", "5e-5", "--toy-size", "4"]
    )
    assert changed_settings(before, (config, options)) == [
        "num_generations was 4, is now 8",
        "learning_rate was 1e-05, is now 5e-05",
        "toy_size was 3, is now 4",
    ]


def test_a_resumed_run_can_be_evaluated_and_resumed_again(tmp_path):
    """--stage eval of a fresh model is refused, but not of a run that has trained it."""
    saved_run(tmp_path / "a")
    for _ in range(2):
        config, options, _ = parse(["--resume", str(tmp_path / "a"), "--stage", "eval"])
        text = to_json(config, options)
        (tmp_path / "a" / "config.json").write_text(text)
        assert '"resume": null' in text


def test_resume_accepts_one_of_the_run_s_checkpoints(tmp_path):
    saved_run(tmp_path / "a", "--max-steps", "7")
    checkpoint = tmp_path / "a" / "checkpoints" / "grpo-step-000002"
    config, _, _ = parse(["--resume", str(checkpoint)])
    assert (config.max_steps, config.output_dir) == (7, str(tmp_path / "a"))


def test_resume_refuses_what_it_cannot_go_on_with(tmp_path):
    saved_run(tmp_path / "a")
    run = str(tmp_path / "a")
    assert "no such folder" in refused("--resume", str(tmp_path / "b"))
    assert "config.json" in refused("--resume", str(tmp_path))
    assert "toy" in refused("--resume", run, "--task", "other")
    assert "cpu" in refused("--resume", run, "--preset", "a10")
    assert "own folder" in refused("--resume", run, "--output-dir", "elsewhere")


def test_dry_run_says_where_each_value_comes_from():
    rows = {
        line.split()[0]: line.split()[1:]
        for line in describe(*parse(["--beta", "0.1", "--completions-per-step", "16"])).splitlines()
    }
    assert rows["beta"] == ["0.1", "flag"]
    assert rows["prompts_per_step"] == ["2", "flag"]
    assert rows["model"] == ["scratch", "preset", "cpu"]
    assert rows["learning_rate"] == ["0.0003", "task", "toy"]
    assert rows["lora_rank"] == ["0", "from", "scratch"]
    assert rows["epsilon_high"] == ["none", "default"]
    assert rows["toy_size"] == ["3", "task", "toy"]
    assert rows["toy_shape"] == ["ball", "derived"]
    assert len(rows) == len(fields(Config)) + len(fields(ToyOptions)) - 1
