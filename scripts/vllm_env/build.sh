#!/usr/bin/env bash
# An environment in which unmodified vLLM runs without a GPU, with mezzo in it: about 2.5 GB. Rebuilt only when this folder's
# lock files change.  usage: build.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-vllm}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

lock=$(cat "$here"/*.txt "$here"/build.sh "$root/pyproject.toml" | sha256sum | cut -c1-32)
if [ -f "$venv/.lock" ] && [ "$(cat "$venv/.lock")" = "$lock" ]; then
    exit 0
fi
echo "setting up $venv for vLLM on a CPU (a few minutes, once)" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet)
"${pip[@]}" -r "$here/torch.txt"
"${pip[@]}" --no-deps -r "$here/rest.txt"
"${pip[@]}" --no-deps --no-build-isolation --editable "$root"
"$venv/bin/python" -c 'import vllm, mezzo'
echo "$lock" > "$venv/.lock"
