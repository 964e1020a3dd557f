#!/usr/bin/env bash
# Two hosts, played by two network namespaces of this machine: neither reaches the other's 127.0.0.1, and nothing else.
#
#   sudo benchmarks/two_hosts.sh [folder] [overrides of run.py]      folder: results, $PWD/outputs/two_hosts by default
#
# host-a (10.77.0.1) trains, host-b (10.77.0.2) serves vLLM, attached by its address. First the trainer is one process
# on host-a; then torchrun spans both hosts, a rank on each. The runs are synchronous (max_staleness=0), so
# they must agree: the table at the end compares every step's loss and gradient norm, and 1e-4 (relative) is the bound.
# The hosts share this machine's file system, as real ones would share a network's: sync=disk goes through sync.dir.
# PYTHON chooses the interpreter. Needs root (ip netns), iproute2 and util-linux.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
out=${1:-outputs/two_hosts}
[ $# -gt 0 ] && shift
overrides=(rollout.max_staleness=0 train.steps=6 train.eval_every=0 train.threads=1 sync.verify_every=2 "$@")

refuse() { echo "error: $*" >&2; exit 2; }
[ "$(id -u)" = 0 ] || refuse "network namespaces need root: run this with sudo"
for tool in ip unshare hostname; do command -v "$tool" >/dev/null || refuse "$tool is missing (iproute2, util-linux, hostname)"; done
[ -x "$python" ] || refuse "no interpreter $python; set PYTHON"
[ ! -e "$out" ] || refuse "$out exists; give another folder"

a=grpo-a-$$ b=grpo-b-$$
clean() {
  for host in "$a" "$b"; do
    for pid in $(ip netns pids "$host" 2>/dev/null); do kill "$pid" 2>/dev/null || true; done
  done
  for _ in $(seq 100); do
    [ -z "$(ip netns pids "$a" 2>/dev/null; ip netns pids "$b" 2>/dev/null)" ] && break
    sleep 0.2
  done
  for host in "$a" "$b"; do
    for pid in $(ip netns pids "$host" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || true; done
    ip netns del "$host" 2>/dev/null || true
    rm -rf "/etc/netns/$host"
  done
}
trap clean EXIT
ip netns add "$a" 2>/dev/null || refuse "this kernel or container allows no network namespaces"
ip netns add "$b"
ip link add eth0 netns "$a" type veth peer name eth0 netns "$b" || refuse "this kernel has no veth devices"
number=0
for host in "$a" "$b"; do
  number=$((number + 1))
  ip -n "$host" address add "10.77.0.$number/24" dev eth0
  ip -n "$host" link set eth0 up
  ip -n "$host" link set lo up # each its own
  mkdir -p "/etc/netns/$host"
  printf '127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n' >"/etc/netns/$host/hosts"
done

mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
on() { # on <namespace> <name> command...
  local host=$1 name=$2
  shift 2
  # shellcheck disable=SC2016
  ip netns exec "$host" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$name" "$@"
}

echo "host-b: vLLM"
on "$b" host-b env VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCH_COMPILE_DISABLE=1 \
  VLLM_ENABLE_V1_MULTIPROCESSING=0 "$python" -P -m grpo.rollout.vllm_main --model models/tiny --dtype float32 \
  --max-model-len 256 --max-num-seqs 256 --logprobs-mode processed_logprobs --generation-config vllm \
  --weight-transfer-config '{"backend": "grpo_disk"}' --enable-scale-out --kv-cache-memory-bytes 268435456 \
  --no-enable-chunked-prefill --enforce-eager --disable-uvicorn-access-log --host 10.77.0.2 --port 8000 \
  >"$out/server.log" 2>&1 &
server=$!
health='import urllib.request; urllib.request.urlopen("http://host-b:8000/health", timeout=2)'
for ((i = 0; ; i++)); do
  on "$a" host-a "$python" -c "$health" 2>/dev/null && break
  kill -0 "$server" 2>/dev/null || { tail -n 20 "$out/server.log" >&2; refuse "the server ended"; }
  [ "$i" -lt 600 ] || refuse "the server did not answer; see $out/server.log"
  sleep 0.5
done
if "$python" -c "${health/host-b/10.77.0.2}" 2>/dev/null; then refuse "this machine itself reaches host-b: no separate hosts"; fi

common=(run.py "${overrides[@]}" "rollout.urls=['http://host-b:8000']" "sync.dir=$out")
echo "host-a: one process"
on "$a" host-a timeout 900 "$python" "${common[@]}" "hydra.run.dir=$out/one" >"$out/one.log" 2>&1 ||
  { tail -n 20 "$out/one.log" >&2; exit 1; }

echo "host-a and host-b: torchrun, a rank on each"
rendezvous=(--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host-a:29500 --rdzv-id two_hosts)
torchrun=("$python" -m torch.distributed.run "${rendezvous[@]}" "${common[@]}" "hydra.run.dir=$out/two")
on "$b" host-b timeout 900 "${torchrun[@]}" >"$out/two_host-b.log" 2>&1 &
other=$!
status=0
on "$a" host-a timeout 900 "${torchrun[@]}" >"$out/two_host-a.log" 2>&1 || status=$?
wait "$other" || status=$?
[ "$status" -eq 0 ] || { tail -n 20 "$out"/two_host-?.log >&2; exit 1; }

"$python" - "$out" <<'CHECK'
import json
import sys
from pathlib import Path

folders = [Path(sys.argv[1]) / name for name in ("one", "two")]
one, two = ([json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders)
status = json.loads((folders[1] / "status.json").read_text())
assert (status["state"], status["ranks"], len(one)) == ("finished", 2, len(two)), status
worst = 0.0
print("step  loss, one process  loss, two hosts  norm, one process  norm, two hosts  sync s, one  sync s, two")
for x, y in zip(one, two, strict=True):
    print(f"{x['step']:4d}  {x['loss']:17.7g}  {y['loss']:15.7g}  {x['grad_norm']:17.7g}  {y['grad_norm']:15.7g}"
          f"  {x['time/sync_s']:11.3f}  {y['time/sync_s']:11.3f}")
    worst = max(worst, abs(x["loss"] - y["loss"]), abs(x["grad_norm"] / y["grad_norm"] - 1))
same = (folders[0] / "rollouts.jsonl").read_text() == (folders[1] / "rollouts.jsonl").read_text()
print(f"largest difference {worst:.2g}; completions {'the same' if same else 'NOT the same'}")
sys.exit(worst > 1e-4)
CHECK
