"""The benchmark against the peers: its arithmetic, and its workers as far as no peer is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import build_tokenizer, load_script
from tiny import TEMPLATE

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PARSED = {"model": "somewhere", "new_tokens": 7, "steps": 3}


@pytest.fixture
def peers(monkeypatch):
    return load_script(BENCHMARKS / "peers.py", monkeypatch)


@pytest.fixture
def directory(saved_model):
    """A model that knows nothing: all tokens about equally likely, in sampling as in stopping."""
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    return saved_model("llama", tokenizer, max_position_embeddings=1024, initializer_range=0.02)


def measured(seconds, tokens, peak=100, **more):
    speed = tokens / seconds
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": speed,
        "peak_rss_mb": peak,
        "dtype": "float32",
        "fixed_length": True,
        **more,
    }


# ---- arithmetic ----------------------------------------------------------------------------------


def test_faster_is_by_completion_token_where_the_lengths_differ(peers):
    """A peer whose rows stopped early was called faster by the seconds of its step alone."""
    ours = [measured(10.0, 4000)]
    other = [measured(20.0, 1000)]
    result = peers.compare(ours, other)
    assert result["times_faster"] == 8.0  # 400 tokens a second against 50
    assert result["times_faster_per_call"] == 2.0


def test_ratios_are_of_one_round_each(peers):
    """The machine slows down from round to round, and both meet it: the ratio of the two medians
    would be 2, of speeds that were never side by side."""
    ours = [measured(1.0, 100), measured(2.0, 100), measured(4.0, 100)]
    other = [measured(3.0, 100), measured(4.0, 100), measured(16.0, 100)]
    result = peers.compare(ours, other)
    assert result["times_faster_each_round"] == [3.0, 2.0, 4.0]
    assert result["times_faster"] == result["times_faster_per_call"] == 3.0
    assert result["ours"]["seconds"] == 2.0 and result["peer"]["seconds"] == 4.0
    with pytest.raises(ValueError):
        peers.compare(ours, other[:1])


def test_memory_is_the_largest_peak_of_all_rounds(peers):
    ours = [measured(1.0, 1, peak=200), measured(1.0, 1, peak=300), measured(1.0, 1, peak=100)]
    other = [measured(1.0, 1, peak=900), measured(1.0, 1, peak=1200), measured(1.0, 1, peak=800)]
    result = peers.compare(ours, other)
    assert (result["ours"]["peak_rss_mb"], result["peer"]["peak_rss_mb"]) == (300, 1200)
    assert result["memory_share"] == 0.25


def test_a_peer_without_a_figure_of_memory_is_compared_in_speed(peers):
    result = peers.compare([measured(1.0, 8)], [measured(1.0, 2, peak=None)])
    assert result["times_faster"] == 4.0 and "memory_share" not in result


def test_the_table_shows_every_comparison_and_why_one_is_missing(peers):
    found = peers.compare([measured(10.0, 4000)], [measured(20.0, 1000, peak=400)])
    full = measured(2.0, 90, full_tokens_per_second=50.0, share_of_full=0.9)
    about = {"cpu": "a processor, 2 threads", "date": "2026-01-02"}
    table = peers.markdown(
        [
            {"benchmark": "step", **found, **about},
            {"benchmark": "mixed", "ours": full, **about},
            {"benchmark": "rollout", "skipped": "there is no python", **about},
        ]
    ).splitlines()
    assert table[2] == "| step | 400 | 50 | **8.0** | 10.0 / 20.0 | 4000 / 1000 | 100 / 400 |"
    assert table[3] == "| mixed | 45 | 50 (full rows) | 90% of full | 2.0 | 90 | 100 |"
    assert table[4].startswith("| rollout | there is no python |")
    assert {line.count("|") for line in table[:5]} == {8}
    assert table[-1] == "a processor, 2 threads, 2026-01-02"


# ---- workers -------------------------------------------------------------------------------------


def test_every_worker_takes_the_flags_that_the_driver_gives_it(peers, monkeypatch):
    argv = ["--model", str(BENCHMARKS), "--new-tokens", "7", "--steps", "3"]
    args = peers.arguments(argv)
    args.model = PARSED["model"]
    for comparison in peers.COMPARISONS:
        for worker in filter(None, (comparison.ours, comparison.other)):
            script, *flags = peers.flags_of(worker, args)
            parsed = vars(load_script(Path(script), monkeypatch).arguments(flags))
            assert {name: parsed.get(name, wanted) for name, wanted in PARSED.items()} == PARSED
            if comparison.name.startswith("step"):
                assert parsed["steps"] == 3
                assert parsed["fixed_length"] == (comparison.name != "step-free")


def test_prompts_have_the_length_asked_for_whatever_the_tokenizer(monkeypatch):
    workload = load_script(BENCHMARKS / "peers" / "workload.py", monkeypatch)
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    for length in (3, 1000):
        rows = workload.prompts(tokenizer, 2, length, first=5)
        assert [len(ids) for ids in rows] == [length, length]
    assert rows == workload.prompts(tokenizer, 4, 1000, first=4)[1:3]
    end = tokenizer(workload.messages(6)[-1]["content"]).input_ids
    assert rows[1][-len(end) :] == end


def run_driver(*flags):
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), *flags], capture_output=True, text=True
    )


def test_a_run_measures_ours_and_says_in_a_line_which_peer_is_not_there(directory, tmp_path):
    """One run on a tiny model: mixed lengths, and a peer whose environment was not made."""
    table = tmp_path / "table.md"
    done = run_driver(
        *("--model", directory, "--rounds", "1", "--only", "vllm", "mixed"),
        *("--new-tokens", "4", "--vllm", str(tmp_path / "none")),
        *("--markdown", str(table)),
    )
    assert done.returncode == 0, done.stderr
    missing, mixed = (json.loads(line) for line in done.stdout.splitlines())
    assert "none" in missing["skipped"] and "ours" not in missing
    lengths = mixed["ours"]["lengths"]
    assert lengths[0] < 60 and lengths[2] > 340 and 150 < lengths[1] < 270
    assert mixed["ours"]["tokens"] == pytest.approx(96 * lengths[1], rel=0.01)
    assert mixed["ours"]["share_of_full"] > 0 and mixed["ours"]["peak_rss_mb"] > 50
    assert "mixed, round 1 of 1, ours: started" in done.stderr
    assert len(table.read_text().splitlines()) == 6


def test_a_worker_that_fails_is_told_and_the_others_go_on(peers, directory, monkeypatch, capfd):
    failing = peers.Comparison("a", "a", ("no_such_worker.py",))
    working = peers.Comparison("b", "b", ("ours_step.py", "--fixed-length"))
    monkeypatch.setattr(peers, "COMPARISONS", (failing, working))
    status = peers.main(
        ["--model", directory, "--rounds", "1", "--new-tokens", "4", "--steps", "1"]
    )
    assert status == 1
    out, err = capfd.readouterr()
    failed, worked = (json.loads(line) for line in out.splitlines())
    assert "no_such_worker.py" in failed["failed"]
    assert worked["ours"]["tokens"] == 4 * 8 * 4 and worked["ours"]["seconds"] > 0
    assert "b, round 1 of 1, ours: step 2 of 2" in err


def test_a_model_that_is_not_there_is_told_before_any_work(tmp_path):
    done = run_driver("--model", str(tmp_path / "none"))
    assert done.returncode == 2 and "there is no such directory" in done.stderr.splitlines()[-1]
