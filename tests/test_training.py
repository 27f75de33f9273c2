"""What SFT and GRPO share: going on bit for bit, and stopping before anything bad is trained on."""

import pytest
import torch
from conftest import build_config, build_tokenizer
from tiny import TEMPLATE, letters_task, settings, share_of, training_of, weights_of

import grpo.loop
import grpo.sft
from grpo.checkpoint import find_checkpoint, folder_position
from grpo.errors import UserError
from grpo.policy import Policy, load_policy
from grpo.training import step_indices

STAGES = {"grpo": grpo.loop.train, "sft": grpo.sft.train}
TIMES = ("step_time", "tokens_per_second/rollout", "tokens_per_second/train")


@pytest.fixture
def base(saved_model):
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    return saved_model("qwen2", tokenizer, initializer_range=0.1)


def fresh(base, run_dir, config, stage="grpo", **policy_settings):
    """A policy and its training, as a new process would make them; restored if there is something
    to restore."""
    policy = load_policy(build_config(model=base, beta=config.beta, **policy_settings))
    run = training_of(policy, config, stage, run_dir)
    checkpoint = find_checkpoint(run_dir)[0] if (run_dir / "checkpoints").is_dir() else None
    if checkpoint:
        run.restore(checkpoint)
    return run


def go(run, task, until=None):
    """Train; the request to stop comes during step `until`."""
    config, finish = run.config, run.finish_step

    def finish_step(metrics):
        finish(metrics)
        run.stop.requested = run.step == until

    run.finish_step = finish_step
    STAGES[run.stage](run.policy, task, config, run)


