"""Make models/tiny: a character-level Qwen3 of 0.44 M parameters, warm-started on the arithmetic task.

    OMP_NUM_THREADS=1 python scripts/make_tiny.py            # under a minute; writes models/tiny

The warm start is supervised: a teacher answers rightly in every example, but shows its work (the running sums) only in
some. So the policy can think, almost without error, yet mostly blurts out a guess: about a third of its samples are
right, and reinforcement learning has one plain thing to teach it. It never sees a held-out problem.

The same command writes the same bytes on the same machine: one thread, one generator, deterministic kernels. Another
CPU or another release of torch may add floats in another order (vector width, matrix library), so its weights differ
in the last bits at first and, after hundreds of steps, in more; the behaviour is the same. Another release of
transformers writes its version into config.json and generation_config.json.

Left out: evaluation during training, checkpoints, any device but the CPU. It takes a minute.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo.data import arithmetic

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789=:abcdefghijklmnopqrstuvwxyz +-*.,?"
CONTEXT = 512


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, no BOS; a character outside CHARACTERS becomes <unk>."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding puts a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, *, tied: bool, seed: int) -> Qwen3ForCausalLM:
    """A fresh float32 model; `tied` shares the embedding with the head."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=True, temperature=1.0
    )
    return model


def draw_problems(count: int, generator: torch.Generator) -> list[str]:
    """Problems of the training split, with replacement."""
    rows = arithmetic.train_rows()
    return [rows[i]["problem"] for i in torch.randint(len(rows), (count,), generator=generator).tolist()]


def completion_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str], *, thinking: bool
) -> Tensor:
    """Sum of the cross-entropies of the teacher's completion tokens, eos included; prompt tokens do not count.

    All texts of one call are of one length, so nothing is padded.
    """
    complete = arithmetic.thinking_completion if thinking else arithmetic.direct_completion
    texts = [arithmetic.prompt(problem) + complete(problem) + EOS for problem in problems]
    ids_BL = torch.tensor(tokenizer(texts)["input_ids"])
    first = len(arithmetic.prompt(problems[0]))
    logits_BLV = model(ids_BL[:, :-1]).logits[:, first - 1 :]
    return functional.cross_entropy(logits_BLV.flatten(0, 1), ids_BL[:, first:].flatten(), reduction="sum")


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    steps: int,
    batch_size: int,
    thinking_share: float,
    lr: float,
    seed: int,
) -> None:
    """Supervised steps with AdamW, a linear warm-up, and over the second half a linear decay to 0."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    warmup = 50
    thinking = round(thinking_share * batch_size)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup, (steps - step) / steps * 2)
        problems = draw_problems(batch_size, generator)
        loss = completion_loss(model, tokenizer, problems[:thinking], thinking=True)
        loss = (loss + completion_loss(model, tokenizer, problems[thinking:], thinking=False)) / batch_size
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss per example {loss.item():.3f}", flush=True)


@torch.no_grad()
def complete(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[str], *, greedy: bool
) -> list[str]:
    """One completion a problem, greedy or sampled at temperature 1 from the whole distribution."""
    ids_BL = torch.tensor(tokenizer([arithmetic.prompt(problem) for problem in problems])["input_ids"])
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output_BL = model.generate(ids_BL, attention_mask=torch.ones_like(ids_BL), max_new_tokens=32, **how)
    return tokenizer.batch_decode(output_BL[:, ids_BL.shape[1] :], skip_special_tokens=True)


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> None:
    """Print what the policy does on the 256 held-out problems."""
    torch.manual_seed(seed)
    rows = list(arithmetic.held_out_rows())
    for name, repeats, greedy in (("sampled", 4, False), ("greedy", 1, True)):
        completions = complete(model, tokenizer, [row["problem"] for row in rows] * repeats, greedy=greedy)
        right = [
            arithmetic.given_answer(completion) == row["answer"]
            for completion, row in zip(completions, rows * repeats, strict=True)
        ]
        thought = [not c.startswith(":") for c in completions]
        both = sum(r and t for r, t in zip(right, thought, strict=True))
        lengths = [len(c) for c in completions]
        print(
            f"{name:8s} held-out accuracy {sum(right) / len(right):.3f} (n = {len(right)})"
            f", thinks in {sum(thought) / len(thought):.3f}"
            f", right when it thinks {both / max(1, sum(thought)):.3f}"
            f", when it does not {(sum(right) - both) / max(1, len(right) - sum(thought)):.3f}"
            f", characters {min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(lengths):.1f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the tiny warm-started model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "models" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--thinking-share", type=float, default=0.3, help="share of the examples that show the work")
    parser.add_argument("--tied", action="store_true", help="share the embedding with the head")
    args = parser.parse_args(arguments)

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, tied=args.tied, seed=args.seed)
    train(
        model,
        tokenizer,
        steps=args.steps,
        batch_size=args.batch_size,
        thinking_share=args.thinking_share,
        lr=args.lr,
        seed=args.seed,
    )
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.out}")
    report(model, tokenizer, seed=args.seed)


if __name__ == "__main__":
    main()
