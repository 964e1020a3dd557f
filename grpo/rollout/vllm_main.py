"""The server process of a launched run: vLLM's own API server, with vLLM's own arguments.

    python -m grpo.rollout.vllm_main --model DIR --port N ...

Why not `vllm serve`: it asks for the metadata of a distribution called "vllm", which the CPU build does not have. It
would also import every other subcommand.

On a CPU, one process holds engine and worker, and it is forked, as vLLM does on a GPU, not spawned: Python, torch and
vLLM are imported once, not three times. vLLM spawns on a CPU because it binds OpenMP threads by environment; with
VLLM_CPU_OMP_THREADS_BIND=nobind there is nothing to bind.
"""

import multiprocessing
import os
from typing import Any


def main() -> None:
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        fork_engine()
    serve()


def fork_engine() -> None:
    """Import what the engine process needs before it forks, and let it fork."""
    import vllm.v1.engine.core
    import vllm.v1.engine.utils as launching
    import vllm.v1.worker.cpu_worker  # noqa: F401

    def context() -> Any:
        return multiprocessing.get_context("fork")

    launching.get_mp_context = context


if __name__ == "__main__":
    main()
