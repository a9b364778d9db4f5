#!/usr/bin/env bash
# All tests, in .venv. Arguments are passed on to pytest, as -k alibi.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" test

python -m pytest "$@"
