#!/usr/bin/env bash
# What only a graphics card can show, in 25 minutes on one of them; writes benchmarks/results/gpu_<card>.json after each part.
# Usage: benchmarks/gpu.sh [PYTHON] [ARGUMENT OF gpu.py ...], such as --small --device cpu, which ends within a minute.
# FEDSHIFT_DATA: with pacs_images_128.zip in it, PACS is fine-tuned. FEDSHIFT_WEIGHTS: weights to start that from.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${1:-python}"
[ $# -gt 0 ] && shift
export PYTHONPATH="src:benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --signal=INT "${FEDSHIFT_GPU_SECONDS:-1500}" "$python" benchmarks/gpu.py "$@"
