#!/usr/bin/env bash
# A short subset of the tests on the newest Python here that is 3.12 or newer, and with it on the newest jax, in an
# environment of its own. Says so and passes where there is no such Python, or where .venv has it already.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/venv.sh" test

newer() { "$@" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }
if newer .venv/bin/python; then
    echo "smoke: .venv has $(.venv/bin/python --version) already; its tests were the newest."
    exit 0
fi
for candidate in python3.14 python3.13 python3.12; do
    found=$candidate
    newer "$found" && break
    # pyenv puts stubs on the path that fail until a version is chosen.
    if command -v pyenv >/dev/null; then
        found=$(pyenv prefix "$(pyenv versions --bare | grep -x "${candidate#python}\.[0-9]*" | tail -n 1)" 2>/dev/null)/bin/python
        newer "$found" && break
    fi
    found=
done
if [ -z "$found" ]; then
    echo "smoke: no Python 3.12 or newer here; skipped."
    exit 0
fi
install_into .venv-newest "$found" test
.venv-newest/bin/python -c 'import sys, jax; print("smoke: Python", sys.version.split()[0], "jax", jax.__version__)'
.venv-newest/bin/python -m pytest tests/ops tests/io tests/schemes/test_builtin_schemes.py tests/train/test_chunk.py "$@"
