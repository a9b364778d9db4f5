#!/usr/bin/env bash
# The main job on its default: five schemes trained to copy up to 16 symbols, 3 seeds each, evaluated up to 128.
# Arguments are passed on to the sweep, as --config.train.steps=100. Run it again and it goes on where it stopped.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" ""

runs=${POSJAX_RUNS:-runs/extrapolation}
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
posjax sweep --config=configs/extrapolation.py --workdir="$runs" --jobs=$((cores < 5 ? cores : 5)) "$@"
posjax report "$runs" --out="$runs/report.html" --figure="$runs/extrapolation.png"
cat <<END

Curves: .venv/bin/tensorboard --logdir=$runs    then open the address that it prints
Report: open $runs/report.html in a browser
END
