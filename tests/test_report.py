"""The log analysis: when a curve has settled, what is a fault and what only looks like one."""

import json
import math
import random
import re

import pytest

from grpo.errors import exit_status
from grpo.report import analyse, evaluation_table, faults, read_metrics, report, right_after_all
from grpo.settling import course

CONFIG = {"task": "maze", "model": "scratch", "num_iterations": 1, "beta": 0.0}


def settled(values, first=1):
    return course(list(enumerate(values, first))).settled


def grpo_lines(count, **metrics):
    """So many steps; a metric is a value, or a function of the step."""
    usual = {"step_time": 0.5, "reward": 1.0, "clip_ratio/low_mean": 0.0, "kl": 0.0}
    return [
        {"stage": "grpo", "step": step}
        | {n: v(step) if callable(v) else v for n, v in {**usual, **metrics}.items()}
        for step in range(1, count + 1)
    ]


def make_run(folder, lines, results=None, evaluations=None, config=CONFIG):
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results))
    for name, rows in (evaluations or {}).items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "evaluations" / f"{name}.jsonl").write_text(text)
    return folder


def answer(question, correct, text="an answer", **more):
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "completion": text, "correct": correct, "level": "easy", **more}


def run(*words):
    return exit_status(report, [str(word) for word in words])


def told(lines, config=CONFIG):
    """(faults, notes) as one text each."""
    return "\n".join(faults(lines, analyse(lines))), "\n".join(right_after_all(lines, config))


# ---- settling -----------------------------------------------------------------------------------


def test_a_step_settles_where_the_middle_of_the_window_has_passed_it():
    """The first window of 10 that is wholly above is that of 101 to 110."""
    assert settled([0.0] * 100 + [1.0] * 100) == 106


def test_a_rise_with_noise_settles_after_it_and_not_at_its_first_touch_of_the_end():
    rng = random.Random(0)
    early = 40  # the curve is where it will end, for a moment
    values = [
        1 - math.exp(-step / 50) + rng.uniform(-0.05, 0.05) + (early <= step < early + 5) * 0.5
        for step in range(1000)
    ]
    assert 100 < settled(values) < 250


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([0.5] * 100, "flat"),
        ([0.5], "flat"),
        ([0.0, 1.0] * 50, "flat"),  # moves, and its mean never does
        ([i / 100 for i in range(100)], "not settled"),
        ([0.0] * 95 + [1.0] * 5, "not settled"),
        ([math.sin(i / 20) for i in range(400)], "not settled"),
        ([0.0] * 5 + [1.0] * 10, "too few steps"),
    ],
)
def test_a_curve_that_has_not_settled_says_why(values, wanted):
    assert settled(values) == wanted


def test_the_step_is_that_of_the_log_not_the_place_in_the_list():
    """Steps without a value (the KL of one without spread) are not in the list."""
    points = [(2 * i, float(i >= 100)) for i in range(200)]
    assert course(points).settled == 2 * 105


def test_start_and_end_are_means_over_a_window():
    found = course([(i, float(i)) for i in range(1, 401)])  # a window of 20
    assert (found.start, found.end, found.lowest, found.highest) == (10.5, 390.5, 1.0, 400.0)


# ---- faults, and what only looks like one -------------------------------------------------------


def test_a_format_reward_that_stays_at_0_is_a_fault_and_one_that_rises_is_none():
    lines = grpo_lines(40, **{"rewards/strict/mean": 0.0,
                              "rewards/soft/mean": lambda step: step / 40})  # fmt: skip
    wrong, _ = told(lines)
    assert "rewards/strict/mean is 0 in each of the last 10 steps" in wrong
    assert "tags" in wrong and "soft" not in wrong


def test_a_reward_that_was_learned_and_lost_is_a_fault_too():
    wrong, _ = told(grpo_lines(40, **{"rewards/soft/mean": lambda step: float(step < 20)}))
    assert "rewards/soft/mean is 0 in each of the last 10" in wrong


@pytest.mark.parametrize(
    "metric, fine, bad, words",
    [
        ("frac_reward_zero_std", 0.6, 0.97, "97% of the groups"),
        ("kl", 0.2, 30.0, "up to 30 nats a token"),
        ("completions/clipped_ratio", 0.5, 1.0, "raise --max-completion-length"),
    ],
)
def test_the_usual_faults_are_told(metric, fine, bad, words):
    assert told(grpo_lines(30, **{metric: fine}))[0] == ""
    assert words in told(grpo_lines(30, **{metric: bad}))[0]


def test_a_kl_that_exploded_and_came_back_is_still_told():
    wrong, _ = told(grpo_lines(100, kl=lambda step: 50.0 if 40 < step < 60 else 0.01))
    assert "The KL to the reference went up to 50 " in wrong


def test_a_clip_ratio_of_0_is_said_to_be_right_with_one_update_a_rollout_only():
    lines = grpo_lines(20)
    assert "right with one update a rollout" in told(lines)[1]
    assert "rollout" not in told(lines, {**CONFIG, "num_iterations": 2})[1]
    clipped = grpo_lines(20, **{"clip_ratio/low_mean": 0.1})
    assert "rollout" not in told(clipped)[1]


def test_a_kl_of_0_is_explained_at_beta_0_only():
    assert "--beta 0" in told(grpo_lines(20))[1]
    assert "--beta 0" not in told(grpo_lines(20), {**CONFIG, "beta": 0.04})[1]


# ---- what is read -------------------------------------------------------------------------------


