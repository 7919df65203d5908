#!/usr/bin/env bash
# Checks and times the CUDA path on a GPU machine without network, in under five minutes:
#
#     benchmarks/gpu.sh [--device cpu --quick] [--minutes M] [--only PREFIX ...]
#
# Installs nothing: PYTHON (python3 unless set) needs torch, transformers and what the engine imports. The
# results go to $OUT, a file or a directory, or to benchmarks/results/gpu.json.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=.
exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
