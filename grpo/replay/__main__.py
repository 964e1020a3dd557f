"""Compare losses on the rollouts that a run has recorded (train.record_tokens=true), at one of its checkpoints.

    python -m grpo.replay RUN [checkpoint=20] [steps=21] [out=FILE] [device=cpu] [loss=NAME [loss.KEY=VALUE ...]] ...

    python -m grpo.replay outputs/<run>                                      the run's own loss: is it what was trained?
    python -m grpo.replay outputs/<run> loss=tis loss.cap=2 loss=gspo        two others beside it
    python -m grpo.replay outputs/<run> loss=tis,decoupled_ppo loss.cap=1,2  four: all combinations
    python -m grpo.replay outputs/<run> loss=own loss.clip_high=0.5          the run's own with a change

Each loss= begins a loss, as conf/loss/NAME.yaml has it; the loss.KEY=VALUE behind it are its own. The default is the
newest checkpoint with a recorded step after it, and that step: there the run's own loss must come out as in
metrics.jsonl. steps= takes 21, 18-21 or 18,20,21.

Exit status: 0 done, 1 the run's own loss was not reproduced, 2 a mistake in the command.
"""

import sys

from rich.console import Console

from grpo import cli
from grpo.replay import command


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(__doc__)
        return 0 if arguments else 2
    try:
        request = command.parse(arguments)
        from grpo.replay import session  # torch and transformers: after the command has been understood
        from grpo.replay.show import show

        result = session.run(request)
    except cli.MISTAKES as error:
        print(f"error: {cli.explain(error)}", file=sys.stderr)
        return 2
    show(result, Console())
    return 1 if any(step["proof"] and not step["proof"]["reproduced"] for step in result["steps"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
