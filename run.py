"""python run.py [group=name] [key=value] ...    one run, or with -m a sweep; README.md shows how, conf/ what there is.

The only place with Hydra (and grpo/preflight.py): checks the configuration, claims the run folder, makes the objects,
lets the trainer run, and writes how it ended, whatever happened. Heavy imports wait until the checks have passed.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from grpo import cli, distributed, preflight, sweep
from grpo.claim import claim, discard, fingerprints, note_end, task_overrides
from grpo.data.counts import dry_lines, lines
from grpo.mask import masked
from grpo.rollout import kept  # by its module: launchers pickle this file's globals for their jobs' processes
from grpo.signals import Interrupted, Signals

if TYPE_CHECKING:
    from grpo.data.base import LoadedData
    from grpo.evaluate import Evaluation
    from grpo.record import Recorder
    from grpo.trainer import Trainer
    from grpo.watchdog import Watchdog

ROOT = Path(__file__).resolve().parent
log = logging.getLogger("run")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """One run. Returns the last evaluation's mean reward, for sweepers that optimise."""
    hydra_cfg = HydraConfig.get()
    folder = Path(hydra_cfg.runtime.output_dir)
    in_sweep = hydra_cfg.mode == RunMode.MULTIRUN
    with contextlib.ExitStack() as stack:
        try:
            distributed.check_command(multirun=in_sweep)
            before = sweep.before(folder, cfg) if in_sweep and not cfg.dry_run else sweep.Before()
            if before.summary is not None:
                sweep.skip(hydra_cfg.job.num)
                return before.summary.get("objective")
            if in_sweep and not cfg.dry_run:
                stack.enter_context(sweep.surroundings(cfg, hydra_cfg))
            plan = preflight.check(cfg, ROOT)
            if cfg.dry_run:
                print("\n".join(plan.lines()), flush=True)
                print("\n".join(dry_lines(plan.data, plan.model_path, cfg.seed)))
                discard(folder)
                return None
            resume = (
                cli.last_checkpoint(folder, plan.train.steps)
                if before.checkpoint
                else cli.checkpoint_of(cfg.resume, plan.train.steps)
            )
            preflight.check_reachable(plan.rollout.urls)
            loaded = None
            if resume is not None:  # before the folder is touched: other rows refuse it
                from grpo.build import load_data

                loaded = load_data(plan.data, plan.model_path, cfg.seed, resume, forced=cfg.resume_force)
            signals = stack.enter_context(Signals())
            signals.deferred = True  # until there is a record of how it ended
            go_on = stack.enter_context(claim(folder, cfg, hydra_cfg, resume, again=in_sweep))
            if resume is None:
                signals.last_words = lambda signum: note_end(folder, Interrupted(signum))
        except ValueError as error:
            if in_sweep:  # the sweep goes on with its other jobs
                raise sweep.refuse(folder, cfg, hydra_cfg, error) from error
            discard(folder)
            print(f"error: {cli.explain(error)}", file=sys.stderr)
            sys.exit(2)
        return run(plan, cfg, folder, task_overrides(hydra_cfg), signals, resume, loaded, go_on)


