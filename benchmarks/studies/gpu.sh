#!/usr/bin/env bash
# The whole check on a real NVIDIA GPU, in one command, on the first machine that has one:
#
#     benchmarks/studies/gpu.sh [--runs N]
#
# Needs python3 (3.12 or newer), the driver, and a package index or a .venv-gpu that is there already. Builds
# for the GPU without using it, loads there, compares the tokens with jit's on the same GPU, measures starts
# and decoding, tunes, builds again, measures again. Writes benchmarks/results/DATE-GPU.{json,md}.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-gpu
if [ ! -x "$venv/bin/prejit" ]; then
    echo "setting up $venv (several GB: jax with CUDA)"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    "$venv/bin/python" -m pip install --quiet --editable './runtime[cuda]' --editable ./server --editable ./compiler
fi
exec "$venv/bin/python" -m benchmarks.studies.gpu "$@"
