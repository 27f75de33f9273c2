"""Answers side by side: the same questions in every column, honest counts, a page that is safe."""

import json
import re
import sys

import pytest
from conftest import build_model

from grpo.columns import columns_of, read_column
from grpo.compare import beside, compare, join, mcnemar, printable, wrapped
from grpo.errors import UserError, exit_status
from grpo.page import write_page
from grpo.scratch import SCRATCH_TEMPLATE

QUESTIONS = ["one?", "two?", "three?", "four?", "five?"]


def row(question, correct, text="", **more):
    reason = "" if correct else "hit a wall"
    return {"prompt": [{"role": "user", "content": question}], "completion": text or question[::-1],
            "correct": correct, "reason": reason, "level": "easy", "tokens": 3, **more}  # fmt: skip


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def make_run(folder, **evaluations):
    """A run's folder; each evaluation is its verdicts by question, or its rows."""
    for name, rows in evaluations.items():
        if not isinstance(rows[0], dict):
            rows = [row(q, right) for q, right in zip(QUESTIONS, rows, strict=False)]
        write_rows(folder / "evaluations" / f"{name}.jsonl", rows)
    (folder / "config.json").write_text('{"task": "maze"}')
    return str(folder)


def run(*words):
    return exit_status(compare, [str(word) for word in words])


@pytest.fixture
def trained(tmp_path):
    return make_run(
        tmp_path / "x",
        after_grpo=[True, True, True, False, False],
        start=[False, False, True, True, False],
        after_sft=[True, False, True, True, False],
    )


# ---- which columns ------------------------------------------------------------------------------


def test_a_run_alone_is_all_its_evaluations_in_the_order_of_the_run(trained):
    assert [c.name for c in columns_of([trained], [])] == ["start", "after_sft", "after_grpo"]


def test_one_evaluation_of_a_run_is_named_behind_a_colon_or_as_its_file(trained):
    by_name, by_file = columns_of(
        [f"{trained}:start", f"{trained}/evaluations/after_sft.jsonl"], []
    )
    assert (by_name.name, by_file.name) == ("start", "after_sft")
    assert by_name.source == by_file.source == trained


