"""The maze task without its rewards: grid, text, choice of mazes, judge."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data import task_module
from data.maze import Options, alarms, load, make_example, resolve, scratch_tokens
from data.maze_grid import (
    DIRECTIONS,
    MOVES,
    Maze,
    all_trees,
    level,
    maze_from_edges,
    moves_text,
    random_maze,
    solve,
    walk,
)
from data.maze_sets import BENCH, bench_mazes, held_out_mazes, training_mazes
from data.maze_text import (
    DEAD_END,
    RESET,
    WRONG_WAY,
    can_reset,
    maze_tokens,
    parse,
    read_mazes,
    render,
    steps_text,
    wall_token,
)
from grpo.errors import UserError
from rewards.maze import answer_text

CASES = json.loads((Path(__file__).parent / "cases/maze_cases.json").read_text())["cases"]


def cases(kind: str):
    return [pytest.param(c["input"], c["expected"], id=c["id"]) for c in CASES if c["kind"] == kind]


def some_mazes(size: int, count: int) -> list[Maze]:
    rng = random.Random(size)
    return [random_maze(size, rng) for _ in range(count)]


# ---------------------------------------------------------------------------------------------
# The public cases


@pytest.mark.parametrize(("given", "expected"), cases("encode"))
def test_case_encode(given, expected):
    if "edges" in given:
        maze = maze_from_edges(given["grid"], given["edges"], (0, 0), (4, 4))
        tokens = [wall_token(maze.doors[row * 5 + column]) for row, column in given["cells"]]
    else:
        tokens = [wall_token(sum(1 << DIRECTIONS.index(d) for d in c)) for c in given["cells"]]
    assert tokens == expected["tokens"]


@pytest.mark.parametrize(("given", "expected"), cases("prompt"))
def test_case_prompt(given, expected):
    if "maze_text" in given:
        maze = parse(given["maze_text"])
        assert list(divmod(maze.origin, 5)) == expected["origin"]
        assert list(divmod(maze.target, 5)) == expected["target"]
        for cell, doors in enumerate(maze.doors):
            opened = [name for k, name in enumerate(DIRECTIONS) if doors >> k & 1]
            assert opened == expected["open"]["{}-{}".format(*divmod(cell, 5))]
    else:
        edges = given.get("edges") or [
            ((int(a), int(b)), (int(c), int(d)))
            for a, b, c, d in re.findall(
                r"\((\d),(\d)\) <--> \((\d),(\d)\)", given["adjacency_text"]
            )
        ]
        maze = maze_from_edges(5, edges, given["origin"], given["target"])
    assert render(maze) == expected["maze_text"]


@pytest.mark.parametrize(("given", "expected"), cases("solve"))
def test_case_solve(given, expected):
    path = solve(parse(given["maze_text"]))
    assert (path is not None) == expected["solvable"]
    if path is not None:
        assert len(path) == expected["length"]
        assert moves_text(path) in expected["shortest"]


@pytest.mark.parametrize(("given", "expected"), cases("steps"))
def test_case_steps(given, expected):
    path = given["path"]
    maze = maze_from_edges(5, given["edges"], path[0], path[-1])
    names = {(-1, 0): 0, (1, 0): 1, (0, -1): 2, (0, 1): 3}
    pairs = zip(path, path[1:], strict=False)
    moves = [names[c - a, d - b] for (a, b), (c, d) in pairs]
    steps = [
        f"Step {k}: {instruction}\n{picture}"
        for k, (instruction, picture) in enumerate(
            zip(expected["instructions"], expected["step_mazes"], strict=True), 1
        )
    ]
    assert steps_text(maze, moves) == "\n\n".join(steps)
    assert moves_text(moves) == expected["answer"]


@pytest.mark.parametrize(("given", "expected"), cases("path"))
def test_case_path(given, expected):
    """The report's words for the cases' reasons; "not at the target" is "stopped short"."""
    maze = parse(given["maze_text"])
    way = walk(maze, answer_text(given["completion"]))
    words = {
        "wall": "hit a wall",
        "outside": "left the grid",
        "not at the target": "stopped short",
        "no answer": "no answer",
        None: "",
    }
    assert way.solved == expected["solved"]
    assert way.reason == words[expected["reason"]]
    assert way.failed_move == expected["failed_move"]
    if expected["end"] is not None:
        assert list(divmod(way.cells[-1], 5)) == expected["end"]


# ---------------------------------------------------------------------------------------------
# Grid


@pytest.mark.parametrize("size", [3, 4, 5, 8, 20])
def test_a_maze_is_a_spanning_tree_with_two_ends(size):
    for maze in some_mazes(size, 20):
        doors = sum(mask.bit_count() for mask in maze.doors)
        assert doors == 2 * (size**2 - 1)
        assert maze.origin != maze.target
        reached = walk(maze, moves_text(solve(maze)))
        assert reached.solved and len(set(reached.cells)) == len(reached.cells)
        # n^2 - 1 edges and every cell reached: a tree
        for target in range(size**2):
            if target != maze.origin:
                assert solve(replace(maze, target=target)) is not None


def test_path_lengths_are_distributed_as_in_the_source():
    """Over 40,000 mazes: mean 7.36; 1-4 33.2%, 5-8 29.5%, 9-13 25.5%, 14+ 11.8%; at most 24.

    A uniform spanning tree, or a root anywhere, gives other numbers. 8,000 mazes: three standard
    errors are 0.16 moves and 1.6 points.
    """
    lengths = [len(solve(maze)) for maze in some_mazes(5, 8000)]
    assert sum(lengths) / len(lengths) == pytest.approx(7.36, abs=0.16)
    assert max(lengths) <= 24
    shares = {name: 100 * n / len(lengths) for name, n in Counter(map(level, lengths)).items()}
    wanted = {"easy": 33.2, "medium": 29.5, "hard": 25.5, "beyond": 11.8}
    assert shares == pytest.approx(wanted, abs=1.6)


def test_origins_and_targets_are_uniform():
    mazes = some_mazes(3, 9000)
    pairs = Counter((maze.origin, maze.target) for maze in mazes)
    assert len(pairs) == 72
    assert max(pairs.values()) < 2 * min(pairs.values())


def test_small_grids_are_known_in_full():
    """3x3 has 42 depth-first trees: random ones must be among them, and find them all."""
    assert len(all_trees(3)) == 42
    assert {maze.doors for maze in some_mazes(3, 3000)} == set(all_trees(3))


def test_levels_end_where_mazebench_ends_them():
    names = [level(n) for n in (1, 4, 5, 8, 9, 13, 14, 200)]
    expected = ["easy", "easy", "medium", "medium", "hard", "hard", "beyond", "beyond"]
    assert names == expected


def test_an_answer_of_words_is_no_answer():
    maze = some_mazes(5, 1)[0]
    assert walk(maze, "right up <|blank|> <|jump|>").reason == "no answer"


# ---------------------------------------------------------------------------------------------
# Text


@pytest.mark.parametrize("size", range(3, 21))
def test_every_size_is_read_back_as_it_was_written(size):
    for maze in some_mazes(size, 3):
        assert parse(render(maze)) == maze
        assert render(parse("\n" + render(maze).replace("\n", "\r\n") + "\n")) == render(maze)


def test_there_are_48_tokens():
    assert len(maze_tokens(5)) == len(set(maze_tokens(5))) == 48
    assert len([t for t in maze_tokens(5) if t.endswith("_wall|>")]) == 16


def _broken(text: str) -> dict[str, tuple[str, list[str]]]:
    lines = text.split("\n")
    return {
        "missing row": ("\n".join(lines[:-1]), ["row 4", "missing"]),
        "row too many": (text + "\n" + lines[-1], ["6 rows"]),
        "missing cell": (text.replace("\n", "\n#", 1).replace("\n#<", "\n<"), []),
        "short row": ("\n".join([*lines[:2], lines[2].rsplit("<|2-4|>")[0], *lines[3:]]),
                      ["row 2", "4 cells"]),
        "wrong coordinate": (text.replace("<|2-2|>", "<|2-3|>"), ["<|2-3|>", "<|2-2|>"]),
        "wall order": (re.sub(r"<\|0-0\|><\|\w+\|>", "<|0-0|><|left_up_wall|>", text),
                       ["<|0-0|>", "<|left_up_wall|>"]),
        "marker": (text.replace("<|blank|>", "<|up|>", 1), ["<|up|>", "marker"]),
        "two origins": (text.replace("<|blank|>", "<|origin|>", 1), ["<|origin|>", "another"]),
        "no target": (text.replace("<|target|>", "<|blank|>"), ["no <|target|>"]),
        "words": ("go right", ["row 0", "go right"]),
        "empty": ("", ["0 cells"]),
    }  # fmt: skip


@pytest.mark.parametrize("what", list(_broken(render(some_mazes(5, 1)[0]))))
def test_a_broken_maze_says_what_is_wrong(what):
    text, words = _broken(render(some_mazes(5, 1)[0]))[what]
    if not words:  # the harmless change: still the same maze
        assert parse(text) == some_mazes(5, 1)[0]
        return
    with pytest.raises(UserError) as error:
        parse(text)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def split_greedily(text: str, tokens: list[str]) -> list[str]:
    """Longest match first, as the tokenizer of a model from scratch does it."""
    known, lengths = set(tokens), sorted({len(token) for token in tokens}, reverse=True)
    pieces, position = [], 0
    while position < len(text):
        fitting = (text[position : position + n] for n in lengths)
        piece = next((piece for piece in fitting if piece in known), None)
        assert piece, f"no token for {text[position : position + 40]!r}"
        pieces.append(piece)
        position += len(piece)
    return pieces


@pytest.mark.parametrize("maze_format", ["direct", "visual", "reset"])
@pytest.mark.parametrize("size", [3, 5, 11])
def test_the_scratch_vocabulary_holds_every_prompt_and_target(size, maze_format):
    """A cell is one token, also when the walker stands on it; nothing is out of vocabulary."""
    options = Options(maze_size=size, maze_format=maze_format, maze_train=10, maze_sft=60)
    tokens = scratch_tokens(options)
    assert len(set(tokens)) == len(tokens)
    task = load(options, seed=0, from_scratch=True)
    for example in [*task.sft[:40], *task.evaluation[:20]]:
        prompt = split_greedily(example.messages[0]["content"] + "\n", tokens)
        assert len(prompt) == size * (size + 1)
        target = split_greedily(example.target, tokens)
        assert set(target) <= set(tokens)
        if maze_format != "direct":
            steps = example.target.count("Step ")
            assert sum(piece.startswith("<|0-0|>") for piece in target) == steps


def test_a_vocabulary_has_no_border_cell_without_its_outer_wall():
    tokens = scratch_tokens(Options(maze_size=5, maze_format="direct"))
    assert sum(t.endswith("<|blank|>") for t in tokens) == 4 * 4 + 12 * 8 + 9 * 16
    assert "<|0-0|><|left_wall|><|blank|>" not in tokens


def test_visual_target_replays_the_way():
    options = resolve(Options(maze_format="visual"), from_scratch=False)
    for maze in some_mazes(5, 50):
        example = make_example(maze, options)
        assert re.fullmatch(r"<think>\n.*\n</think>\n\n(<\|\w+\|>)+", example.target, re.DOTALL)
        words = re.findall(r"Step (\d+): Go (\w+)\n", example.target)
        assert [int(number) for number, _ in words] == list(range(1, len(words) + 1))
        answer = example.target.split("</think>\n\n")[1]
        assert answer == "".join(f"<|{word}|>" for _, word in words) == example.answer.path


def test_reset_data_goes_wrong_first_and_then_right():
    task = load(Options(maze_format="reset", maze_sft=400), seed=3, from_scratch=False)
    seen = Counter()
    for example in task.sft:
        maze: Maze = example.answer.maze
        assert can_reset(maze)
        walls = 4 - maze.doors[maze.origin].bit_count()
        thought = example.target.split("<think>\n")[1].split("\n</think>")[0]
        *wrong, right = thought.split(f"\n{RESET}\n\n")
        seen[walls, len(wrong)] += 1
        first_moves = set()
        for branch in wrong:
            steps, verdict = branch.rsplit("\n\n", 1)
            moves = [DIRECTIONS.index(d) for d in re.findall(r"Step \d+: Go (\w+)", steps)]
            assert 1 <= len(moves) <= (3 if walls == 2 else 1)
            way = walk(maze, moves_text(moves))
            assert way.reason == "stopped short" and len(set(way.cells)) == len(way.cells)
            assert steps == steps_text(maze, moves)
            end = maze.doors[way.cells[-1]].bit_count()
            assert verdict == (DEAD_END if end == 1 else WRONG_WAY)
            if walls == 2 and len(moves) < 3:
                assert end == 1, "a branch is left before three moves only at a dead end"
            first_moves.add(moves[0])
            seen[verdict] += 1
        assert first_moves == {d for d, _ in maze.exits(maze.origin)} - {solve(maze)[0]}
        assert right == steps_text(maze, solve(maze))
    assert set(seen) == {(2, 1), (1, 2), DEAD_END, WRONG_WAY}


def test_mazes_without_a_wrong_branch_have_no_reset_data():
    options = resolve(Options(maze_format="reset"), from_scratch=False)
    maze = next(m for m in some_mazes(5, 99) if m.doors[m.origin].bit_count() == 1)
    assert RESET not in make_example(maze, options).target.replace("\n", " ")


def test_no_kind_of_case_is_forgotten():
    """test_maze_rewards reads those of kind reward."""
    assert {case["kind"] for case in CASES} == {
        "encode", "prompt", "solve", "steps", "path", "reward"
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Which mazes


def test_the_bench_is_100_mazes_50_40_10_and_always_the_same():
    mazes = bench_mazes(5)
    assert Counter(level(len(solve(m))) for m in mazes) == BENCH
    assert len(set(mazes)) == 100
    first = load(Options(), seed=1, from_scratch=False).evaluation
    second = load(Options(maze_train=5), seed=2, from_scratch=False).evaluation
    assert [e.answer.maze for e in first] == [e.answer.maze for e in second] == mazes
    # A change here makes all earlier results incomparable.
    path = moves_text(solve(mazes[0]))
    assert (mazes[0].origin, mazes[0].target) == (8, 5)
    assert path == "<|up|><|left|><|left|><|left|><|down|>"
    text = "\n\n".join(render(maze) for maze in mazes)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "f1f1c43578c206d12091d230554a90c80ebcd0229f29c3ddc4718165363778e3"
    )
    halves = Counter(e.level for e in first[:50])
    assert halves["easy"] > 15 and halves["medium"] > 10, "the order is mixed"


@pytest.mark.parametrize("size", [3, 4, 5, 7])
def test_training_never_meets_the_held_out_mazes_nor_itself(size):
    options = Options(maze_size=size, maze_format="direct", maze_train=3000, maze_sft=4000)
    task = load(options, seed=0, from_scratch=True)
    held_out = {e.answer.maze for e in task.evaluation}
    for examples in (task.train, task.sft):
        mazes = [examples.mazes[i] for i in range(len(examples))]
        assert len(set(mazes)) == len(mazes)
        assert not held_out & set(mazes)


def test_3x3_training_is_everything_that_is_not_held_out():
    """Only 3,024 mazes exist, so a stream of random ones would meet the held-out ones at once."""
    task = load(Options(), seed=0, from_scratch=True)
    assert len(task.train) == len(task.sft) == 42 * 72 - 200
    assert len(task.evaluation) == 200


def test_a_random_maze_that_is_held_out_or_repeated_is_replaced():
    """The mazes that stay keep their places; those taken away get another each."""
    free = training_mazes(5, 300, "story", held_out=())
    taken = [free[3], free[250]]
    kept = training_mazes(5, 300, "story", held_out=taken)
    assert [i for i in range(300) if kept[i] != free[i]] == [3, 250]
    again = training_mazes(5, 300, "story", held_out=taken)
    assert again[250] == kept[250], "in any order of access"
    assert kept[-1] == kept[299] and kept[:2] == [kept[0], kept[1]]
    with pytest.raises(IndexError):
        kept[300]


def test_the_seed_chooses_the_training_mazes():
    one, other = (load(Options(maze_size=6), s, False).train.mazes[:20] for s in (1, 2))
    assert not set(one) & set(other)


def test_held_out_mazes_of_another_count_are_the_first_of_them():
    assert held_out_mazes(3, 100) == held_out_mazes(3, 200)[:100]


@pytest.mark.parametrize("size", [12, 20])
def test_big_grids_work_at_once(size):
    task = load(Options(maze_size=size), seed=0, from_scratch=False)
    assert len(task.evaluation) == 100 and len(task.sft) == 200_000
    example = task.train[9_999]
    assert task.is_correct(example.target, example)
    assert task.failure_reason(example.target, example) == ""
    assert f"<|{size - 1}-{size - 1}|>" in example.messages[0]["content"]


# ---------------------------------------------------------------------------------------------
# Flags and files


def test_auto_is_visual_with_words_for_a_pretrained_model_and_bare_for_a_fresh_one():
    trained, fresh = (load(Options(), 0, from_scratch) for from_scratch in (False, True))
    assert trained.train[0].target.startswith("<think>\nStep 1: Go ")
    assert trained.train[0].messages[0]["content"].startswith("Find the way")
    assert "<|4-4|>" in trained.train[0].messages[0]["content"]
    assert fresh.train[0].messages[0]["content"].startswith("<|0-0|>")
    assert fresh.train[0].target == fresh.train[0].answer.path
    assert list(fresh.reward_functions) == ["correctness", "validity"]
    assert fresh.is_correct(fresh.train[0].target, fresh.train[0])


def test_every_target_earns_its_rewards_and_solves_its_maze():
    for maze_format in ("visual", "reset", "direct"):
        task = load(Options(maze_format=maze_format, maze_sft=30), 0, from_scratch=False)
        for example in task.sft:
            assert task.is_correct(example.target, example)
            assert task.reward_functions["correctness"](example.target, example) == 2.0
            assert task.reward_functions["validity"](example.target, example) == 0.5
            if maze_format != "direct":  # all but strict_format, for want of a last newline
                earned = {n: f(example.target, example) for n, f in task.reward_functions.items()}
                assert sum(earned.values()) == 3.25 and earned["strict_format"] == 0


@pytest.mark.parametrize(
    ("flags", "from_scratch", "word"),
    [
        ({"maze_size": 2}, False, "--maze-size 2"),
        ({"maze_size": 21}, False, "--maze-size 21"),
        ({"maze_size": 3, "maze_bench": "on"}, True, "--maze-bench"),
        ({"maze_instructions": "on"}, True, "--maze-instructions"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, from_scratch, word):
    with pytest.raises(UserError, match=word):
        load(Options(**flags), 0, from_scratch)


def test_defaults_name_real_settings():
    from grpo.config import Config

    module = task_module("maze")
    assert module.DEFAULTS.keys() == {"scratch", "cpu", "a10", "a6000"}
    for values in module.DEFAULTS.values():
        for name in values:
            assert hasattr(Config, name) or hasattr(Options, name), name


def test_a_model_from_scratch_is_judged_on_mazes_as_the_generator_makes_them():
    for size in (3, 4, 7):
        decided = resolve(Options(maze_size=size), from_scratch=True)
        assert (decided.maze_bench, decided.maze_format) == ("off", "direct")
        assert len(load(Options(maze_size=size), 0, from_scratch=True).evaluation) == 200
    assert resolve(Options(maze_size=4, maze_bench="on"), True).maze_bench == "on"
    assert [resolve(Options(maze_size=n), False).maze_bench for n in (3, 4)] == ["off", "on"]
    assert resolve(decided, from_scratch=True) == decided, "what is decided stays, as in a resume"


def test_every_answer_of_a_small_maze_fits_the_scratch_model_s_completions():
    """The longest path visits every cell; then comes the stop token. (So up to 8x8.)"""
    limits = task_module("maze").DEFAULTS["scratch"]
    assert limits["max_completion_length"] >= 7 * 7 - 1 + 1
    assert limits["max_prompt_length"] >= 8 * (8 + 1), "a cell a token, and a line break a row"


def record(maze: Maze) -> str:
    return json.dumps({"maze": render(maze)})


def test_own_mazes_are_trained_on(tmp_path, capsys):
    own = some_mazes(5, 8)
    held_out = bench_mazes(5)[0]
    file = tmp_path / "own.jsonl"
    lines = [record(m) for m in [*own, own[0], held_out]]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines, "", ""]).encode())
    task = load(Options(maze_file=str(file)), 0, from_scratch=False)
    assert [e.answer.maze for e in task.train] == own
    assert [e.answer.maze for e in task.sft] == own
    assert "2 mazes left out" in capsys.readouterr().err


BAD_LINES = {
    "row missing": (record(some_mazes(5, 1)[0]).replace("\\n<|4-0", "", 1), "row"),
    "cut json": ('{"maze": ', "JSON"),
    "no maze": ('{"text": ""}', "maze"),
    "list": ("[1]", "maze"),
    "brackets": ("[" * 100_000, "JSON"),
    "other size": (record(some_mazes(4, 1)[0]), "4x4"),
}


@pytest.mark.parametrize("what", BAD_LINES)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, what):
    line, word = BAD_LINES[what]
    file = tmp_path / "d.jsonl"
    file.write_text(f"{record(some_mazes(5, 1)[0])}\n{line}\n")
    with pytest.raises(UserError, match=rf"d\.jsonl, line 2: .*{word}") as error:
        read_mazes(file, 5)
    assert "\n" not in str(error.value)


def test_a_maze_without_its_last_row_names_record_and_row(tmp_path):
    text = render(some_mazes(5, 1)[0]).rsplit("\n", 1)[0]
    file = tmp_path / "d.jsonl"
    file.write_text(record(some_mazes(5, 1)[0]) + "\n" + json.dumps({"maze": text}))
    with pytest.raises(UserError, match=r"d\.jsonl, line 2: row 4 of the maze is missing"):
        load(Options(maze_file=str(file)), 0, from_scratch=False)


def test_files_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_bytes(b"")
    with pytest.raises(UserError, match=r"d\.jsonl is empty"):
        read_mazes(file, 5)
    file.write_bytes(record(some_mazes(5, 1)[0]).encode("utf-16"))
    with pytest.raises(UserError, match=r"d\.jsonl, line 1: .*UTF-8"):
        read_mazes(file, 5)
    with pytest.raises(UserError, match="nowhere/d.jsonl"):
        read_mazes("nowhere/d.jsonl", 5)


def test_a_maze_without_a_way_is_refused(tmp_path):
    walled = replace(some_mazes(5, 1)[0], doors=bytes(25))
    file = tmp_path / "d.jsonl"
    file.write_text(record(walled))
    with pytest.raises(UserError, match="line 1: this maze has no way"):
        read_mazes(file, 5)


# ---------------------------------------------------------------------------------------------
# Alarms


def test_alarms_know_a_spray_a_constant_and_a_dropped_tag():
    task = load(Options(), 0, from_scratch=False)
    examples = task.evaluation[:60]

    def batch(text):
        return [(text, example) for example in examples]

    thought = "<think>\nx\n</think>\n\n"
    longest = thought + "".join(MOVES) * 6  # 24 moves: a path through all 25 cells
    assert alarms(batch(longest)) == []
    for spray in (longest + MOVES[0], thought + MOVES[1] * 25 + MOVES[3] * 25):
        assert alarms(batch(spray))[0].startswith("60 of 60 answers have as many moves as")
    (line,) = alarms(batch(thought + MOVES[3]))
    assert MOVES[3] in line
    (line,) = alarms(batch("<think>\nStep 1: Go right"))
    assert "</think>" in line
    quarter = batch("<think>\nStep 1: Go right")[:15] + [(e.target, e) for e in examples[15:]]
    assert "15 of 60 outputs never close" in alarms(quarter)[0]


def test_good_answers_raise_no_alarm():
    for from_scratch in (False, True):
        task = load(Options(), 0, from_scratch)
        assert alarms([(e.target, e) for e in task.evaluation]) == []
        # one group on a straight maze, all right
        straight = next(e for e in task.evaluation if len(set(solve(e.answer.maze))) == 1)
        assert alarms([(straight.target, straight)] * 8) == []
    assert alarms([]) == []
