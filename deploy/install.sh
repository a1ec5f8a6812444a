#!/bin/sh
# Makes a virtual environment and installs Quire into it; does nothing when that is already done.
#
#   deploy/install.sh VENV EXTRA      EXTRA is worker, gpu or dev
#
# PYTHON       the interpreter for a new environment (default: the first of python3, python3.12,
#              python3.11 that is 3.11 or 3.12)
# TORCH_INDEX  where torch comes from: a package index URL, or `default` for the ordinary index. Unset, on a
#              host without an NVIDIA GPU, PyTorch's own CPU index is used when it answers, so that CUDA is
#              not downloaded; else the ordinary index.
set -eu

venv=$1
extra=$2
cpu_index=https://download.pytorch.org/whl/cpu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11; do
        if fits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 found; on Debian 12: apt-get install python3 python3-venv"
}

has_gpu() { [ -e /dev/nvidiactl ] || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1; }

answers() {
    "$venv/bin/python" - "$1" <<'PY' >/dev/null 2>&1
import sys, urllib.request
urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=4).close()
PY
}

install_torch() {
    if [ "$extra" = gpu ] || has_gpu; then
        return # pip takes what pyproject.toml asks for, and leaves a torch that is there already alone
    fi
    index=${TORCH_INDEX:-}
    if [ -z "$index" ]; then
        index=default
        if answers "$cpu_index"; then
            index=$cpu_index
        fi
    fi
    say "installing torch for the CPU (index: $index)"
    if [ "$index" = default ]; then
        pip_install -r requirements/torch-cpu.txt
    else
        pip_install --extra-index-url "$index" -r requirements/torch-cpu.txt
    fi
}

pip_install() {
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        -c requirements/constraints.txt "$@"
}

# What an installation depends on: when none of it changed, there is nothing to do. Moved checkouts count.
fingerprint() { { pwd; cat pyproject.toml requirements/*.txt deploy/install.sh; } | cksum; }

now=$(fingerprint)
for stamp in "$venv/.quire-$extra" "$venv/.quire-dev"; do
    # `dev` includes `worker`.
    if [ "$extra" = gpu ] && [ "$stamp" = "$venv/.quire-dev" ]; then
        continue
    fi
    if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ]; then
        exit 0
    fi
done

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -c 'import ensurepip' >/dev/null 2>&1 ||
        fail "$python can't make virtual environments; on Debian 12: apt-get install python3-venv"
    say "making the virtual environment $venv"
    "$python" -m venv "$venv"
fi
fits "$venv/bin/python" || fail "$venv holds another Python than 3.11 or 3.12: remove it, or set VENV"

install_torch
say "installing quire[$extra]"
pip_install --editable ".[$extra]"
if [ "$extra" = dev ]; then
    pip_install --no-deps -r requirements/no-deps.txt
fi
printf '%s\n' "$now" >"$venv/.quire-$extra"
