#!/usr/bin/env bash
# The layouts of several GPUs, one run of `run.py` each, and a table of them:
#
#   benchmarks/multi_gpu.sh [folder]             Qwen3-4B's shape, random weights; folder: outputs/multi_gpu by default
#   benchmarks/multi_gpu.sh --tiny [folder]      a tiny model, on CPUs too: shows that the script works, measures nothing
#
# 1  trainer on GPU 0, server on GPU 1, sync=nccl, max_staleness 0, 1, 4; against trainer and server sharing one GPU
# 2  the same steps on 1 and 2 ranks, FSDP2 (ranks.py); and torchrun with a server that shares the ranks' GPUs (sync=disk)
# 3  one trainer and two servers; one trainer and a server with tensor parallel 2
# 4  the server's engine is killed in the middle of a sync: the run ends or recovers within FAULT_LIMIT seconds
# 5  1 + 3, 2 + 2 and 4 + 4 GPUs for trainer and servers
#
# Rows that need more GPUs than there are, are named and left out. Every row's command, log and run folder stay in the
# folder; the table checks the laws (bound of the lag, ledger, proven syncs) of each run. A row that fails does not stop
# the others; the exit status is then 1. ROWS="1 4" takes only some. PYTHON chooses the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$PWD/.venv/bin/python}
tiny=
if [ "${1:-}" = --tiny ]; then tiny=--tiny; shift; fi
out=${1:-outputs/multi_gpu}
rows=${ROWS:-1 2 3 4 5}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} HF_HUB_OFFLINE=1 PYTHONPATH=$PWD:$PWD/benchmarks

refuse() { echo "error: $*" >&2; exit 2; }
[ -x "$python" ] || refuse "no interpreter $python; set PYTHON"
[ ! -e "$out" ] || refuse "$out exists; give another folder"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
[ -n "$tiny" ] || [ "$gpus" -ge 2 ] || refuse "needs 2 GPUs or more, this machine has $gpus; --tiny shows the script on any machine"
mkdir -p "$out"
out=$(cd "$out" && pwd)
"$python" benchmarks/multi_gpu.py prepare "$out" $tiny || exit 1
mapfile -t common <"$out/overrides.txt"
limit=1500

row() { # row <name> <GPUs> <ranks> overrides...
  local name=$1 needed=$2 ranks=$3 command visible
  shift 3
  if [ -z "$tiny" ] && [ "$gpus" -lt "$needed" ]; then
    echo "$name: not run, needs $needed GPUs, here $gpus" | tee -a "$out/not_run.txt"
    return
  fi
  command=("$python")
  [ "$ranks" -gt 1 ] && command+=(-m torch.distributed.run --standalone --nproc-per-node "$ranks")
  command+=(run.py "${common[@]}" "$@" "hydra.run.dir=$out/$name")
  visible=$(seq -s, 0 $((needed - 1)))
  echo "$name: CUDA_VISIBLE_DEVICES=$visible ${command[*]}" | tee -a "$out/commands.txt"
  CUDA_VISIBLE_DEVICES=$visible timeout "$limit" "${command[@]}" >"$out/$name.log" 2>&1 || echo "$name: exit $?; see $out/$name.log"
}
nccl=sync=nccl ipc=sync=ipc
if [ -n "$tiny" ]; then nccl=sync=disk ipc=sync=disk; fi

for number in $rows; do
  case $number in
    1)
      row colocated_S1 1 1 "$ipc" rollout.max_staleness=1
      for staleness in 0 1 4; do row "nccl_S$staleness" 2 1 "$nccl" "rollout.max_staleness=$staleness"; done
      ;;
    2)
      shape=(--shape 4b --checkpointing full)
      [ -n "$tiny" ] && shape=(--shape tiny)
      "$python" benchmarks/ranks.py --ranks 1 2 "${shape[@]}" --out "$out/ranks.json" 2>&1 | tee "$out/ranks.log"
      row fsdp2_shared 2 2 sync=disk rollout.max_staleness=1
      ;;
    3)
      row two_servers 3 1 "$nccl" rollout.servers=2 rollout.max_staleness=1
      [ -n "$tiny" ] || row tensor_parallel_2 3 1 "$nccl" rollout.tensor_parallel=2 rollout.max_staleness=1
      ;;
    4)
      if [ -n "$tiny" ] || [ "$gpus" -ge 2 ]; then
        "$python" benchmarks/multi_gpu.py fault "$out" --limit "${FAULT_LIMIT:-600}" -- "${common[@]}" "$nccl" \
          rollout.max_staleness=1 sync.timeout=60 2>&1 | tee "$out/fault.log"
      fi
      ;;
    5)
      if [ -z "$tiny" ]; then
        row servers_1_3 4 1 "$nccl" rollout.servers=3 rollout.max_staleness=1
        row fsdp_2_2 4 2 "$nccl" rollout.servers=2 rollout.max_staleness=1
        row fsdp_4_4 8 4 "$nccl" rollout.servers=4 rollout.max_staleness=1
      fi
      ;;
    *) refuse "ROWS=$rows: 1 to 5" ;;
  esac
done
"$python" benchmarks/multi_gpu.py table "$out" $tiny