def state_of(run):
    """Everything that the next step depends on."""
    return {
        **weights_of(run.policy),
        **{f"optimizer/{n}": t for n, t in run.optimizer.state_tensors().items()},
        **{f"buffer/{n}": t for n, t in run.buffer.state_tensors().items()},
        "sampling": run.generator.get_state(),
        "step": torch.tensor(run.step),
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def lines_of(*runs):
    lines = [line for run in runs for line in run.recorder.lines]
    return [{n: v for n, v in line.items() if n not in TIMES} for line in lines]


TASK = letters_task(share_of("e"), ["a", "bc", "d", "ef", "g"])  # 5: epochs end within steps


# ---- resume --------------------------------------------------------------------------------------


# 3 groups a step, all kept: 9 wait after step 3, and step 4 learns from 12.
BUFFER = {
    "filter": "accuracy", "filter_lower": 0.0, "filter_upper": 1.0, "buffer_groups": 12,
    "buffer_updates": 2,
}  # fmt: skip
RUNS = {
    "full": ({}, {}),
    "full with a reference": ({"beta": 0.1}, {}),
    "lora": ({"beta": 0.1, "num_iterations": 2}, {"lora_rank": 4}),
    "buffer": (BUFFER, {}),
    "bfloat16": ({"weight_decay": 0.1}, {"dtype": "bfloat16"}),
    "8 bit": ({"optimizer": "adamw_8bit"}, {"lora_rank": 4}),
    "sft": ({}, {}),
    "sft by lora": ({"sft_lr_scheduler": "cosine", "warmup_ratio": 0.3}, {"lora_rank": 4}),
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_and_resumed_is_the_run_without_a_stop(base, tmp_path, name):
    """3 steps, stop, new objects, 3 steps = 6 steps, to the last bit: weights, optimizer, order of
    the examples, sampling, the numbers in the log. Never step 0 again, never a batch twice."""
    changes, policy_settings = RUNS[name]
    stage = name.split()[0] if name.startswith("sft") else "grpo"
    config = settings(max_steps=6, sft_steps=6, completions_every=1, **changes)

    whole = fresh(base, tmp_path / "whole", config, stage, **policy_settings)
    go(whole, TASK)
    first = fresh(base, tmp_path / "parts", config, stage, **policy_settings)
    start = state_of(first)
    go(first, TASK, until=3)
    assert first.step == 3 and len(first.buffer.groups) == (9 if name == "buffer" else 0)
    second = fresh(base, tmp_path / "parts", config, stage, **policy_settings)
    assert_same(state_of(second), state_of(first))
    go(second, TASK)

    assert_same(state_of(second), state_of(whole))
    assert any(not torch.equal(t, start[n]) for n, t in state_of(whole).items() if n != "step")
    assert lines_of(first, second) == lines_of(whole)
    assert [line["step"] for line in lines_of(first, second)] == [1, 2, 3, 4, 5, 6]
    assert first.recorder.kept + second.recorder.kept == whole.recorder.kept
    names = [find_checkpoint(tmp_path / run)[0].name for run in ("whole", "parts")]
    assert names[0] == names[1] == f"{stage}-step-000006"


def test_a_kill_repeats_the_steps_after_the_last_checkpoint(base, tmp_path):
    config = settings(max_steps=5, checkpoint_every=2)
    whole = fresh(base, tmp_path / "whole", config)
    go(whole, TASK)
    killed = fresh(base, tmp_path / "parts", config)

    def die(metrics, finish=killed.finish_step):
        if killed.step == 3:
            raise KeyboardInterrupt
        finish(metrics)

    killed.finish_step = die
    with pytest.raises(KeyboardInterrupt):
        grpo.loop.train(killed.policy, TASK, config, killed)
    again = fresh(base, tmp_path / "parts", config)
    assert again.step == 2
    go(again, TASK)
    assert_same(state_of(again), state_of(whole))
    assert lines_of(killed)[:2] + lines_of(again) == lines_of(whole)
    assert lines_of(killed)[2] == lines_of(again)[0], "the repeated step is the same step"


def test_resuming_a_finished_stage_does_nothing(base, tmp_path):
    config = settings(max_steps=2)
    run = fresh(base, tmp_path, config)
    go(run, TASK)
    again = fresh(base, tmp_path, config)
    before = state_of(again)
    go(again, TASK)
    assert_same(before, state_of(again))
    assert again.recorder.lines == []


def test_more_steps_go_on_from_the_end(base, tmp_path):
    run = fresh(base, tmp_path, settings(max_steps=2))
    go(run, TASK)
    longer = fresh(base, tmp_path, settings(max_steps=4))
    go(longer, TASK)
    whole = fresh(base, tmp_path / "whole", settings(max_steps=4))
    go(whole, TASK)
    assert_same(state_of(longer), state_of(whole))


def test_a_warning_is_not_said_again_after_a_resume(base, tmp_path):
    task = letters_task(share_of("e"), alarms=lambda batch: ["odd answers"])
    first = fresh(base, tmp_path, settings(max_steps=4))
    go(first, task, until=2)
    second = fresh(base, tmp_path, settings(max_steps=4))
    go(second, task)
    assert len(first.recorder.said) == 1 and second.recorder.said == []


# ---- a stop --------------------------------------------------------------------------------------


def test_a_request_to_stop_finishes_the_step_and_saves(base, tmp_path):
    run = fresh(base, tmp_path, settings(max_steps=5))
    asked = []

    def reward(text):
        if run.step == 1:  # in the middle of the second step
            run.stop.requested = True
            asked.append(text)
        return float(len(text))

    grpo.loop.train(run.policy, letters_task(reward), run.config, run)
    assert asked and run.step == 2 and len(run.recorder.lines) == 2
    assert folder_position(find_checkpoint(tmp_path)[0]) == (1, 2)


def test_a_stop_before_the_first_step_saves_nothing(base, tmp_path):
    run = fresh(base, tmp_path, settings(max_steps=5))
    run.stop.requested = True
    grpo.loop.train(run.policy, TASK, run.config, run)
    assert run.step == 0 and not (tmp_path / "checkpoints").exists()


def test_checkpoints_come_when_they_are_due_and_old_ones_go(base, tmp_path):
    config = settings(max_steps=7, checkpoint_every=2, keep_checkpoints=2)
    go(fresh(base, tmp_path, config), TASK)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["grpo-step-000006", "grpo-step-000007"]


# ---- numbers that are not finite -----------------------------------------------------------------


def spoil_the_loss(run, monkeypatch, step):
    grpo_loss = grpo.loop.grpo_loss

    def spoilt(*args, **kwargs):
        loss, parts = grpo_loss(*args, **kwargs)
        return loss * float("nan") if run.step == step else loss, parts

    monkeypatch.setattr(grpo.loop, "grpo_loss", spoilt)


def spoil_the_gradient(run, monkeypatch, step):
    parameter = list(run.policy.trainable_parameters().values())[-1]
    parameter.register_hook(lambda g: g * float("inf") if run.step == step else g)


def spoil_the_model(run, monkeypatch, step):
    """The copy that the rollout runs, so that the weights that are trained stay whole."""
    folded = Policy.folded

    def spoilt(policy):
        model = folded(policy)
        if run.step == step:
            model.norm.weight = torch.full_like(model.norm.weight, torch.nan)
        return model

    monkeypatch.setattr(Policy, "folded", spoilt)


SPOILT = {
    "loss": (spoil_the_loss, "the loss is nan"),
    "gradient": (spoil_the_gradient, "the gradient norm is (nan|inf)"),
}


def test_a_model_that_answers_nan_is_no_model_without_anything_to_learn(
    base, tmp_path, monkeypatch
):
    """All its rows are alike, no group has a spread: the run went on to its end, saying nothing."""
    run = fresh(base, tmp_path, settings(max_steps=4))
    spoil_the_model(run, monkeypatch, step=2)
    with pytest.raises(UserError, match="not numbers"), run.saved_on_failure():
        grpo.loop.train(run.policy, TASK, run.config, run)
    assert find_checkpoint(tmp_path)[0].name == "grpo-step-000002"


@pytest.mark.parametrize("what", SPOILT)
def test_a_number_that_is_not_finite_is_not_trained_on(base, tmp_path, monkeypatch, what):
    """One NaN gradient makes every weight NaN for good. The step before is kept, and goes on."""
    spoil, words = SPOILT[what]
    config = settings(max_steps=4)
    run = fresh(base, tmp_path / "parts", config)
    spoil(run, monkeypatch, step=2)
    with pytest.raises(UserError, match=f"step 3 of grpo: {words}.*step 2 are saved.*--resume"):
        grpo.loop.train(run.policy, TASK, config, run)
    monkeypatch.undo()
    again = fresh(base, tmp_path / "parts", config)
    assert again.step == 2
    assert_same(weights_of(run.policy), weights_of(again.policy))
    go(again, TASK)
    whole = fresh(base, tmp_path / "whole", config)
    go(whole, TASK)
    assert_same(state_of(again), state_of(whole))


def test_a_step_that_fails_gives_the_groups_it_took_from_the_buffer_back(
    base, tmp_path, monkeypatch
):
    """Saved as the failing step had left it, empty: what four steps had gathered was lost."""
    config = settings(max_steps=6, **BUFFER)
    run = fresh(base, tmp_path / "parts", config)
    spoil_the_loss(run, monkeypatch, step=3)
    with pytest.raises(UserError, match="step 4 of grpo: the loss is nan.*step 3 are saved"):
        grpo.loop.train(run.policy, TASK, config, run)
    monkeypatch.undo()
    again = fresh(base, tmp_path / "parts", config)
    assert len(again.buffer.groups) == 9
    go(again, TASK)
    whole = fresh(base, tmp_path / "whole", config)
    go(whole, TASK)
    assert_same(state_of(again), state_of(whole))


@pytest.mark.parametrize("patience", [2, 0])
def test_an_empty_stretch_ends_with_one_line_and_goes_on_from_its_checkpoint(
    base, tmp_path, patience
):
    """Every answer is wrong, nothing is learned, and the run sampled on to its end for a night."""
    task = letters_task(share_of("e"), is_correct=lambda text, example: False)
    config = settings(max_steps=6, filter="accuracy", filter_patience=patience)
    for step in (2, 4) if patience else ():  # a resumed run is given as many steps again
        run = fresh(base, tmp_path, config)
        with pytest.raises(UserError, match="kept no group for 2 steps") as caught:
            grpo.loop.train(run.policy, task, config, run)
        assert "--filter-lower 0.1" in str(caught.value) and "\n" not in str(caught.value)
        assert find_checkpoint(tmp_path)[0].name == f"grpo-step-{step:06d}"
        assert [line["filter/dropped"] for line in run.recorder.lines] == [3, 3]
    go(run := fresh(base, tmp_path, config), task)
    assert run.step == 6 and run.buffer.barren_steps == 6, "the end is no empty stretch"


def test_a_spoilt_first_step_says_that_nothing_was_trained(base, tmp_path, monkeypatch):
    run = fresh(base, tmp_path, settings())
    spoil_the_loss(run, monkeypatch, step=0)
    before = weights_of(run.policy)
    with pytest.raises(UserError, match="step 1 of grpo.*nothing was trained"):
        grpo.loop.train(run.policy, TASK, run.config, run)
    assert_same(before, weights_of(run.policy))
    assert not (tmp_path / "checkpoints").exists()


def test_a_spoilt_second_update_leaves_the_checkpoint_before_the_step(base, tmp_path, monkeypatch):
    """With num_iterations > 1 the weights have moved already: they are of no whole step."""
    config = settings(max_steps=3, num_iterations=2, checkpoint_every=1)
    run = fresh(base, tmp_path, config)
    grpo_loss, calls = grpo.loop.grpo_loss, []

    def spoilt(*args, **kwargs):
        calls.append(run.step)
        loss, parts = grpo_loss(*args, **kwargs)
        return loss * float("nan") if calls.count(2) == 2 else loss, parts

    monkeypatch.setattr(grpo.loop, "grpo_loss", spoilt)
    with pytest.raises(UserError, match="step 3 of grpo: the loss is nan.*after step 2 are saved"):
        grpo.loop.train(run.policy, TASK, config, run)
    assert run.mid_step
    run.save()
    assert find_checkpoint(tmp_path)[0].name == "grpo-step-000002"


def test_sft_stops_at_a_number_that_is_not_finite_too(base, tmp_path):
    config = settings(sft_steps=3)
    run = fresh(base, tmp_path, config, "sft")
    run.policy.decoder.norm.register_forward_hook(
        lambda module, args, out: out * float("nan") if run.step == 1 else out
    )
    with pytest.raises(UserError, match="step 2 of sft: the loss is nan.*step 1 are saved"):
        grpo.sft.train(run.policy, TASK, config, run)
    assert find_checkpoint(tmp_path)[0].name == "sft-step-000001"


@pytest.mark.parametrize("bad", [float("inf"), "two", ZeroDivisionError])
def test_a_reward_that_breaks_costs_no_finished_step(base, tmp_path, bad):
    run = fresh(base, tmp_path, settings(max_steps=3))

    def reward(text):
        if run.step == 2:
            return bad if not isinstance(bad, type) else 1 / 0
        return float(len(text))

    with pytest.raises(UserError, match="reward 'letters'"), run.saved_on_failure():
        grpo.loop.train(run.policy, letters_task(reward), run.config, run)
    again = fresh(base, tmp_path, settings(max_steps=3))
    assert again.step == 2
    assert_same(state_of(again), {**state_of(run), "sampling": again.generator.get_state()})


@pytest.mark.parametrize("where", ["completions", "alarms"])
def test_what_fails_beside_the_training_costs_no_finished_step(base, tmp_path, where):
    """A disk that is full when completions are written, a task's own code: the steps before are
    saved, however far back the last checkpoint was."""
    task, config = TASK, settings(max_steps=4, completions_every=1)
    run = fresh(base, tmp_path, config)

    def fail(*args):
        if run.step == 2:
            raise UserError("no space left on the device")
        return []

    if where == "alarms":
        task = letters_task(share_of("e"), alarms=fail)
    else:
        run.recorder.completions = fail
    with pytest.raises(UserError, match="no space"), run.saved_on_failure():
        grpo.loop.train(run.policy, task, config, run)
    assert find_checkpoint(tmp_path)[0].name == "grpo-step-000002"


def test_a_line_that_cannot_be_written_belongs_to_a_step_that_is_saved(base, tmp_path):
    run = fresh(base, tmp_path, settings(max_steps=4))
    write = run.recorder.metrics

    def fail(stage, step, values):
        if step == 3:
            raise UserError("no space left on the device")
        write(stage, step, values)

    run.recorder.metrics = fail
    with pytest.raises(UserError, match="no space"), run.saved_on_failure():
        grpo.loop.train(run.policy, TASK, run.config, run)
    assert find_checkpoint(tmp_path)[0].name == "grpo-step-000003"


# ---- the order of the examples -------------------------------------------------------------------


@pytest.mark.parametrize("count, total", [(2, 6), (4, 6), (5, 3), (7, 7), (3, 1)])
def test_every_example_comes_once_an_epoch(count, total):
    steps = 12
    order = sum((step_indices(step, count, total, seed=3) for step in range(steps)), [])
    assert len(order) == count * steps
    for start in range(0, len(order) - total + 1, total):
        assert sorted(order[start : start + total]) == list(range(total))


def test_epochs_and_seeds_shuffle_anew():
    epochs = [tuple(step_indices(step, 20, 20, seed)) for seed in (0, 1) for step in (0, 1)]
    assert len(set(epochs)) == 4
    assert step_indices(5, 3, 20, 1) == step_indices(5, 3, 20, 1)


def test_the_order_needs_no_state_and_touches_none():
    before = torch.get_rng_state()
    step_indices(1, 2, 10, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_norm_is_reported_before_the_clip_and_0_never_clips(base, tmp_path):
    norms, moved = {}, {}
    for limit in (0.0, 1e-4):
        run = fresh(base, tmp_path / str(limit), settings(max_grad_norm=limit))
        seen, step = [], run.optimizer.step
        run.optimizer.step = lambda seen=seen, run=run, step=step: (
            seen.append(
                torch.stack([p.grad.norm() for p in run.optimizer.masters.values()]).norm().item()
            ),
            step(),
        )
        go(run, TASK)
        norms[limit], moved[limit] = run.recorder.lines[0]["grad_norm"], seen[0]
    assert norms[0.0] == pytest.approx(norms[1e-4]) and norms[0.0] > 1e-3
    assert moved[0.0] == pytest.approx(norms[0.0], rel=1e-4)
    assert moved[1e-4] == pytest.approx(1e-4, rel=1e-4)
