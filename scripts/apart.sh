#!/usr/bin/env bash
# Runs a command as on a fresh machine: HOME and TMPDIR are new and empty. Fails if the command fails, or if it leaves
# a file outside them or a process:
#
#   scripts/apart.sh make test
#
# Where the kernel allows it (Linux; as root, or with user namespaces) the command has /tmp, /var/tmp and /dev/shm of its
# own, so what it leaves there is its own doing, and neighbours see nothing of it; the true home is read-only to it.
# Elsewhere only the checkout is looked at.
set -euo pipefail

say() { printf '%s\n' "apart: $*" >&2; }

# What the command may change in the checkout: caches that git ignores, and the folder that the demos fill.
changes() {
    git status --porcelain --ignored 2>/dev/null |
        grep -vE '__pycache__|\.(pytest|mypy|ruff)_cache/|\.hypothesis/|^!! demo_output/$' || true
}

# Lines of the second text that the first has not.
added() { { grep -vxFf <(printf '%s\n' "$1") <<<"$2" || true; } | sed '/^$/d'; }

# Living processes with our mark in their environment, but for this shell and what it starts.
left_processes() {
    local entry pid
    for entry in /proc/[0-9]*/environ; do
        pid=${entry//[^0-9]/}
        if [[ $pid != "$$" ]] && { tr '\0' '\n' <"$entry"; } 2>/dev/null | grep -qxF "OPEN_INSTRUCT_APART=$1"; then
            printf '%s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c 1-150)"
        fi
    done
}

# Inside: /tmp is ours alone if `walled` is 1, and else a folder in the old one.
inside() {
    local place=$1 walled=$2 status=0 before_checkout left=""
    shift 2
    mkdir -p "$place/home" "$place/tmp"
    before_checkout=$(changes)
    HOME=$place/home TMPDIR=$place/tmp OPEN_INSTRUCT_APART=$place.$$ "$@" || status=$?

    left=$(left_processes "$place.$$")
    # Those that are about to end are given a moment.
    for _ in 1 2 3 4 5; do
        [[ -z $left ]] && break
        sleep 1
        left=$(left_processes "$place.$$")
    done
    if [[ -n $left ]]; then
        say "these processes were left:"$'\n'"$left"
        cut -d ' ' -f 1 <<<"$left" | xargs -r kill -9 2>/dev/null || true
        status=$((status ? status : 1))
    fi
    left=$(
        added "$before_checkout" "$(changes)" | sed "s|^...|$PWD/|"
        if [[ $walled == 1 ]]; then
            find /tmp /var/tmp /dev/shm -mindepth 1 -maxdepth 1 ! -path "$place" ! -path "${KEPT:-$place}"
        fi
    )
    if [[ -n $left ]]; then
        say "these files were left outside HOME and TMPDIR:"$'\n'"$left"
        status=$((status ? status : 1))
    fi
    exit "$status"
}

# Gives this mount namespace folders of its own, and keeps the checkout in sight if it lies in one of them.
wall_off() {
    local scratch=$1 folder here=$PWD
    shift
    for folder in /dev/shm /var/tmp /tmp; do
        mkdir -p "$scratch$folder"
        if [[ $folder == /dev/shm ]]; then
            mount -t tmpfs tmpfs "$scratch$folder"
        fi
        if [[ $here == "$folder"/* ]]; then
            KEPT=${here#"$folder"/}
            KEPT=$folder/${KEPT%%/*}
            mkdir -p "$scratch$here"
            mount --bind "$here" "$scratch$here"
        fi
    done
    mkdir "$scratch/checkout"
    mount --bind "$here" "$scratch/checkout"
    if [[ $HOME != / ]]; then
        mount --bind "$HOME" "$HOME"
        mount -o remount,bind,ro "$HOME"
    fi
    if [[ $here == "$HOME"/* ]]; then
        mount --bind "$scratch/checkout" "$here"
    fi
    for folder in /dev/shm /var/tmp /tmp; do
        mount --rbind "$scratch$folder" "$folder"
    done
    cd "$here"
    export KEPT=${KEPT:-}
    inside "/tmp/a$$" 1 "$@"  # short: Unix sockets lie below it
}

case ${1:-} in
    "") say "usage: scripts/apart.sh COMMAND [ARGUMENT ...]"; exit 2 ;;
    --walled) shift; wall_off "$@" ;;
esac

scratch=$(mktemp -d "${TMPDIR:-/tmp}/apart.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
namespaces=(unshare --mount --propagation private)
[[ $(id -u) == 0 ]] || namespaces+=(--map-root-user)
if "${namespaces[@]}" mount --bind "$scratch" "$scratch" 2>/dev/null; then
    "${namespaces[@]}" "${BASH_SOURCE[0]}" --walled "$scratch" "$@"
else
    say "no namespaces here: /tmp, /dev/shm and the true home are not looked at"
    (inside "$scratch" 0 "$@")
fi
