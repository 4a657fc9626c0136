#!/usr/bin/env bash
# Unpack this part, then run the arguments, if any, by the project's Python in the project's root:
#   bash 1/run.sh tests/gpu/gpu_check.py --limit-s 200
# RLHF_GPU_HOME: where everything is unpacked. PYTHON: the interpreter that has torch.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
home=${RLHF_GPU_HOME:-/tmp/rlhf-gpu}
"${PYTHON:-python3}" "$here/unpack.py" "$here" "$home"
[ $# -gt 0 ] || exit 0
cd "$home/project"
export RLHF_HOME=${RLHF_HOME:-$home/runs} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
exec .venv/bin/python "$@"
