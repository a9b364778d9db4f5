#!/usr/bin/env bash
# All tests, in .venv, in two processes. Arguments are passed on to pytest, as -k alibi.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" test

# The tests compile far more than they compute: with less effort, where this XLA knows these flags (it ends on one that it
# does not know). What users have is tested by the commands of the README and by smoke.sh.
less="--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0"
if [ -z "${XLA_FLAGS:-}" ] && XLA_FLAGS=$less python -c 'import jax; jax.devices()' >/dev/null 2>&1; then
    export XLA_FLAGS=$less
fi
# A module's tests stay in one process: they share what they compiled.
python -m pytest --numprocesses=2 --dist=loadscope --no-loadscope-reorder "$@"
