"""The entry point through which vLLM meets this package; vLLM calls `register` in each of its processes.

Nothing is imported before vLLM asks for the engine (`grpo.sync.disk_engine`), so that a server that does not use it
pays nothing.
"""

import contextlib

from grpo.rollout.guard import die_with_parents

BACKEND = "grpo_disk"
COMPARED = "compared with those of the trainer: "  # before what `grpo.sync.compare` found, up to a quotation mark


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "grpo_disk"}'` known; may be called again."""
    die_with_parents()  # in a server that a run launched: API server, engine process, workers, each with the one above

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "grpo.sync.disk_engine", "DiskWeightTransferEngine")
