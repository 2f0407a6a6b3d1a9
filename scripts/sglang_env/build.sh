#!/usr/bin/env bash
# An environment in which unmodified SGLang runs without a GPU, with mezzo in it. Rebuilt only when this folder's
# lock files or hooks change.  usage: build.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-sglang}
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

lock=$( (cat "$here"/*.txt "$here"/build.sh; find "$here/site" -type f -not -name '*.pyc' | sort | xargs cat; cat "$root/pyproject.toml") | sha256sum | cut -c1-32)
if [ -f "$venv/.lock" ] && [ "$(cat "$venv/.lock")" = "$lock" ]; then
    exit 0
fi
echo "setting up $venv for SGLang on a CPU (a few minutes, once)" >&2
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet)
"${pip[@]}" -r "$here/torch.txt"
"${pip[@]}" --no-deps -r "$here/bare.txt"
"${pip[@]}" --no-deps -r "$here/rest.txt"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -R "$here/site/." "$site/"
"${pip[@]}" --no-deps --no-build-isolation --editable "$root"
"$venv/bin/python" -c 'import sglang, torchvision, mezzo'
echo "$lock" > "$venv/.lock"
