"""The limit of generation.py: vLLM's own offline engine in one process, on the same prompts and sizes, without HTTP.

    python benchmarks/peer_vllm.py ARGUMENTS.json PROMPTS.json NEW_TOKENS REPEATS

ARGUMENTS: of `vllm.LLM`. PROMPTS: lists of token ids. Its last line is a JSON object with the seconds of each repeat,
after one that warms up, and the tokens of one.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    arguments = json.loads(Path(sys.argv[1]).read_text())
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(sys.argv[2]).read_text())]
    new_tokens, repeats = int(sys.argv[3]), int(sys.argv[4])
    engine = LLM(**arguments)
    sampling = SamplingParams(temperature=1.0, max_tokens=new_tokens, logprobs=0, ignore_eos=True, detokenize=False)
    seconds, tokens = [], 0
    for _ in range(repeats + 1):
        started = time.perf_counter()
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    print(json.dumps({"seconds": seconds[1:], "tokens": tokens}))


if __name__ == "__main__":
    main()