def test_a_line_torn_by_a_kill_is_left_out(tmp_path):
    folder = make_run(tmp_path / "x", grpo_lines(3))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"stage": "grpo"}\n[1]\n{"stage": "grpo", "step": 4, "rew')
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3]


def test_a_step_that_a_resume_did_again_counts_once_and_as_it_was_the_last_time(tmp_path):
    lines = grpo_lines(30) + [line for line in grpo_lines(40, reward=2.0) if line["step"] > 20]
    found = analyse(read_metrics(make_run(tmp_path / "x", lines)))["grpo", "reward"]
    assert (found.start, found.end, found.settled) == (1.0, 2.0, 26)


def test_the_line_of_an_evaluation_hides_no_metric_of_its_step():
    lines = [*grpo_lines(20), {"stage": "grpo", "step": 20, "eval/accuracy": 0.9}]
    assert analyse(lines)["grpo", "reward"].end == 1.0


def test_nothing_but_sft_is_reported_as_that():
    lines = [{"stage": "sft", "step": s, "loss": 1.0, "step_time": 0.1} for s in range(1, 30)]
    assert list(analyse(lines)) == [("sft", "loss")]
    assert told(lines) == ("", "")


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda run: run.rename(run.with_name("y")), "x: there is no config.json in it"),
        (lambda run: (run / "metrics.jsonl").unlink(), "x: there is no metrics.jsonl in it"),
        (lambda run: (run / "metrics.jsonl").write_text("\n{"), "x: no step is done yet"),
        (lambda run: (run / "config.json").write_text("[]"), "config.json: this is not the JSON"),
        (lambda run: (run / "results.json").write_text("{"), "results.json: this is not the JSON"),
        (lambda run: (run / "report.html").mkdir(), "report.html: cannot be written"),
        (lambda run: (run / "report.png").mkdir(), "report.png: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path, capsys, broken, message):
    folder = make_run(tmp_path / "x", grpo_lines(3))
    broken(folder)
    assert run(folder) == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)


# ---- the tables and the page --------------------------------------------------------------------


def summary(right, count, **levels):
    parts = {name: {"correct": c, "examples": n, "accuracy": c / n}
             for name, (c, n) in levels.items()}  # fmt: skip
    return {"accuracy": right / count, "correct": right, "examples": count, "levels": parts}


def test_evaluations_stand_side_by_side_with_intervals_by_level_and_by_both_judges(tmp_path):
    from grpo.columns import saved_columns

    rows = [answer("a?", False, correct_lenient=True), answer("b?", False, correct_lenient=False)]
    folder = make_run(tmp_path / "x", grpo_lines(3), evaluations={"after_sft": rows})
    results = {
        "start": summary(0, 200, easy=(0, 155)),
        "after_sft": {**summary(180, 200, easy=(150, 155), hard=(30, 45)), "pass@8": 0.95},
        "after_grpo": {"step": 3},  # trained, and not yet judged
    }
    head, *table = evaluation_table(results, saved_columns(folder))
    assert head == ["", "start", "after_sft"]
    assert table[0] == ["all", "0.0% (0.0–1.9) of 200", "90.0% (85.1–93.4) of 200"]
    assert table[1] == ["all, lenient", "-", "50.0% (9.5–90.5) of 2"]
    assert [line[0] for line in table[2:]] == ["easy", "easy, lenient", "hard", "pass@8"]
    assert table[4][1:] == ["-", "66.7% (52.1–78.6) of 45"]
    assert table[5][1:] == ["-", "95.0%"]


def test_the_report_is_one_page_that_loads_nothing_with_the_picture_in_it(tmp_path, capsys):
    lines = grpo_lines(60, **{"rewards/strict/mean": lambda step: float(step > 30)})
    before, after = ([answer(f"question {i}?", right, "<script>x</script>") for i in range(12)]
                     for right in (False, True))  # fmt: skip
    evaluations = {"start": before, "after_grpo": after}
    results = {"start": summary(0, 12), "after_grpo": summary(12, 12)}
    folder = make_run(tmp_path / "<x>", lines, results, evaluations)
    assert run(folder) == 0
    page, out = (folder / "report.html").read_text("utf-8"), capsys.readouterr().out
    assert re.search(r"^rewards/strict/mean +0 +1 +0 +1 +36$", out, re.M)
    assert "grpo: 60 steps in 0.5 minutes" in out and "note: The loss is 0" in out
    assert "<td>36</td>" in page and "right with one update a rollout" in page
    assert page.count('<section class="question">') == 10
    assert "<script" not in page and "&lt;script&gt;x&lt;/script&gt;" in page
    assert re.findall(r"https?://|url\(|<link|@import", page) == []
    assert re.findall(r'src="([^,]*,)', page) == ["data:image/png;base64,"]
    assert "<x>" not in page and "<title>&lt;x&gt;</title>" in page
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_each_reward_and_marks_where_it_settled(tmp_path, monkeypatch):
    import grpo.report

    drawn = []
    monkeypatch.setattr(grpo.report, "draw_curves", lambda *arguments: drawn.append(arguments))
    lines = grpo_lines(60, **{"rewards/a/mean": lambda s: float(s > 30), "rewards/b/mean": 0.0})
    grpo.report.draw(lines, analyse(lines), "x", tmp_path / "x.png")
    _, _, _, panels, settled = drawn[0]
    names = [metric for _, metric, _ in panels]
    at = names.index("reward")
    assert names[at + 1 : at + 3] == ["rewards/a/mean", "rewards/b/mean"] and "kl" in names
    assert settled == {("grpo", "rewards/a/mean"): 36}
