"""The framework's own loop around a server, with a stream and a reward that a test chooses. No Hydra, no data set."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo.checkpoint import Checkpoints
from grpo.evaluate import Evaluator
from grpo.groups import GroupRules
from grpo.ledger import Ledger
from grpo.losses import PPOClip
from grpo.losses.base import Loss
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.progress import Display
from grpo.prove import Prover
from grpo.record import Recorder
from grpo.rollout.admission import Admission
from grpo.rollout.client import Client
from grpo.rollout.control import LoopControl
from grpo.rollout.loader import Loader
from grpo.rollout.revival import Revival
from grpo.rollout.server import Servers
from grpo.seeds import seed_everything
from grpo.settings import Sync
from grpo.signals import Signals
from grpo.step import TrainStep
from grpo.sync import make_sync
from grpo.trainer import Trainer
from grpo.types import Completion, Prompt, Sampling

STARTUP = 240.0  # seconds; a busy machine imports torch for more than one minute


def prompt_ids(index: int) -> list[int]:
    return [2 + index % 40, 3 + (index * 7) % 40, 9]


def length_reward(ids: list[int]) -> float:
    return float(len(ids))


@dataclass
class Stream:
    ids: Callable[[int], list[int]] = prompt_ids
    size: int | None = None

    def prompt(self, index: int) -> Prompt | None:
        if self.size is not None and index >= self.size:
            return None
        return Prompt(index, f"row/{index}", f"p{index}", self.ids(index), {})


@dataclass
class Scorer:
    reward: Callable[[list[int]], float] = length_reward
    scored: list[tuple[int, int]] = field(default_factory=list)

    async def score(self, prompt: Prompt, completion: Completion) -> None:
        self.scored.append((completion.group, completion.index))
        completion.reward = self.reward(completion.token_ids)


@contextlib.contextmanager
def loop(
    urls: list[str],
    model_dir: Path,
    folder: Path,
    *,
    steps: int = 4,
    groups: int = 2,
    group_size: int = 4,
    max_staleness: int = 0,
    max_inflight: int = 64,
    max_tokens: int = 6,
    temperature: float = 1.0,
    lr: float = 1e-3,
    seed: int = 0,
    loss: Loss | None = None,
    minibatches: int = 1,
    zero_variance: str = "discard",
    limit: int = 100,
    stream: Stream | None = None,
    scorer: Any = None,
    retries: int = 2,
    verify_every: int = 1,
    checkpoint_every: int = 0,
    eval_every: int = 0,
    pause: str = "keep",
    timeout: float = 60.0,
    reattach_timeout: float | None = None,
    wait_timeout: float = 120.0,
    servers: Servers | None = None,
    restarts: int = 0,
    policy_dir: Path | None = None,
) -> Iterator[Trainer]:
    """A trainer, ready to run; everything is closed afterwards. `folder` is the run folder.

    timeout: seconds for a request, a phase of a sync, a proof and (without reattach_timeout) a server's return.
    """
    seed_everything(seed)
    folder.mkdir(parents=True, exist_ok=True)
    loss = loss or PPOClip()
    policy = Policy(policy_dir or model_dir)
    stop = tuple(policy.eos_token_ids)
    ledger = Ledger()
    client = Client(urls, vocab_size=policy.vocab_size, request_timeout=timeout, retries=retries)
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(contextlib.closing(Recorder(folder, steps=steps)))
        signals = Signals()
        loader = Loader(
            source=stream or Stream(),
            client=client,
            scorer=scorer or Scorer(),
            admission=Admission(
                groups_per_step=groups,
                max_staleness=max_staleness,
                max_inflight=max_inflight,
                total_groups=steps * groups,
            ),
            ledger=ledger,
            sampling=Sampling(temperature, max_tokens, None, (), stop),
            group_size=group_size,
            seed=seed,
            judge=GroupRules(loss, zero_variance, limit).judge,
            decode=lambda ids: " ".join(map(str, ids)),
            interrupted=signals.check,
        )
        stack.callback(loader.close)
        loader.start()
        settings = Sync(backend="disk", pause=pause, verify_every=verify_every, timeout=timeout, dir=str(folder))
        weights = make_sync(
            settings,
            backend="disk",
            controls=[LoopControl(loader, client, url, (servers or Servers([], urls)).look(url)) for url in urls],
            policy=policy,
            dtype=policy.dtype,
            folder=folder,
        )
        stack.callback(weights.close)
        prove = Prover(
            policy,
            loader,
            urls,
            policy.context,
            policy.vocab_size,
            temperature,
            "float32",
            seed,
            timeout,
            weights.suspects,
        )
        revival = Revival(
            servers=servers or Servers([], urls),
            client=client,
            loader=loader,
            weights=weights,
            proof=prove,
            restarts=restarts,
            startup_timeout=STARTUP,
            reattach_timeout=timeout if reattach_timeout is None else reattach_timeout,
            changed=lambda out: recorder.update_status(servers_out=out),
        )
        display = Display(steps, console=Console(quiet=True))
        yield Trainer(
            step_fn=TrainStep(
                policy=policy,
                reference=Policy(model_dir, trainable=False) if loss.needs_reference else None,
                optimizer=Optimizer(policy.parameters(), lr=lr, max_grad_norm=1.0),
                loss=loss,
                ledger=ledger,
                temperature=temperature,
                minibatches=minibatches,
                tokens_per_microbatch=64,
                reward_weights={},
                check=loader.check,
            ),
            loader=loader,
            weights=revival,
            signals=signals,
            prove=revival.prove,
            evaluator=Evaluator(loader, recorder, {}, Sampling(1.0, max_tokens, None, (), stop), 1, timeout),
            recorder=recorder,
            checkpoints=Checkpoints(folder / "checkpoints", keep=0, config={}),
            ledger=ledger,
            display=display,
            steps=steps,
            groups_per_step=groups,
            max_staleness=max_staleness,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
            verify_every=verify_every,
            wait_timeout=wait_timeout,
        )
