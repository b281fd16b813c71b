# Sourced by demo.sh and test.sh in the pack's folder: makes .venv with torch and tests/requirements.txt; sets PY to its python.

fail() { echo "error: $*" >&2; exit 4; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$candidate"; return; fi
  done
  return 1
}

install_torch() {
  "$PY" -c 'import torch' 2>/dev/null && return
  echo "Installing torch ..."
  # A wheel in a local pip folder first; then, on Linux without an NVIDIA driver, the CPU build (the default one is several GB larger).
  if "$PY" -m pip install --quiet --no-index --no-deps torch==2.13.0 2>/dev/null; then
    "$PY" -m pip install --quiet torch==2.13.0
  elif [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    "$PY" -m pip install --quiet torch --index-url https://download.pytorch.org/whl/cpu || "$PY" -m pip install torch
  else
    "$PY" -m pip install torch
  fi
}

setup() {
  local base stamp
  PY=.venv/bin/python
  if ! "$PY" -c '' 2>/dev/null; then
    base=$(find_python) || fail "Python 3.11 or newer is needed. Install it, or name one: PYTHON=/path/to/python3 $0"
    echo "Creating .venv with $("$base" --version) ..."
    "$base" -m venv --clear .venv || fail "the venv module is missing. On Debian or Ubuntu: apt-get install python3-venv"
  fi
  stamp=.venv/requirements.done
  if ! cat requirements.txt tests/requirements.txt | cmp -s - "$stamp"; then
    install_torch || fail "torch could not be installed; see the lines above."
    echo "Installing the other packages ..."
    "$PY" -m pip install --quiet -r tests/requirements.txt || fail "packages could not be installed; see the lines above."
    # A CPU build of torch brings no Triton; the kernel tests run it in its interpreter. One that is there stays.
    if [ "$(uname -s)" = Linux ] && ! "$PY" -c 'import triton' 2>/dev/null; then
      "$PY" -m pip install --quiet triton==3.6.0 || fail "triton could not be installed; see the lines above."
    fi
    cat requirements.txt tests/requirements.txt >"$stamp"
  fi
}

setup
