"""Train a policy with GRPO:  python train.py --task maze   (--help lists every setting)

A run goes through its stages in order, and can be stopped and resumed in any of them:

    evaluate the start → sft → evaluate → grpo → evaluate

What it leaves is in one folder: config.json, metrics.jsonl, completions/, evaluations/,
tensorboard/, checkpoints/, curves.png, results.json, and the models in sft/ and grpo/. The
algorithm is in grpo/loop.py; this file only puts the parts together. With several GPUs:
torchrun --nproc-per-node 2 train.py --task maze  (grpo/distributed.py).
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence

from grpo.config import Config, parse
from grpo.distributed import let_the_first_tell, silent_unless_first
from grpo.errors import exit_status


@silent_unless_first()
def main(argv: list[str]) -> int:
    """Exit status: 0 when done, 2 for a mistake of the user's, 130 when stopped by a signal."""
    goes_on = "stopped at once; --resume goes on from the last checkpoint"
    status = exit_status(train, argv, goes_on)
    if status:
        let_the_first_tell()
    return status


def train(argv: Sequence[str]) -> int:
    config, options, flags = parse(argv)  # before torch is imported: a typo is told at once
    run, dry_run = import_run(config)
    return (dry_run if config.dry_run else run)(config, options, flags)


def import_run(config: Config) -> tuple[Callable[..., int], Callable[..., int]]:
    """grpo.run's run and dry_run, with what they need of the libraries and no more."""
    if config.quantize == "none" and config.optimizer == "adamw":
        # peft imports it wherever it is installed, and with it torch's compiler: a second.
        sys.modules.setdefault("bitsandbytes", None)
    # It warns when it is imported that it lacks an optional package.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    gc.disable()  # it would look through a million new objects, for a second, and find no garbage
    from grpo.run import dry_run, run

    gc.freeze()  # nor will it look through them later
    gc.enable()
    return run, dry_run


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
