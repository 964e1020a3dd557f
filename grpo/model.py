"""The policy: a transformers causal language model that computes token logprobs of packed sequences.

`Policy` loads a model, runs its layers on one pack [1, T] without padding, and takes logprobs and entropy from the
hidden states of the trained positions only (`grpo.logprobs`). That goes around the model's own head and attention, so
every load ends with a check against the model's own forward pass; a model with a feature that ours lacks (soft-capped
or scaled logits, another attention) is refused there and never trained wrongly.

The parameters are in `dtype`; float32 masters for bfloat16 live in `grpo.optimizer`. A reference policy is a second
`Policy` with `trainable=False`, so that its memory is only paid by the losses that need one. Dropout is off: with it,
the ratio of a token would be noise. Left out: adapters (`grpo.lora`), several ranks (`grpo.sharded`),
models whose checkpoints rename their parameters.
"""

import copy
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from grpo import flash4
from grpo.attention import implementation, packing
from grpo.batch import MicroBatch, Sequence, pack
from grpo.linear import accumulate_in_products
from grpo.logprobs import BlockLoss, block_rows, even_blocks, head_backward, sequence_blocks, token_logprobs
from grpo.sync.disk import write_safetensors

Checkpointing = Literal["none", "selective", "full"]


class Policy:
    """A causal language model, on one device, in evaluation mode (no dropout).

    `path` is a local directory or a hub id. `dtype` is that of parameters and layers: float32, bfloat16 or float64.
    `checkpointing` trades time for memory: "full" keeps each layer's input and its attention, whose kernels are the
    slowest for what they give, and computes the rest of the layer again in the backward pass; "selective" also keeps
    the narrow products, and computes the wide products of the MLP again.
    `compile` compiles the layers (for CUDA; worth it when micro-batches have few different T). `attention` is the
    kernel on CUDA in half precision, "torch" or "flash4". `tokenizer` is only stored, to be saved with the model.

    Raises ValueError for a model that this class would compute wrongly, naming its type.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        checkpointing: Checkpointing = "none",
        compile: bool = False,
        attention: str = "torch",
        trainable: bool = True,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if dtype not in ("float32", "bfloat16", "float64"):
            raise ValueError(f"model.dtype={dtype!r} must be float32, bfloat16 or float64")
        if checkpointing not in ("none", "selective", "full"):
            raise ValueError(f"model.checkpointing={checkpointing!r} must be none, selective or full")
        self.device, self.dtype, self.tokenizer = torch.device(device), getattr(torch, dtype), tokenizer
        self.trainable = trainable
        if attention == "flash4" and (reason := flash4.missing(self.device, self.dtype)):
            raise ValueError(f"model.attention=flash4: {reason}; or set model.attention=torch")
        self._attention = implementation(attention)
        self.model = _load(str(path), self.dtype, self._attention).eval()
        self.config = self.model.config
        self.body, self.head = self.model.base_model, self.model.get_output_embeddings()
        if not trainable:
            self.model.requires_grad_(False)
        self._place()
        self._check_forward()
        # After the check, which runs the layers with lengths and an attention that training never uses.
        layers: Any = getattr(self.body, "layers", None)
        if layers is None and (compile or checkpointing != "none"):
            raise ValueError(
                f"model type {self.config.model_type!r} has no list of layers to compile or to checkpoint: "
                f"set model.compile=false and model.checkpointing=none"
            )
        if checkpointing != "none" and trainable:
            kinds = {kind: _checkpointed(kind, checkpointing) for kind in {type(layer) for layer in layers}}
            for layer in layers:
                layer.__class__ = kinds[type(layer)]
        if compile:
            for layer in layers:
                self._compile(layer)
        # Tokens that micro-batches are filled up to: what compiled layers were specialised for stays true.
        self.pad_to: int | None = 256 if compile else None

    def _place(self) -> None:
        """Bring the parameters to where they are computed."""
        self.model.to(self.device)
        if self.trainable and self.dtype == torch.bfloat16:
            accumulate_in_products(self.body)

    def _compile(self, layer: nn.Module) -> None:
        layer.compile(dynamic=True)

    @property
    def context(self) -> int:
        """The longest sequence, prompt and completion together, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def vocab_size(self) -> int:
        """Rows of the head, which may be more than the tokenizer has tokens."""
        return int(self.head.weight.shape[0])

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a completion, as the model's generation_config.json (else config.json) names them."""
        generation = getattr(self.model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = getattr(self.config, "eos_token_id", None)
        if eos is None:
            return []
        return [int(token) for token in (eos if isinstance(eos, list) else [eos])]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to train, each once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name in a saved checkpoint, a tied head left out, each cast to `dtype` as it comes."""
        for name, parameter in self.model.named_parameters():
            weight = parameter.detach()
            yield name, weight if dtype is None else weight.to(dtype)

    def save(self, path: str | Path) -> None:
        """Write a directory that transformers and vLLM load as it is (safetensors, configuration, tokenizer)."""
        self.model.save_pretrained(path)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)

    def save_by_tensor(self, path: str | Path) -> None:
        """As `save`, for weights that are put together when they are asked for (`named_weights`), one at a time."""
        path = Path(path)
        config = copy.deepcopy(self.config)
        config.architectures, config.dtype = [type(self.model).__name__], self.dtype
        config.save_pretrained(path)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(path)
        shapes = {name: list(weight.shape) for name, weight in self.named_weights()}
        dtype = str(self.dtype).removeprefix("torch.")
        write_safetensors(path / "model.safetensors", shapes, dtype, self.named_weights(self.dtype))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(path)

    def pack(
        self,
        sequences: Seq[Sequence],
        *,
        tokens_per_microbatch: int,
        pad_to: int | None = None,
        share_prompts: bool = False,
    ) -> list[MicroBatch]:
        """Micro-batches as `logprobs` takes them, on the CPU. ValueError for a sequence longer than `context`."""
        return pack(
            sequences,
            tokens_per_microbatch=tokens_per_microbatch,
            context=self.context,
            pad_to=pad_to,
            share_prompts=share_prompts,
        )

    def hidden(self, mb: MicroBatch) -> Tensor:
        """Hidden states [N, D] at the positions that predict the trained tokens, differentiable."""
        borders = packing(mb.cu_seqlens, mb.max_seqlen, self.dtype, mb.unfold_F, mb.fold_T)
        output = self.body(input_ids=mb.ids_T[None], position_ids=mb.positions_T[None], use_cache=False, **borders)
        return output.last_hidden_state.squeeze(0).index_select(0, mb.predict_N)

    def logprobs(self, mb: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """logprobs_N of the trained tokens at the sampling temperature, and entropy_N (nats).

        Both float32 (float64 for a float64 model); the entropy is detached unless `entropy_grad`. `mb` is on
        the policy's device.
        """
        return token_logprobs(
            self.hidden(mb), self.head.weight, mb.targets_N, temperature, bias_V=self._bias, entropy_grad=entropy_grad
        )

    def backward(
        self, mb: MicroBatch, temperature: float, block_loss: BlockLoss, by_token: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of a micro-batch in one call, a product of N x V x D cheaper than through `logprobs`.

        `block_loss(logprobs, entropy, where)` is called for blocks of the N tokens, `where` being their place, and
        returns their share of the loss as a scalar; the shares add up. Either argument may take part in the gradient. A
        block holds whole sequences, unless `by_token` says that the loss is a sum over tokens of something of that
        token alone; where a sequence is too long for a block, it is all of N. Gradients are added to the parameters'.

        Returns logprobs_N and entropy_N, detached.
        """
        weight_VD, bias_V = self.head.weight, self._bias
        rows = block_rows(weight_VD)
        blocks = even_blocks(len(mb.targets_N), rows) if by_token else sequence_blocks(mb.lengths, rows)
        if blocks is None:
            logprobs_N, entropy_N = self.logprobs(mb, temperature, entropy_grad=True)
            block_loss(logprobs_N, entropy_N, slice(0, len(mb.targets_N))).backward()
            return logprobs_N.detach(), entropy_N.detach()
        hidden_ND = self.hidden(mb)
        weight_grad, bias_grad = _gradient_buffer(weight_VD), None if bias_V is None else _gradient_buffer(bias_V)
        logprobs_N, entropy_N, hidden_grad_ND = head_backward(
            hidden_ND.detach(),
            weight_VD,
            mb.targets_N,
            temperature,
            block_loss,
            blocks,
            weight_grad,
            bias_V=bias_V,
            bias_grad_V=bias_grad,
        )
        _give(weight_VD, weight_grad)
        if bias_V is not None:
            _give(bias_V, bias_grad)
        hidden_ND.backward(hidden_grad_ND)
        return logprobs_N, entropy_N

    @torch.no_grad()
    def check_shared_prompts(self) -> None:
        """Compare logprobs of random tokens with prompts shared and each with its own.

        Raises ValueError for a model with layers that, beside attention, look at a token's neighbours (convolutions,
        linear attention, state spaces): those of a shared prompt's later completions are not their own.
        """
        draw = torch.Generator().manual_seed(0)
        prompts, n = [torch.randint(self.vocab_size, (p,), generator=draw).tolist() for p in (1, 4)], 3
        ids = [(prompt, torch.randint(self.vocab_size, (n,), generator=draw).tolist()) for prompt in prompts * 2]
        rows = [Sequence(prompt, completion, [0.0] * n, [0] * n, 0.0, 0.0) for prompt, completion in ids]

        def values(share: bool) -> Tensor:  # [rows, n]
            found: dict[int, Tensor] = {}
            for mb in self.pack(rows, tokens_per_microbatch=64, pad_to=self.pad_to, share_prompts=share):
                logprobs_N = self.logprobs(mb.to(self.device), 1.0)[0]
                found |= dict(zip(mb.rows, logprobs_N.split(mb.lengths), strict=True))
            return torch.stack([found[row] for row in range(len(rows))])

        with torch.compiler.set_stance("force_eager"):  # a length that training may never have
            difference = float((values(True) - values(False)).abs().max())
        if not difference <= _bound(self.dtype):
            raise ValueError(
                f"train.share_prompts=true: with shared prompts the logprobs of model type {self.config.model_type!r} "
                f"are {difference:.2g} off, so its layers look at a token's neighbours; set train.share_prompts=false"
            )

    @property
    def _bias(self) -> Tensor | None:
        return getattr(self.head, "bias", None)

    @torch.no_grad()
    def _check_forward(self) -> None:
        """Compare with the model's own forward pass, on random tokens: first the head alone, then everything."""
        kind = self.config.model_type
        draw = torch.Generator().manual_seed(0)
        lengths = [n for n in (3, 9, 6) if n <= self.context]
        ids = [torch.randint(self.vocab_size, (n,), generator=draw).tolist() for n in lengths]
        rows = [Sequence(x[:1], x[1:], [0.0] * (len(x) - 1), [0] * (len(x) - 1), 0.0, 0.0) for x in ids]
        (mb,) = pack(rows, tokens_per_microbatch=sum(lengths), context=self.context)
        try:
            ours_N = Policy.logprobs(self, mb.to(self.device), 1.0)[0]
        except ValueError as error:  # an attention that ours refuses
            raise ValueError(f"model type {kind!r} cannot be trained: {error}; choose another model.path") from error
        own = []
        self.model.set_attn_implementation("sdpa")
        for row in ids:
            tokens = torch.tensor([row], device=self.device)
            logits = self.model(input_ids=tokens, use_cache=False).logits
            hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state
            plain = self.head(hidden)
            # Nothing but the head between the two: the same product, up to the choice of a kernel.
            if not torch.allclose(logits, plain, rtol=0, atol=1e-5 * float(plain.abs().max())):
                raise ValueError(
                    f"model type {kind!r} does something to its logits after the head (soft-capping or scaling), "
                    "which the trainer does not compute; choose another model.path"
                )
            own.append(logits[0, :-1].float().log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1))
        self.model.set_attn_implementation(self._attention)
        difference = float((torch.cat([own[row] for row in mb.rows]) - ours_N).abs().max())
        bound = _bound(self.dtype)
        if not difference <= bound:
            raise ValueError(
                f"model type {kind!r}: packed logprobs are {difference:.2g} off the model's own (bound {bound:g}), "
                "so its attention is not one that can be packed; choose another model.path"
            )


