"""A process that has imported everything forks runs of train.py: none waits for torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parent.parent
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(REPO),
}

# An order is a line of JSON: "wait" for a process, or with "poll" only look whether it has ended;
# else start one, whose number is the answer.
PROGRAM = """
import os, sys, json, traceback, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import matplotlib.pyplot, torch.utils.tensorboard, torch.distributed, train, grpo.run
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        pid, status = os.waitpid(order["wait"], os.WNOHANG if order["poll"] else 0)
        print(os.waitstatus_to_exitcode(status) if pid else "", flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.chdir(order["cwd"])
        os.environ.update(order["variables"])
        status = 1
        try:
            exec(order["before"], {"rank": int(os.environ.get("RANK", 0))})
            status = train.main(order["argv"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
    print(pid, flush=True)
"""


class ForkServer:
    """`with ForkServer(folder) as server`; the folder gets the logs."""

    def __init__(self, folder):
        self.folder, self.logs = folder, 0

    def __enter__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def fork(self, argv, cwd=".", variables=None, before=""):
        """(process number, log) of a run; before: Python that it runs first, knowing its `rank`."""
        log = self.folder / f"log-{self.logs}.txt"
        self.logs += 1
        argv = [str(word) for word in argv]
        pid = self._ask(
            argv=argv, log=str(log), cwd=str(cwd), variables=variables or {}, before=before
        )
        return int(pid), log

    def wait(self, pid):
        """The exit status, once it has ended."""
        return int(self._ask(wait=pid, poll=False))

    def poll(self, pid):
        """The exit status as text, "" while it runs."""
        return self._ask(wait=pid, poll=True)
