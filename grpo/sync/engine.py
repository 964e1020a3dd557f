"""The entry point through which vLLM meets this package; vLLM calls `register` in each of its processes.

Nothing is imported before vLLM asks for the engine (`grpo.sync.disk_engine`), so that a server that does not use it
pays nothing.
"""

import contextlib
import os

BACKEND = "grpo_disk"
GUARDED = "GRPO_GUARDED"  # set in the environment of a server that a run launched


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "grpo_disk"}'` known; may be called again."""
    if os.environ.get(GUARDED):
        from grpo.rollout.guard import die_with_parents

        die_with_parents()  # the API server, its engine process and that one's workers: each with the one above it

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "grpo.sync.disk_engine", "DiskWeightTransferEngine")