def test_a_folder_with_a_colon_in_its_name_is_that_folder(tmp_path):
    make_run(tmp_path / "at", start=[True])
    folder = make_run(tmp_path / "at:start", start=[True], after_sft=[True])
    assert len(columns_of([folder], [])) == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere"], "nowhere: there is no such run"),
        (["x:after_dinner"], "no answers called after_dinner; it has start, after_sft, after_grpo"),
        (["empty"], "empty: neither a run with answers.*nor a model"),
        (["x/config.json", "x"], "config.json: there are no answers in it"),
        (["x:start"], "only start is there; name one more"),
        (["x:start", "other:start"], "no question in common"),
        (["adapter", "x"], "adapter alone cannot answer"),
        (["model", "empty/"], "empty/: neither a run"),  # before the model is loaded
        (["model", "model"], "say --task NAME"),
        (["x", "--examples", "0"], "--examples: '0' is out of range"),
        (["x", "--exmaples", "3"], "--exmaples: no such flag"),
        (["x", "--only", "gaind"], "--only: invalid choice"),
        (["x", "--html", "no/such/page.html"], "there is no folder no/such"),
        (["x", "--html", "empty"], "empty: cannot be written"),
        ([], "required: WHAT"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(trained, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "other", start=[row("another?", True)])
    for folder, name in (("model", "config.json"), ("adapter", "adapter_config.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text('{"model_type": "llama"}')
    assert run(*words) == 2
    assert re.fullmatch(f"error: .*{message}.*\n", capsys.readouterr().err)
    assert list(tmp_path.glob("**/.*")) == []


def test_help_says_what_can_be_named(capsys):
    with pytest.raises(SystemExit) as end:
        run("-h")
    assert end.value.code == 0 and "runs/x:after_sft" in capsys.readouterr().out


def test_a_row_that_a_kill_has_torn_is_left_out(tmp_path):
    path = tmp_path / "start.jsonl"
    write_rows(path, [row("one?", True), {"index": 3}, {**row("two?", True), "prompt": "two?"}])
    with open(path, "a") as file:
        file.write('{"prompt": [{"role"')
    assert len(read_column(path).rows) == 1


# ---- the join and the counts --------------------------------------------------------------------


def test_questions_are_joined_by_their_prompt_not_by_their_place(tmp_path):
    """Two runs with other held-out sets: row 0 of one is row 1 of the other."""
    folder = make_run(
        tmp_path / "x",
        start=[row("one?", True, "first"), row("two?", False, "second")],
        after_sft=[row("nine?", True), row("two?", True, "new second")],
    )
    (question,) = join(columns_of([folder], []))
    assert [r["completion"] for r in question.rows] == ["second", "new second"]
    assert (question.number, question.text, question.outcome) == (2, "two?", "gained")


def test_a_prompt_that_stands_twice_in_the_set_is_two_questions(tmp_path):
    """Joined by the prompt alone, the second answer would take the place of the first."""
    folder = make_run(
        tmp_path / "x",
        start=[row("one?", False), row("one?", True)],
        after_sft=[row("one?", True), row("one?", True)],
    )
    assert [q.outcome for q in join(columns_of([folder], []))] == ["gained", "both right"]


@pytest.mark.parametrize(
    "gained, lost, p",
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (3, 3, 1.0), (8, 2, 2 * (1 + 10 + 45) / 1024),
     (2, 8, 2 * (1 + 10 + 45) / 1024), (6000, 0, 0.0)],
)  # fmt: skip
def test_mcnemar_by_hand(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p)


def test_the_counts_and_intervals_are_of_all_questions_whatever_is_shown(trained, capsys):
    assert run(trained, "--examples", "1", "--only", "changed") == 0
    *_, start, sft, grpo, counts = capsys.readouterr().out.splitlines()
    assert start.split() == ["start", "40.0%", "(11.8–76.9)"]
    assert sft.split()[1] == grpo.split()[1] == "60.0%"
    assert counts == (
        "start → after_grpo: 2 gained, 1 lost, 1 both right, 1 both wrong; "
        "exact McNemar test: p = 1.0000"
    )


@pytest.mark.parametrize(
    "only, wanted",
    [("all", "12345"), ("changed", "124"), ("gained", "12"), ("lost", "4")],
)
def test_only_some_questions_are_shown(trained, capsys, only, wanted):
    assert run(trained, "--only", only) == 0
    assert "".join(re.findall(r"^question (\d)", capsys.readouterr().out, re.M)) == wanted


def test_gold_and_lenient_verdict_are_shown_where_the_rows_have_them(tmp_path, capsys):
    rows = [row("2 + 2?", False, "it is 4", answer="4", correct_lenient=True, index=6)]
    folder = make_run(tmp_path / "x", start=rows, after_sft=[row("2 + 2?", True, "4")])
    assert run(folder) == 0
    out = capsys.readouterr().out
    assert "question 7 · easy · gained · gold answer 4" in out
    assert "[start] wrong: hit a wall" in out and "lenient judge" in out
    assert re.search(r"^start +0\.0% \(.*\) +100\.0% \(", out, re.M)
    assert re.search(r"^after_sft +100\.0% \(.*\) +-$", out, re.M)


def test_columns_of_two_runs_are_told_apart(tmp_path, trained, monkeypatch, capsys):
    """By the path: two runs in different folders may have one name."""
    make_run(tmp_path / "other" / "x", start=[True] * 5)
    monkeypatch.chdir(tmp_path)
    assert run("x:start", "other/x:start") == 0
    assert "x:start → other/x:start: 3 gained" in capsys.readouterr().out


# ---- the terminal -------------------------------------------------------------------------------


def test_answers_are_wrapped_side_by_side_within_the_width():
    lines = beside(["a long answer of many words\nand a line", "short"], 51)
    assert lines == [
        "a long answer of many    | short",
        "words                    |",
        "and a line               |",
    ]
    assert max(len(line) for line in beside(["x" * 200, "y" * 90], 50)) <= 50


def test_a_narrow_terminal_has_the_answers_one_under_the_other():
    assert beside(["first", "second"], 30) == ["first", "", "second"]


def test_a_completion_cannot_command_the_terminal():
    assert printable("ab\tc\x1b[31m\r\ud800é\n") == "ab  c\\x1b[31m\\r\\ud800é\n"


def test_lines_and_indentation_of_an_answer_stay():
    assert wrapped("def f:\n\n    pass", 20) == ["def f:", "", "    pass"]


def test_a_terminal_without_unicode_gets_a_question_mark_not_a_traceback(trained, monkeypatch):
    class Ascii:
        encoding, errors = "ascii", "strict"

        def reconfigure(self, errors):
            self.errors = errors

        def write(self, text):
            text.encode(self.encoding, self.errors)

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Ascii())
    assert run(trained) == 0


# ---- the page -----------------------------------------------------------------------------------


def loads(page):
    """Whatever in a page could fetch something."""
    outside = re.findall(r"https?://|url\(|@import|<link|<script|<iframe", page)
    return outside + [s for s in re.findall(r'src="([^"]{0,5})', page) if s != "data:"]


def test_a_completion_with_markup_is_shown_as_text_on_a_page_that_loads_nothing(tmp_path):
    attack = "<script src='http:example'>alert(1)</script></pre>&amp;\ud800"
    folder = make_run(
        tmp_path / "<b>",
        start=[row("<img src=x onerror=y>?", False, attack, answer="<i>4</i>")],
        after_sft=[row("<img src=x onerror=y>?", True, "<|up|>")],
    )
    assert run(folder, "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert loads(page) == []
    assert "&lt;script src=&#x27;http:example&#x27;&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;/pre&gt;&amp;amp;?" in page and "&lt;i&gt;4&lt;/i&gt;" in page
    assert "<img" not in page and "<i>" not in page
    assert page.count("<pre>") == page.count("</pre>") == 3
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_the_page_has_the_verdicts_and_the_counts(trained, tmp_path):
    assert run(trained, "--html", tmp_path / "page.html", "--only", "lost") == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count('<div class="answer correct">') == 2
    assert page.count('<div class="answer wrong">') == 1
    assert "2 gained, 1 lost, 1 both right, 1 both wrong" in page and "40.0% (11.8–76.9)" in page


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path):
    (tmp_path / "page.html").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path / "page.html", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


# ---- a model that answers now -------------------------------------------------------------------


def test_a_model_answers_under_the_settings_of_the_run_beside_it(tmp_path, capsys, make_tokenizer):
    """Other settings would make other prompts, and there would be no question in common."""
    from data.maze import Options, scratch_tokens
    from grpo.config import parse, to_json

    folder = tmp_path / "x"
    flags = "--task maze --maze-size 4 --maze-train 20 --maze-sft 20 --max-completion-length 6"
    config, options, _ = parse([*flags.split(), "--output-dir", str(folder)])
    assert isinstance(options, Options)
    vocabulary = ["<pad>", "<eos>", *scratch_tokens(options)]
    tokenizer = make_tokenizer(vocabulary, chat_template=SCRATCH_TEMPLATE)
    changes = {"vocab_size": len(vocabulary), "eos_token_id": 1, "max_position_embeddings": 256}
    model = build_model("llama", **changes)
    model.save_pretrained(folder / "sft")
    tokenizer.save_pretrained(folder / "sft")
    (folder / "config.json").write_text(to_json(config, options))

    columns = columns_of([str(folder / "sft")], ["--eval-examples", "3"])
    rows = columns[0].rows
    assert len(rows) == 3 and all(r["prompt"][-1]["content"].count("\n") == 3 for r in rows)
    write_rows(folder / "evaluations" / "start.jsonl", rows)
    assert run(f"{folder}:start", folder / "sft", "--examples", "2") == 0
    out = capsys.readouterr().out
    assert "x:start → " in out and "right of 2" in out and "0 gained, 0 lost" in out
