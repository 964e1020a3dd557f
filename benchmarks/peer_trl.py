"""The peer of end_to_end.py: TRL's GRPOTrainer with vLLM colocated, on the same prompts, sizes and card.

    python benchmarks/peer_trl.py MODEL PROMPTS.jsonl STEPS PROMPTS_A_STEP GROUP NEW_TOKENS PROMPT_TOKENS

Its last line is a JSON object. The first two steps warm up and are not counted.
"""

import json
import random
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SKIP = 2


def main() -> None:
    model, data = sys.argv[1:3]
    steps, prompts, group, new_tokens, length = map(int, sys.argv[3:8])
    with open(data, encoding="utf-8") as file:  # noqa: PTH123
        rows = [{"prompt": json.loads(line)["prompt"]} for line in file]
    draw = random.Random(0)
    tokens: list[int] = []
    ends: list[float] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [draw.random() for _ in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

    batch = prompts * group
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=batch // 8,
            num_generations=group,
            max_completion_length=new_tokens,
            max_steps=steps,
            bf16=True,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=length + new_tokens,
            gradient_checkpointing=True,
            report_to="none",
            save_strategy="no",
            learning_rate=1e-6,
            model_init_kwargs={"dtype": "bfloat16"},
            temperature=1.0,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[Clock()],
        )
        trainer.train()
    span = ends[-1] - ends[SKIP - 1]
    counted = tokens[SKIP:steps]
    result = {
        "run": "TRL",
        "tokens_per_s": sum(counted) / span,
        "s_per_step": span / len(counted),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
