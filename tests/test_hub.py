"""--model owner/name: a server on this machine stands in for the hub, to huggingface_hub's code."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import build_model, build_tokenizer

REPO = Path(__file__).parent.parent
NAME = "somebody/tiny-model"
COMMIT = "c0" * 20


class Hub(BaseHTTPRequestHandler):
    """The few addresses that loading a model asks for."""

    folder: Path
    asked: list[str]

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        known = path.startswith((f"/{NAME}/resolve/", f"/api/models/{NAME}"))
        file = self.folder / path.rpartition("/")[2]
        if known and file.is_file():
            self.answer(200, file.read_bytes(), {"ETag": f'"{file.name}"'})
        elif known and path.startswith("/api/"):
            about = f'{{"id": "{NAME}", "sha": "{COMMIT}", "siblings": []}}'
            self.answer(200, b"[]" if "/tree/" in path else about.encode())
        else:
            code = "EntryNotFound" if known else "RepoNotFound"
            self.answer(404, b"", {"X-Error-Code": code})

    do_HEAD = do_GET

    def answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in {"X-Repo-Commit": COMMIT, **dict(headers)}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "on-the-hub"
    build_model("llama", max_position_embeddings=4096).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    handler = type("Handler", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def evaluate(name, tmp_path, **variables):
    """The real command line, with a cache of its own: huggingface_hub reads the variables once."""
    number = len(list(tmp_path.glob("run*")))
    flags = f"""--task maze --model {name} --stage eval --eval-examples 2 --prompt-format plain
        --maze-sft 10 --maze-train 10 --maze-held-out 10 --max-prompt-length 2000
        --max-completion-length 4
        --output-dir {tmp_path / f"run{number}"}"""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, REPO / "train.py", *flags.split()],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


def test_a_model_is_downloaded_from_the_hub_once_and_found_without_it_afterwards(hub, tmp_path):
    handler, endpoint = hub
    done = evaluate(NAME, tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stderr
    names = {path.rpartition("/")[2] for path in handler.asked}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not {n for n in names if n.endswith((".bin", ".pt", ".py"))}  # no pickle, no code

    handler.asked.clear()
    done = evaluate(NAME, tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert not handler.asked


def test_a_name_that_the_hub_does_not_know_is_one_line(hub, tmp_path):
    handler, endpoint = hub
    done = evaluate("somebody/else", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
    assert done.returncode == 2
    assert handler.asked
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert "--model somebody/else: cannot be loaded from the hub" in line
