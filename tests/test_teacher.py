"""A teacher's answers from an endpoint: a stub server on this machine stands in for it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

import pytest
from tiny import letters_task

import data
import data.endpoint
from data import Example
from data.endpoint import Endpoint, Pace
from data.sft_file import read_sft_file
from data.teacher import Settings, answers, collect, main, parse
from grpo.errors import UserError

KEY = "sk-secret-4711"
LETTERS = tuple("abcdef")


def completion(text, reason="stop"):
    return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}


class Stub:
    """answer(number of the request, its body) -> (status, headers, reply); JSON unless bytes."""

    def __init__(self, answer):
        self.answer, self.requests, lock = answer, [], threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stub.requests.append((self.path, dict(self.headers), body))
                    number = len(stub.requests)
                status, headers, reply = stub.answer(number, body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    @property
    def asked(self):
        return [body["messages"][-1]["content"] for _, _, body in self.requests]


@pytest.fixture
def stub():
    stubs = []

    def make(answer):
        stubs.append(Stub(answer))
        return stubs[-1]

    yield make
    for each in stubs:
        each.server.shutdown()
        each.server.server_close()


class Clock:
    """Time that passes in sleep() alone."""

    def __init__(self):
        self.now, self.slept, self.lock = 100.0, [], threading.Lock()

    def sleep(self, seconds):
        with self.lock:
            self.slept.append(seconds)
            self.now += seconds

    def pace(self, per_minute=0):
        return Pace(per_minute, lambda: self.now, self.sleep)


def endpoint(url, clock=None, **changes):
    about = dict(model="m", key=KEY, max_tokens=5, temperature=0.5, timeout=20.0)
    return Endpoint(url, pace=(clock or Clock()).pace(), **{**about, **changes})


def right(number, body):
    return 200, {}, completion(body["messages"][-1]["content"] * 2)


def settings(tmp_path, **changes):
    return Settings(**{"model": "m", "output": str(tmp_path / "out.jsonl"), **changes})


def run(tmp_path, server, prompts=LETTERS, **changes):
    task = letters_task(len, prompts=prompts)
    return collect(settings(tmp_path, **changes), task, endpoint(server.url).ask)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


HELLO = [{"role": "user", "content": "a"}]


# -- one answer ---------------------------------------------------------------------------------


def test_a_request_is_a_chat_completion_with_the_key(stub):
    server = stub(lambda number, body: (200, {}, completion("hi", "length")))
    reply = endpoint(server.url).ask(HELLO)
    assert (reply.text, reply.cut) == ("hi", True)
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body == {"model": "m", "messages": HELLO, "max_tokens": 5, "temperature": 0.5}
    endpoint(server.url, key="").ask(HELLO)
    assert "Authorization" not in server.requests[1][1]


@pytest.mark.parametrize(
    "failures, slept",
    [
        ([(429, {"Retry-After": "7"}, b"")], [7.0]),
        ([(429, {}, b""), (503, {"Retry-After": "3"}, b"")], [1.0, 3.0]),
        ([(500, {}, b"oops")] * 3, [1.0, 2.0, 4.0]),
        ([(200, {}, b"<html>"), (200, {}, {"choices": []}), (200, {}, [])], [1.0, 2.0, 4.0]),
        ([(200, {}, {"choices": [{"message": {"content": ["a"]}}]})], [1.0]),
    ],
)
def test_what_may_pass_is_tried_again_after_the_pause_that_is_asked_for(stub, failures, slept):
    server = stub(lambda n, body: failures[n - 1] if n <= len(failures) else right(n, body))
    clock = Clock()
    assert endpoint(server.url, clock).ask(HELLO).text == "aa"
    assert clock.slept == slept and len(server.requests) == len(failures) + 1


def test_a_server_that_stays_ill_is_given_up(stub):
    server, clock = stub(lambda number, body: (500, {}, b"out of order")), Clock()
    with pytest.raises(UserError, match="HTTP 500 .*out of order; given up after 6 attempts"):
        endpoint(server.url, clock).ask(HELLO)
    assert clock.slept == [1, 2, 4, 8, 16]
    server = stub(lambda number, body: (429, {"Retry-After": "86400"}, b"quota"))
    with pytest.raises(UserError, match="wait for 86400 s"):
        endpoint(server.url, clock).ask(HELLO)
    assert len(server.requests) == 1


def test_nobody_there_is_told(stub):
    server = stub(right)
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(UserError, match="no answer .*refused"):
        endpoint(server.url).ask(HELLO)


@pytest.mark.parametrize("status, words", [(401, "--key-variable"), (404, "--model"), (400, "400")])
def test_what_will_not_pass_stops_at_once_and_the_key_is_never_repeated(stub, status, words):
    """Some servers write the key that they refuse into their answer."""
    server = stub(lambda number, body: (status, {}, f"wrong:\n Bearer {KEY}".encode()))
    with pytest.raises(UserError, match=words) as caught:
        endpoint(server.url).ask(HELLO)
    assert len(server.requests) == 1 and KEY not in str(caught.value)
    assert "wrong: Bearer ***" in str(caught.value)


def test_the_key_does_not_follow_a_redirect(stub):
    other = stub(right)
    server = stub(lambda number, body: (302, {"Location": other.url}, b""))
    with pytest.raises(UserError, match="redirects"):
        endpoint(server.url).ask(HELLO)
    assert other.requests == []


# -- the rate -----------------------------------------------------------------------------------


def test_requests_keep_to_the_rate_and_a_pause_holds_all_of_them():
    clock, starts = Clock(), []
    pace = clock.pace(per_minute=30)
    for _ in range(4):
        pace.wait()
        starts.append(clock.now)
    pace.pause(11)
    for _ in range(2):
        pace.wait()
        starts.append(clock.now)
    assert starts == [100, 102, 104, 106, 117, 119]
    clock.now += 60  # what was not used is not made up for in a burst
    pace.wait(), pace.wait()
    assert clock.now == 181
    free = Clock()
    for _ in range(5):
        free.pace().wait()
    assert free.slept == []


# -- the file -----------------------------------------------------------------------------------


def test_right_answers_are_sft_data_and_the_others_lie_beside_it_with_the_reason(stub, tmp_path):
    replies = {"a": "aa", "b": "no", "c": "cc", "d": None, "e": "ee"}
    cut = lambda text: "length" if text == "ee" else "stop"  # noqa: E731
    server = stub(lambda n, body: (200, {}, completion(
        text := replies[body["messages"][-1]["content"]], cut(text))))  # fmt: skip
    said = run(tmp_path, server, tuple(replies))
    examples = read_sft_file(tmp_path / "out.jsonl")
    assert sorted(e.target for e in examples) == ["aa", "cc"]
    assert all(e.messages[0]["content"] == e.target[0] for e in examples)
    reasons = {
        r["prompt"][0]["content"]: r["reason"] for r in rows(tmp_path / "out.rejected.jsonl")
    }
    assert reasons == {"b": "wrong", "d": "no text", "e": "cut by --max-tokens"}
    assert said.startswith("2 answers are in") and "3 that were not kept" in said


def test_all_answers_are_kept_if_asked_for_but_no_cut_one(stub, tmp_path):
    server = stub(lambda n, body: (200, {}, completion("no", "length" if n == 1 else "stop")))
    run(tmp_path, server, keep="all")
    assert len(rows(tmp_path / "out.jsonl")) == 5
    assert len(rows(tmp_path / "out.rejected.jsonl")) == 1


def test_after_a_failure_the_same_command_asks_for_the_rest_alone(stub, tmp_path):
    """Wrong answers are not paid for twice either, and a torn line is asked for again."""
    server = stub(lambda n, body: right(n, body) if n < 5 else (401, {}, b""))
    server.answer, whole = (
        (lambda n, body: (200, {}, completion("no")) if n == 2 else whole(n, body)),
        server.answer,
    )
    with pytest.raises(UserError, match="401"):
        run(tmp_path, server, concurrency=1)
    assert len(rows(tmp_path / "out.jsonl")) == 3 and server.asked == list("abcde")
    text = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(text[:-9])
    server = stub(right)
    run(tmp_path, server)
    assert sorted(server.asked) == ["d", "e", "f"]
    assert sorted(e.target for e in read_sft_file(tmp_path / "out.jsonl")) == [
        "aa", "cc", "dd", "ee", "ff"]  # fmt: skip
    run(tmp_path, server)
    assert len(server.requests) == 3, "all is there"


def test_a_refused_thread_asks_no_more_while_the_refusal_waits_to_be_read(monkeypatch):
    """On a busy machine it went on, and each further question may be paid for."""

    class Slow(SimpleQueue):
        def get(self):
            time.sleep(0.2)
            return super().get()

    def ask(messages):
        asked.append(messages)
        raise UserError("401")

    monkeypatch.setattr("data.teacher.queue.SimpleQueue", Slow)
    asked = []
    with pytest.raises(UserError, match="401"):
        next(answers(ask, [Example([], "", None)] * 5, threads=1))
    assert len(asked) == 1


def test_a_file_of_something_else_is_refused_and_left(stub, tmp_path):
    server, path = stub(right), tmp_path / "out.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(UserError, match="out.jsonl, line 1: .*--output"):
        run(tmp_path, server)
    assert path.read_text() == '{"question": "a"}\n' and server.requests == []


def test_each_prompt_is_asked_once_and_by_several_at_a_time(stub, tmp_path):
    server, two = stub(right), threading.Barrier(2, timeout=60)
    server.answer = lambda n, body: (two.wait(), right(n, body))[
        1
    ]  # hangs unless two are in flight
    run(tmp_path, server, prompts=(*LETTERS, *LETTERS), concurrency=2)
    assert sorted(server.asked) == list(LETTERS)


# -- the command --------------------------------------------------------------------------------


def test_the_command_with_a_task_s_own_flags(stub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", KEY + "\n")
    flags = ["--task", "maze", "--maze_size=3", "--maze-format", "direct", "--maze-sft", "9",
             "--url", "http://x/v1", "--model", "m", "--output", str(tmp_path / "out.jsonl"),
             "--requests-per-minute", "0", "--examples", "4",
             "--key-variable", "MY_KEY"]  # fmt: skip
    _, task = parse(flags)
    targets = {e.messages[0]["content"]: e.target for e in task.sft}
    assert len(targets) == 9 and all("moves" in prompt for prompt in targets), "with instructions"
    server = stub(lambda n, body: (200, {}, completion(targets[body["messages"][0]["content"]])))
    flags[flags.index("--url") + 1] = f"{server.url}/chat/completions/"
    assert main(flags) == 0
    assert len(read_sft_file(tmp_path / "out.jsonl")) == len(server.requests) == 4
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    printed = "".join(capsys.readouterr())
    assert "4 answers are in" in printed and "--sft-data" in printed and KEY not in printed
    assert not [p for p in tmp_path.iterdir() if KEY in p.read_text()]


@pytest.mark.parametrize(
    "argv, words",
    [
        ("--model m --output o", "--url is missing"),
        ("--url localhost --model m --output o", "http://"),
        ("--url http://x --model m --output o --task mase", "maze"),
        ("--url http://x --model m --output o --task maze --beta 1", "train.py"),
        ("--url http://x --model m --output o --keep some", "correct, all"),
        ("--url http://x --model m --output o --api-key k", "api-key"),
    ],
)
def test_a_mistake_is_told_in_one_line(argv, words, capsys):
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_it_is_not_taken_for_a_task():
    assert not {"teacher", "endpoint", "sft_file"} & set(data.task_names())