def run(
    plan: preflight.Plan,
    cfg: DictConfig,
    folder: Path,
    overrides: list[str],
    signals: Signals,
    resume: Path | None = None,
    loaded: "tuple[Any, LoadedData] | None" = None,
    go_on: Callable[[], None] = lambda: None,
) -> float | None:
    """Train, and record the ending: finished, failed or interrupted.

    signals: entered and deferred. resume: with the data as `loaded`, and what is done when the run does go on.
    """
    from grpo import report
    from grpo.evaluate import Evaluation
    from grpo.record import Recorder, environment
    from grpo.rollout.errors import ServerError
    from grpo.summary import print_table, summarize
    from grpo.tracebacks import in_brief
    from grpo.watchdog import stacks_on_signal

    config: dict[str, Any] = masked(OmegaConf.to_container(cfg, resolve=True))
    facts = {**environment(ROOT), "name": cfg.name, "overrides": overrides, "folder": str(folder)}
    position = None
    if resume is not None:
        from grpo.checkpoint import inspect

        position = inspect(resume)
    recorder = Recorder(
        folder,
        steps=0 if plan.evaluating else plan.train.steps,
        mirror=plan.mirror,
        facts=facts,
        resumed_at=position["step"] if position else None,
        config=config,
    )
    started = time.monotonic()
    trainer: Trainer | Evaluation | None = None
    failure: BaseException | None = None
    state, reason = "failed", ""
    signals.last_words = lambda signum: recorder.cut_short(Interrupted(signum))
    with stacks_on_signal(folder / "run.log"):
        try:
            with contextlib.ExitStack() as stack:
                try:
                    signals.deferred = False
                    signals.check()
                    with distributed.explained():
                        trainer = make(plan, config, folder, recorder, signals, stack, resume, loaded)
                        signals.deferred = not plan.evaluating  # which has no step to finish
                        if resume is not None and not isinstance(trainer, Evaluation):

                            def goes_on() -> None:
                                go_on()
                                recorder.cut_back()

                            trainer.goes_on = goes_on
                        with watchdog_of(trainer, plan.train.watchdog):
                            reason = trainer.run()
                    state = "finished"
                except Interrupted as ending:
                    state, failure, reason = "interrupted", ending, str(ending)
                    log.warning("%s", ending)
                except BaseException as error:
                    failure = error
                    reason = in_brief(error)
                    log.error("the run failed", exc_info=error)
                    if signals.received is not None and isinstance(error, ServerError):
                        # Who ends a job often signals every process of it: the servers have gone first, that is all.
                        state, failure = "interrupted", Interrupted(signals.received)
                        reason = f"{failure}; {reason}"
                signals.deferred = True  # the first signal from here on ends nothing that ends by itself
                kept.servers.ended(failure, synced=trainer is None or not trainer.weights.broken_off)
                if trainer is not None and state != "finished":
                    trainer.try_save()
                if trainer is not None:
                    trainer.display.close()
        except BaseException as error:
            log.exception("the run could not be closed in order")
            if failure is None:
                state, failure, reason = "failed", error, in_brief(error)
        summary = summarize(recorder, trainer, state=state, reason=reason, seconds=time.monotonic() - started)
        recorder.finish(state, summary, failure)
        page: Path | None = None
        try:
            page = report.build_run(folder)
        except OSError as error:  # the disk is full
            print(f"error: no report: {error}", file=sys.stderr)
        print_table(summary, folder, page)
    if isinstance(failure, Interrupted):
        sys.exit(128 + failure.signum)
    if failure is not None:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise sweep.failed(folder, reason, cfg) from failure
        print(f"error: {reason.splitlines()[0]}\n(the traceback is in {folder}/run.log)", file=sys.stderr)
        sys.exit(1)
    objective = summary.get("objective")
    return float(objective) if objective is not None else None


def watchdog_of(trainer: "Trainer | Evaluation", seconds: float) -> "Watchdog":
    """Speaks when no answer has come and the trainer is where it was."""
    from grpo.watchdog import Watchdog

    loader = trainer.loader

    def where() -> str:
        sync = getattr(trainer.weights, "phase", "none")
        return (
            f"the trainer is at: {trainer.phase} (sync: {sync}); {loader.where()}; {loader.scorer.open} completions "
            f"are being scored; servers out: {loader.client.roster.out or 'none'}"
        )

    def progress() -> object:
        return loader.client.answered, loader.scorer.open, trainer.phase, trainer.recorder.status["step"]

    return Watchdog(seconds, progress=progress, where=where)


