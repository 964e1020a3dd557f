"""Weight sync by file into the real vLLM on the CPU: what the server computes afterwards, against transformers.

The servers are shared (real_servers.py), so each test begins with a sync of its own.
"""

import contextlib
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from real import CONTEXT, STARTUP, RealServer, launch
from safetensors.torch import load_file, save_file
from tiny import other_weights, save_tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo.rollout.control import PlainControl
from grpo.rollout.errors import ServerError
from grpo.sync.disk import DiskSync
from grpo.sync.verify import LogprobsDiffer, verify

pytest_plugins = ["real_servers"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TIMEOUT = 60.0
LONG = 800  # tokens of a request that lives through syncs
ATTEMPTS = 5  # at being in time: on a busy machine the server can finish before this process has its turn
PROMPTS = [[12, 7, 30, 22, 9], [3, 3, 41], [50, 8, 8, 19, 33, 2, 27]]


class Trained:
    """A model in the trainer's place: weights by seed, and what they would say of a completion."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights: dict[str, Tensor] = {}

    def draw(self, seed: int) -> dict[str, Tensor]:
        """Become other weights altogether: every layer, every norm."""
        self.weights = other_weights(self.folder, self.scratch / "drawn.safetensors", seed=seed)
        missing, unexpected = self.model.load_state_dict(self.weights, strict=False)
        assert set(missing) <= {"lm_head.weight"}
        assert not unexpected
        self.model.tie_weights()
        return self.weights

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach() if dtype is None else parameter.detach().to(dtype)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], tokens: list[int]) -> Tensor:
        """Of each completion token, float32 [len(tokens)]."""
        logits_TV = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0]
        logprobs_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        return logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]


class Rig:
    """One real server, the trained model beside it, and the sync between them."""

    def __init__(self, server: RealServer, scratch: Path, dtype: torch.dtype = torch.float32) -> None:
        self.trained = Trained(server.model, scratch)
        self.control = PlainControl(server.url)
        self.sync = DiskSync(
            folder=str(scratch / "weights"),
            fallback=scratch,
            controls=[self.control],
            policy=self.trained,
            dtype=dtype,
            pause="keep",
            timeout=TIMEOUT,
        )

    def close(self) -> None:
        self.sync.close()

    def generate(self, prompt: list[int], *, max_tokens: int = 12, seed: int = 1) -> dict[str, Any]:
        params = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 0, "seed": seed, "ignore_eos": True}
        body = {"token_ids": prompt, "sampling_params": params}
        choice: dict[str, Any] = self.control.post("/inference/v1/generate", json=body, timeout=TIMEOUT)["choices"][0]
        return choice

    def worst(self) -> float:
        """Largest |server's logprob - ours| over a few sampled completions."""
        return max(self.difference(prompt, self.generate(prompt, seed=seed)) for seed, prompt in enumerate(PROMPTS))

    def difference(self, prompt: list[int], choice: dict[str, Any]) -> float:
        """The same of one completion."""
        theirs = torch.tensor([row["logprob"] for row in choice["logprobs"]["content"]])
        return (self.trained.logprobs(prompt, choice["token_ids"]) - theirs).abs().max().item()

    def version(self) -> str:
        return str(self.control.get("/weight_info", timeout=TIMEOUT)["weight_version"])

    def paused(self) -> bool:
        return bool(self.control.get("/is_paused", timeout=TIMEOUT)["is_paused"])


@pytest.fixture(scope="module", params=["untied", "tied"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    server: RealServer = request.getfixturevalue(f"{request.param}_server")
    with contextlib.closing(Rig(server, tmp_path_factory.mktemp("scratch"))) as rig:
        yield rig


def test_server_computes_with_the_weights_that_were_sent(rig: Rig) -> None:
    """Repeatedly, each time with entirely other weights: what a first update leaves behind must not be in the way."""
    for version, seed in enumerate((11, 12, 13)):
        rig.trained.draw(seed)
        if version == 0:
            assert rig.worst() > 0.1  # the server has its own weights still, so the test can fail
        timings = rig.sync.sync(version)
        assert rig.version() == str(version)
        assert rig.worst() < 1e-4
        assert timings.bytes == sum(w.numel() * 4 for w in rig.trained.weights.values())
        assert 0 < timings.paused_s <= timings.total_s
    assert [f.name for f in rig.sync.folder.iterdir()] == ["lock"]


def test_the_tensor_that_a_server_has_not_is_named(rig: Rig) -> None:
    """Law 8: each kind of layer, packed ones by their part; asking changes nothing."""
    ours = rig.trained.draw(14)
    rig.sync.sync(0)
    (url,) = [control.url for control in rig.sync.controls]
    assert re.search(rf" {len(ours)} of {len(ours)} tensors, none is off", rig.sync.suspects(url))
    for part in ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "mlp.down_proj", "layernorm", "embed_tokens"):
        name = next(name for name in ours if part in name)
        parameter = rig.trained.model.get_parameter(name)
        with torch.no_grad():
            parameter[-1] += 0.1
        assert rig.sync.suspects(url).endswith(f" 1 off: {name}")
        with torch.no_grad():
            parameter[-1] -= 0.1
    assert rig.version() == "0"
    assert rig.worst() < 1e-4


def test_every_token_of_requests_that_live_through_syncs_is_of_its_labelled_version(rig: Rig) -> None:
    """CASES 31: with pause=keep, each token's logprob is that of a full recompute under the weights of its label."""
    rig.sync.reattach()  # again is allowed
    seeds = {20: 21, 21: 22, 22: 23, 23: 24}
    for _ in range(ATTEMPTS):
        choices = generate_through_syncs(rig, seeds)
        if all(len(choice["weight_versions"]) == len(seeds) for _, choice in choices):
            break
    else:
        pytest.fail(f"in {ATTEMPTS} attempts the requests ended before the syncs")
    for version, seed in seeds.items():
        rig.trained.draw(seed)
        for prompt, choice in choices:
            ours = rig.trained.logprobs(prompt, choice["token_ids"])
            theirs = torch.tensor([row["logprob"] for row in choice["logprobs"]["content"]])
            (span,) = [s for s in choice["weight_versions"] if s["version"] == str(version)]
            part = slice(span["start"], span["end"])
            assert span["end"] > span["start"]
            assert (ours[part] - theirs[part]).abs().max() < 1e-4, (version, span)


def generate_through_syncs(rig: Rig, seeds: dict[int, int]) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and their choices; a sync of each version but the first while they are generated, if we are in time."""
    first, *later = seeds
    rig.trained.draw(seeds[first])
    rig.sync.sync(first)
    with ThreadPoolExecutor(24) as pool:
        open_requests: list[tuple[list[int], Future[dict[str, Any]]]] = []
        for i in range(24):
            prompt = PROMPTS[i % 3]
            open_requests.append((prompt, pool.submit(rig.generate, prompt, max_tokens=LONG, seed=100 + i)))
        for version in later:
            wait_for_tokens(rig, 24 * 95)  # more than vLLM computes at once (2048), when all are computed again
            rig.control.post("/pause", params={"mode": "keep"}, timeout=TIMEOUT)  # drawing may take long beside others
            rig.trained.draw(seeds[version])
            rig.sync.sync(version)
        return [(prompt, request.result(timeout=120)) for prompt, request in open_requests]


def test_pause_wait_lets_open_requests_finish_and_holds_new_ones_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.sync, "pause", "wait")
    rig.trained.draw(71)
    rig.sync.sync(70)

    def late() -> dict[str, Any]:
        while not rig.paused():
            time.sleep(0.001)
        with ThreadPoolExecutor(1) as own:
            answer = own.submit(rig.generate, PROMPTS[0], seed=90)
            with pytest.raises(TimeoutError):
                answer.result(timeout=0.2)  # a paused server does not answer
            waiting.set()
            return answer.result(timeout=120)

    waiting = threading.Event()
    transfer = rig.sync.transfer

    def once_one_waits(version: int) -> None:
        assert waiting.wait(TIMEOUT)
        transfer(version)

    monkeypatch.setattr(rig.sync, "transfer", once_one_waits)
    with ThreadPoolExecutor(13) as pool:
        early = [pool.submit(rig.generate, PROMPTS[0], max_tokens=200, seed=80 + i) for i in range(12)]
        wait_for_tokens(rig, 12 * 20)
        held_back = pool.submit(late)
        rig.trained.draw(72)
        rig.sync.sync(71)
        after = held_back.result(timeout=120)
        before = [request.result(timeout=120) for request in early]
    assert [(s["version"], s["start"]) for c in before for s in c["weight_versions"]] == [("70", 0)] * 12
    assert [(s["version"], s["start"]) for s in after["weight_versions"]] == [("71", 0)]
    assert rig.difference(PROMPTS[0], after) < 1e-4
    rig.trained.draw(71)
    assert max(rig.difference(PROMPTS[0], choice) for choice in before) < 1e-4


def wait_for_tokens(rig: Rig, tokens: int) -> None:
    """Until the server has generated so many more tokens, or has nothing left to generate."""
    start = before = generated(rig)
    still = 0  # looks in a row that saw no new token
    while (now := generated(rig)) < start + tokens and still < 300:
        still = 0 if now > before else still + 1
        before = now
        time.sleep(0.01)


def generated(rig: Rig) -> float:
    """vllm:generation_tokens_total of /metrics."""
    with urllib.request.urlopen(f"{rig.control.url}/metrics", timeout=TIMEOUT) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (
            lambda w: w.pop("model.layers.1.self_attn.k_proj.weight"),
            "1 missing: model.layers.1.self_attn.k_proj.weight",
        ),
        (lambda w: w.update({"model.layers.9.w": torch.zeros(2)}), "1 unknown: model.layers.9.w"),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(31)}),
            r"1 of another shape: model.norm.weight \[31\] not \[32\]",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_file_that_does_not_fit_is_refused_and_changes_nothing(rig: Rig, edit: Any, named: str, tmp_path: Path) -> None:
    rig.trained.draw(31)
    rig.sync.sync(30)
    weights = {k: v + 1.0 for k, v in rig.trained.weights.items()}
    edit(weights)
    save_file(weights, tmp_path / "odd.safetensors")
    rig.sync.start(rig.control)
    with pytest.raises(ServerError, match=named):
        update(rig, tmp_path / "odd.safetensors")
    assert rig.version() == "30"
    assert rig.worst() < 1e-4
    rig.trained.draw(32)
    rig.sync.sync(31)
    assert rig.worst() < 1e-4


def update(rig: Rig, path: Path) -> None:
    rig.control.post("/update_weights", json={"update_info": {"path": str(path)}}, timeout=TIMEOUT)


def test_file_that_is_no_safetensors_is_refused(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x80\x04pickle?")
    for path in (tmp_path / "x", tmp_path / "absent"):
        rig.sync.start(rig.control)
        with pytest.raises(ServerError, match="cannot be read as safetensors"):
            update(rig, path)


def test_update_without_a_file_is_no_new_version(rig: Rig) -> None:
    """A finish that brought nothing fails, and the update that it leaves open is closed by the next sync."""
    rig.trained.draw(41)
    rig.sync.sync(40)
    rig.sync.start(rig.control)
    with pytest.raises(ServerError, match="without an update_weights"):
        rig.control.post("/finish_weight_update", json={"weight_version": "41"}, timeout=TIMEOUT)
    assert rig.version() == "40"
    rig.trained.draw(42)
    rig.sync.sync(41)
    assert rig.worst() < 1e-4


def test_failed_sync_leaves_the_server_running_with_its_old_weights(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.trained.draw(51)
    rig.sync.sync(50)

    def truncated(version: int) -> None:
        DiskSync.prepare(rig.sync, version)
        file = rig.sync._file(version)
        weights = load_file(file)
        weights.pop("model.embed_tokens.weight")
        save_file(weights, file)

    monkeypatch.setattr(rig.sync, "prepare", truncated)
    with pytest.raises(ServerError, match=r"update_weights.*1 missing: model\.embed_tokens\.weight"):
        rig.sync.sync(51)
    monkeypatch.undo()
    assert not rig.paused()
    assert rig.version() == "50"
    assert rig.worst() < 1e-4
    rig.trained.draw(52)
    rig.sync.sync(51)
    assert rig.version() == "51"
    assert rig.worst() < 1e-4


def test_trainer_of_another_model_is_refused_at_the_handshake(rig: Rig) -> None:
    shapes = {"model.embed_tokens.weight": [8, 8]}
    with pytest.raises(ServerError, match="the trainer's model does not fit the served model"):
        rig.control.post("/init_weight_transfer_engine", json={"init_info": {"shapes": shapes}}, timeout=TIMEOUT)
    rig.trained.draw(61)
    rig.sync.sync(60)
    assert rig.worst() < 1e-4


# ---- float32 masters, a bfloat16 server ----


def test_a_bfloat16_server_holds_the_masters_rounded_once(tmp_path: Path) -> None:
    """Bit for bit where vLLM's CPU backend keeps a tensor as it came. Linear layers are packed there: of those the bits
    that were sent are compared, and what the layer computes."""
    model = save_tiny_model(tmp_path / "model", tied=False, max_length=CONTEXT)
    server = launch(model, log=tmp_path / "server.log", dtype="bfloat16")
    try:
        server.wait_ready(STARTUP)
        with contextlib.closing(Rig(RealServer(server.url, model, False), tmp_path, torch.bfloat16)) as rig:
            rig.trained.draw(81)
            with pytest.raises(LogprobsDiffer):  # its own weights still, so the test can fail
                probe(rig)
            rig.sync.sync(0)
            masters = rig.trained.draw(82)
            timings = rig.sync.sync(1)
            rounded = {name: weight.to(torch.bfloat16) for name, weight in masters.items()}
            assert not any(
                torch.equal(rounded[name].float(), weight) for name, weight in masters.items() if weight.ndim > 1
            )
            assert timings.bytes == sum(2 * weight.numel() for weight in masters.values())
            rig.sync.prepare(2)
            sent = load_file(rig.sync._file(2))
            rig.sync.cleanup(2)
            assert sent.keys() == rounded.keys()
            held = held_by(rig, tmp_path / "held")
            kept = rounded.keys() & held.keys()
            assert {name for name in rounded if "_proj" not in name} == kept
            for name, weight in rounded.items():
                assert torch.equal(sent[name].view(torch.int16), weight.view(torch.int16)), name
                if name in kept:
                    there = held[name][: len(weight)]  # vLLM pads the vocabulary
                    assert torch.equal(there.view(torch.int16), weight.view(torch.int16)), name
            assert re.search(rf" {len(rounded)} of {len(rounded)} tensors, none is off", rig.sync.suspects(server.url))
            assert rig.version() == "1"
            probe(rig)
    finally:
        server.stop()


def probe(rig: Rig) -> None:
    """The proof of a sync, in the server's dtype."""
    ours, theirs = [], []
    for seed, prompt in enumerate(PROMPTS):
        choice = rig.generate(prompt, seed=seed)
        ours += rig.trained.logprobs(prompt, choice["token_ids"]).tolist()
        theirs += [row["logprob"] for row in choice["logprobs"]["content"]]
    verify(ours=ours, theirs=theirs, versions=[1] * len(ours), version=1, dtype="bfloat16", url=rig.control.url)


def held_by(rig: Rig, folder: Path) -> dict[str, Tensor]:
    """The tensors of the server's model that are not packed, by vLLM's names."""
    folder.mkdir()
    rig.control.post("/collective_rpc", json={"method": "save_sharded_state", "args": [str(folder)]}, timeout=TIMEOUT)
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
