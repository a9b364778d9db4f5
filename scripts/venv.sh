# Sourced by demo.sh and test.sh: makes .venv at the root if it is not there, and installs posjax into it.
# usage: . scripts/venv.sh EXTRA    (EXTRA: an extra of setup.cfg, or empty)
# PYTHON=... chooses the Python; otherwise the first of these that runs and is 3.11 or newer.

works() { "$@" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if works "$candidate"; then echo "$candidate"; return; fi
    done
    echo "posjax needs Python 3.11 or newer; none of '${PYTHON:-python3 python3.13 python3.12 python3.11}' is one." >&2
    return 2
}

# usage: install_into DIRECTORY PYTHON EXTRA: an environment with what was tested for that Python, once.
install_into() {
    local venv=$1 python=$2 extra=$3 version constraints stamp
    if [ ! -x "$venv/bin/python" ]; then
        echo "Making $venv with $($python --version 2>&1)."
        if ! $python -m venv "$venv"; then
            rm -rf "$venv"
            echo "$python cannot make virtual environments; on Debian and Ubuntu, install python3-venv." >&2
            return 2
        fi
    fi
    version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    constraints=scripts/constraints-$version.txt
    [ -f "$constraints" ] || constraints=/dev/null
    stamp=$(cat setup.cfg "$constraints" | cksum | tr ' ' '-')
    # An environment with an extra serves those who ask for none.
    if [ -e "$venv/posjax-$extra-$stamp" ] || { [ -z "$extra" ] && ls "$venv"/posjax-*-"$stamp" >/dev/null 2>&1; }; then
        return
    fi
    echo "Installing posjax into $venv (a minute or two, once)."
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" \
        --editable ".${extra:+[$extra]}" || return 2
    touch "$venv/posjax-$extra-$stamp"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
if [ ! -x .venv/bin/python ]; then
    posjax_python=$(find_python) || exit 2
fi
install_into .venv "${posjax_python:-}" "${1:-}" || exit 2
PATH=$PWD/.venv/bin:$PATH
