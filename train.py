"""Train a policy with GRPO:  python train.py --task maze   (--help lists every setting)

A run goes through its stages in order, and can be stopped and resumed in any of them:

    evaluate the start → sft → evaluate → grpo → evaluate

What it leaves is in one folder: config.json, metrics.jsonl, completions/, evaluations/,
tensorboard/, checkpoints/, curves.png, results.json, and the models in sft/ and grpo/. The
algorithm is in grpo/loop.py; this file only puts the parts together.
"""

from __future__ import annotations

import logging
import sys

from grpo.config import parse
from grpo.errors import UserError


def main(argv: list[str]) -> int:
    """Exit status: 0 when done, 2 for a mistake of the user's, 130 when stopped by a signal."""
    try:
        config, options, flags = parse(argv)  # before torch is imported: a typo is told at once
        # It comes with peft, and warns when it is imported that it lacks an optional package.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        from grpo.run import dry_run, run

        return (dry_run if config.dry_run else run)(config, options, flags)
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped at once; --resume goes on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
