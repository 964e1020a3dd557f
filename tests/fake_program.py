"""A program in vLLM's place for tests of server processes: answers /health, has an engine below it and one below that.

    python tests/fake_program.py PORT [--never] [--die CODE] [--stubborn] [--loose]

The engine's command line begins with VLLM::EngineCore, as vLLM's does. Everything below dies with its parent, as our
plugin has it in vLLM, but a --loose grandchild, which leaves its session and ignores SIGTERM. --never: /health never
answers. --die: it writes a traceback and exits, leaving a loose child. --stubborn: SIGTERM is ignored.
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from grpo.rollout import guard


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--never", action="store_true")
    parser.add_argument("--die", type=int)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--loose", action="store_true")
    parser.add_argument("--depth", type=int, default=2)
    options = parser.parse_args()
    if options.loose and options.depth == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        guard.die_with_parents()
    if options.depth > 0:
        below = [a for a in sys.argv[1:] if not a.startswith("--depth") and a != "--stubborn"]
        command = ["VLLM::EngineCore", __file__, *below, f"--depth={options.depth - 1}"]
        if options.die is not None:
            command = [a for a in command if a not in ("--die", str(options.die))]
        # with that name it would not find this environment's packages
        environment = {**os.environ, "PYTHONPATH": str(Path(guard.__file__).parents[2])}
        subprocess.Popen(command, executable=Path("/proc/self/exe").readlink(), env=environment)
    if options.depth < 2:
        time.sleep(3600)
    if options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.die is not None:
        while len(guard.descendants(os.getpid())) < 2:
            time.sleep(0.01)
        print("EngineError: the GPU is gone", file=sys.stderr)
        print("\n".join(f"line {i}" for i in range(100)), file=sys.stderr, flush=True)
        os._exit(options.die)
    if options.never:
        time.sleep(3600)
    http.server.HTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    main()