def _bound(dtype: torch.dtype) -> float:
    """Nats between two ways to a logprob. bfloat16 has 8 bits, rounded in every layer; a wrong mask is off by nats."""
    return 1e-3 if dtype != torch.bfloat16 else 0.5


def _load(path: str, dtype: torch.dtype, attention: str) -> Any:
    config = AutoConfig.from_pretrained(path)
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
    except ValueError as error:
        raise ValueError(f"model.path={path!r} (type {config.model_type!r}) cannot be trained: {error}") from error


def _gradient_buffer(parameter: Tensor) -> Tensor | None:
    """Where the head's gradient is added up: in float32, where it will be read."""
    if not parameter.requires_grad:
        return None
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        return main_grad
    if parameter.dtype == torch.bfloat16:
        return torch.zeros_like(parameter, dtype=torch.float32)
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _give(parameter: Tensor, buffer: Tensor | None) -> None:
    """Hand a buffer over that is not the parameter's own (bfloat16 without an optimizer)."""
    if buffer is None or buffer is parameter.grad or buffer is getattr(parameter, "main_grad", None):
        return
    parameter.grad = buffer.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(buffer)


def _checkpointed(layer_type: type[nn.Module], checkpointing: Checkpointing) -> type[nn.Module]:
    """A layer that computes its forward pass again in the backward pass.

    A subclass rather than a function around each layer: torch.compile then sees one piece of code for all layers, and
    leaves out of the second pass what no gradient needs (the MLP's way down).
    """
    kept: Any = _selective if checkpointing == "selective" else _full

    class Checkpointed(layer_type):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(
                super().forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=kept, **kwargs
            )

    Checkpointed.__name__ = layer_type.__name__
    return Checkpointed


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keep)


def _full() -> Any:
    return create_selective_checkpoint_contexts(list(_ATTENTION))


def _keep(_context: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    if op in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        into, out = args[-1].shape
        # Per byte kept, a product saves time in proportion to its input width: the MLP's way up is the poorest bargain.
        return CheckpointPolicy.MUST_SAVE if out <= 2 * into else CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE


_ATTENTION = {
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.grpo.flash4.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