def make(
    plan: preflight.Plan,
    config: dict[str, Any],
    folder: Path,
    recorder: "Recorder",
    signals: Any,
    stack: contextlib.ExitStack,
    resume: Path | None,
    loaded: "tuple[Any, LoadedData] | None",
) -> "Trainer | Evaluation":
    """Every object of a run, wired. What must be closed is closed by `stack`, in reverse order."""
    from grpo.progress import Display

    train, rollout, sync, model = plan.train, plan.rollout, plan.sync, plan.model
    display = Display(recorder.status["steps"], first_step=recorder.status["step"])
    stack.callback(display.close)
    for line in plan.lines():
        log.info("%s", line)
    # The servers start while we import and load.
    clock = time.monotonic()
    stack.callback(kept.servers.give_back)
    servers = kept.servers.take(
        rollout,
        model=plan.model_path,
        dtype=model.dtype,
        device=plan.device,
        max_model_len=plan.data.max_prompt_tokens + plan.data.max_tokens,
        backend=plan.sync_backend,
        memory=model.server_memory,
        folder=folder,
        env_set=HydraConfig.get().job.env_set,
    )
    how = "attached" if rollout.urls else "kept" if kept.servers.reused else "launched"
    recorder.update_status(servers=how)
    display.phase(f"{len(servers.urls)} server(s) {how}, loading {plan.model_path}")

    import torch
    from transformers.utils import logging as transformers_logging

    from grpo import checkpoint
    from grpo.build import load_data, make_optimizer, make_policy, make_reference
    from grpo.evaluate import Evaluation, Evaluator
    from grpo.groups import GroupRules
    from grpo.ledger import Ledger
    from grpo.optimizer import Optimizer
    from grpo.prove import Prover
    from grpo.rollout.admission import Admission
    from grpo.rollout.client import Client
    from grpo.rollout.control import LoopControl
    from grpo.rollout.loader import Loader
    from grpo.rollout.revival import Revival
    from grpo.seeds import seed_everything
    from grpo.step import Reference, TrainStep
    from grpo.sync import make_sync
    from grpo.token_record import recorder_of, replay_facts
    from grpo.trainer import Trainer
    from grpo.types import Sampling

    transformers_logging.disable_progress_bar()  # it would break into the display
    seed = config["seed"]
    seed_everything(seed)
    threads = train.threads or max(
        1, len(os.sched_getaffinity(0)) // 2 // (plan.place.local_ranks if plan.place else 1)
    )
    if plan.device == "cpu":
        torch.set_num_threads(threads)
    stack.callback(distributed.close_team)
    team = distributed.open_team(plan.device, threads)
    if team is not None:
        signals.also = team.check
        signals.echo_s = distributed.ECHO
        recorder.update_status(ranks=team.ranks)
    tokenizer, data = loaded or load_data(plan.data, plan.model_path, seed)
    recorder.update_status(data=data.report, model=plan.model_path)
    for line in lines(data.report):
        log.info("%s", line)
    if plan.evaluating and not data.evals:
        raise ValueError(
            "data: no row is held out (at most a fifth of the rows would be), so mode=eval has nothing to evaluate; "
            "name a set: data.evals.<name>.path=<file>"
        )
    state = checkpoint.load(resume) if resume is not None else None
    position = state["progress"] if state else {}
    rows = fingerprints(data.report)
    if state:
        # after whole steps it is this; with another train.batch_size (resume_force) it must be
        position["places"] = position["version"] * plan.groups_per_step
    policy = make_policy(
        plan.model_path,
        model,
        plan.device,
        checkpoint=resume,
        tokenizer=tokenizer,
        trainable=not plan.evaluating,
        team=team,
    )
    reference: Reference | None = None
    optimizer: Optimizer | None = None
    if plan.loss.needs_reference and not plan.evaluating:
        reference = make_reference(plan.model_path, model, plan.device, policy, team)
    if not plan.evaluating:
        optimizer = make_optimizer(policy, model, train, team)
    if state and optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        checkpoint.set_rng_state(state["rng"])
    recorder.add_time("load_model", time.monotonic() - clock)

    stops = sorted({*policy.eos_token_ids, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])})
    sampling = Sampling(rollout.temperature, plan.data.max_tokens, None, tuple(rollout.stop), tuple(stops))
    ledger = Ledger(position.get("ledger"))
    servers.wait_ready(rollout.startup_timeout)
    recorder.add_time("server_start", time.monotonic() - clock)
    client = Client(
        servers.urls,
        vocab_size=policy.vocab_size,
        request_timeout=rollout.request_timeout,
        retries=rollout.retries,
        api_key=rollout.api_key,
    )
    rules = GroupRules(
        loss=plan.loss,
        zero_variance=rollout.zero_variance,
        limit=rollout.zero_variance_batches * plan.groups_per_step,
    )
    scorer = stack.enter_context(plan.data.rewards())
    environments = plan.data.environments(tokenizer, stops)
    if environments is not None:
        stack.enter_context(environments)
    if train.record_tokens:
        recorder.tokens = recorder_of(folder, replay_facts(config, plan.model_path, scorer.weights), tokenizer)
    loader = Loader(
        source=data.train,
        client=client,
        scorer=scorer,
        environments=environments,
        admission=Admission(
            groups_per_step=plan.groups_per_step,
            max_staleness=rollout.max_staleness,
            max_inflight=rollout.max_inflight,
            total_groups=train.steps * plan.groups_per_step,
            version=position.get("version", 0),
            places=position.get("places", 0),
        ),
        ledger=ledger,
        sampling=sampling,
        group_size=rollout.group_size,
        seed=seed,
        seeded=rollout.seeded,
        start_group=position.get("groups", 0),
        judge=rules.judge,
        decode=lambda ids: tokenizer.decode(ids[:-1] if ids[-1] in stops else ids, skip_special_tokens=False),
        interrupted=signals.check,
    )
    stack.callback(loader.close)
    loader.start()
    weights = make_sync(
        sync,
        backend=plan.sync_backend,
        controls=[LoopControl(loader, client, url, servers.look(url)) for url in servers.urls],
        policy=policy,
        dtype=policy.dtype,
        folder=folder,
    )
    stack.callback(weights.close)
    evaluator = Evaluator(
        loader=loader,
        recorder=recorder,
        sets=data.evals,
        sampling=Sampling(train.eval_temperature, plan.data.max_tokens, None, tuple(rollout.stop), tuple(stops)),
        samples=train.eval_samples,
        timeout=train.wait_timeout,
    )
    prove = Prover(
        policy=policy,
        loader=loader,
        urls=servers.urls,
        context=plan.data.max_prompt_tokens + plan.data.max_tokens,
        vocab=len(tokenizer),
        temperature=rollout.temperature,
        dtype=model.dtype,
        seed=seed,
        timeout=sync.timeout,
        suspects=weights.suspects,
    )
    revival = Revival(
        servers=servers,
        client=client,
        loader=loader,
        weights=weights,
        proof=prove,
        restarts=rollout.restarts,
        startup_timeout=rollout.startup_timeout,
        reattach_timeout=rollout.reattach_timeout,
        changed=lambda out: recorder.update_status(servers_out=out),
    )
    if optimizer is None:
        return Evaluation(
            loader=loader,
            weights=revival,
            prove=revival.prove,
            evaluator=evaluator,
            recorder=recorder,
            ledger=ledger,
            display=display,
        )
    step_fn = TrainStep(
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        loss=plan.loss,
        ledger=ledger,
        temperature=rollout.temperature,
        minibatches=train.minibatches,
        tokens_per_microbatch=train.tokens_per_microbatch,
        reward_weights=scorer.weights,
        pad_to=policy.pad_to,
        share_prompts=train.share_prompts,
        check=loader.check,
        keep_logprobs=train.record_tokens,
    )
    return Trainer(
        step_fn=step_fn,
        loader=loader,
        weights=revival,
        signals=signals,
        prove=revival.prove,
        evaluator=evaluator,
        recorder=recorder,
        checkpoints=checkpoint.Checkpoints(
            folder / "checkpoints", keep=train.keep_checkpoints, config=config, data=rows
        ),
        ledger=ledger,
        display=display,
        steps=train.steps,
        groups_per_step=plan.groups_per_step,
        max_staleness=rollout.max_staleness,
        eval_every=train.eval_every,
        checkpoint_every=train.checkpoint_every,
        verify_every=sync.verify_every,
        wait_timeout=train.wait_timeout,
        step=position.get("step", 0),
        groups=position.get("groups", 0),
        places=position.get("places", 0),
    )


if __name__ == "__main__":
    with distributed.ranks():  # torchrun's rank 0 is the run; the others follow it and end here
        cli.start(main, sys.argv)
