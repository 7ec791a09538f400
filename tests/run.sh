#!/usr/bin/env bash
# Every check of this repository on a fresh Debian or Ubuntu machine, as root:
#
#     ./tests/run.sh                                 everything
#     ./tests/run.sh -m "not mount and not slow"     quick ones; neither root nor /dev/fuse needed
#     ./tests/run.sh tests/posix -k rename           any arguments of pytest
#
# Installs what is missing (system packages by name, the rest into a virtual environment); a second run installs
# nothing and needs no network. Ends by itself, and fails when the tests leave a mount or a process behind.
#
#   CKPTFS_TEST_VENV        where the virtual environment is (default: .venv-test in the repository)
#   CKPTFS_TEST_PYTHON      the Python to make it with (default: the first of python3, python3.1x that is >= 3.11)
#   CKPTFS_TEST_TIMEOUT_S   how long pytest may take in all (default: 4500)
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$repo"
venv=${CKPTFS_TEST_VENV:-$repo/.venv-test}
timeout_s=${CKPTFS_TEST_TIMEOUT_S:-4500}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n-- %s\n' "$*"; }
die() { printf 'tests/run.sh: %s\n' "$*" >&2; exit 1; }

# --- System packages ---------------------------------------------------------------------------------------------

missing_packages() {
    # By what is used, not by dpkg: a tool from elsewhere will do.
    local command package
    while read -r command package; do
        command -v "$command" >/dev/null || echo "$package"
    done <<'LIST'
fusermount3 fuse3
pkg-config pkg-config
gcc gcc
git git
rsync rsync
fio fio
stress-ng stress-ng
getfattr attr
capsh libcap2-bin
setpriv util-linux
mount mount
radosgw radosgw
ceph-mon ceph-mon
ceph-osd ceph-osd
LIST
    if command -v pkg-config >/dev/null && pkg-config --exists fuse3; then return; fi
    echo libfuse3-dev
}

install_packages() {
    local packages
    mapfile -t packages < <(missing_packages)
    # An environment that is ready needs neither compiler nor headers.
    if ((${#packages[@]} == 0)); then return; fi
    [[ $EUID == 0 ]] || { say "not root: going on without ${packages[*]}"; return; }
    command -v apt-get >/dev/null || die "please install: ${packages[*]}"
    say "installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

# --- Python ------------------------------------------------------------------------------------------------------

find_python() {
    local candidate
    for candidate in ${CKPTFS_TEST_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

make_venv() {
    local python
    if ! python=$(find_python) && [[ $EUID == 0 ]] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq python3 python3-venv python3-dev >/dev/null
        python=$(find_python)
    fi
    [[ -n ${python:-} ]] || die "no Python >= 3.11 found; name one in CKPTFS_TEST_PYTHON"
    # Debian's Python comes without ensurepip and without headers, which pyfuse3 is built with.
    local probe='import ensurepip, os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
    if ! "$python" -c "$probe" 2>/dev/null && [[ $EUID == 0 ]]; then
        local version
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        apt-get update -qq
        apt-get install -y -qq "python$version-venv" "python$version-dev" >/dev/null
    fi
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

fill_venv() {
    # What decides its contents; the repository's place too, since the package is installed in place.
    local want
    want=$({ cat requirements-test.lock pyproject.toml; echo "$repo"; } | sha256sum)
    if [[ -x $venv/bin/python && $(cat "$venv/ckptfs-stamp" 2>/dev/null) == "$want" ]]; then return; fi
    say "filling $venv"
    [[ -x $venv/bin/python ]] || make_venv
    rm -f "$venv/ckptfs-stamp"
    "$venv/bin/pip" install -q -r requirements-test.lock
    # setuptools is in the lock: no second environment to build in, so nothing unpinned.
    "$venv/bin/pip" install -q --no-deps --no-build-isolation -e .
    "$venv/bin/pip" check
    printf '%s\n' "$want" >"$venv/ckptfs-stamp"
}

# --- What the tests leave ----------------------------------------------------------------------------------------

# Everything that starts below carries this in its environment, daemons included, and makes its mounts below it.
# The name is the one by which tests/harness.py finds what a killed run left.
work=

left_mounts() { awk -v dir="$work/" 'index($2, dir) == 1 {print $2}' /proc/self/mounts; }

left_processes() {
    local environ pid
    for environ in /proc/[0-9]*/environ; do
        pid=${environ#/proc/}
        pid=${pid%/environ}
        if [[ $pid != "$$" ]] && grep -qsF "CKPTFS_TEST_RUN=$work" "$environ"; then
            printf '%s ' "$pid"
            tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null || true
            echo
        fi
    done
}

nothing_left() {
    # A daemon that has been told to go may take a moment.
    local processes='' mounts=''
    for _ in {1..50}; do
        processes=$(left_processes)
        mounts=$(left_mounts)
        [[ -n $processes$mounts ]] || return 0
        sleep 0.1
    done
    printf '\nLEFT BEHIND by the tests:\n'
    [[ -z $mounts ]] || printf 'mount %s\n' $mounts
    [[ -z $processes ]] || printf 'process %s\n' "$processes"
    return 1
}

take_apart() {
    [[ -n $work ]] || return 0
    local pid mountpoint
    left_mounts | tac | while read -r mountpoint; do umount -l "$mountpoint" || true; done
    left_processes | while read -r pid _; do kill -KILL "$pid" 2>/dev/null || true; done
    [[ -n $(left_mounts) ]] || rm -rf "$work"
}

# --- The run -----------------------------------------------------------------------------------------------------

failed=()
check() {
    say "$*"
    "$@" || failed+=("$1 $2")
}

install_packages
fill_venv
PATH=$venv/bin:$PATH

check ruff check .
check ruff format --check .
check mypy --strict fs replicator mount

if [[ $EUID == 0 ]]; then
    python -c 'from tests import harness; harness.close_stale()'
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/cfs-$$-XXXXXX")
chmod 755 "$work" # tests act as other users below it
trap take_apart EXIT
trap 'exit 130' INT TERM HUP

say "pytest $*"
log=$work/pytest.log
status=0
# Through a process substitution, not a pipe: a daemon that keeps the output open must not keep us waiting.
TMPDIR=$work CKPTFS_TEST_RUN=$work \
    timeout --foreground --signal=INT --kill-after=60 "$timeout_s" \
    python -m pytest "$@" > >(exec tee "$log") 2>&1 || status=$?
tee_pid=$!
for _ in {1..50}; do
    kill -0 "$tee_pid" 2>/dev/null || break
    sleep 0.1
done
case $status in
    0) ;;
    5) failed+=("pytest (no test was run)") ;;
    124 | 137) failed+=("pytest (not done within $timeout_s s)") ;;
    *) failed+=("pytest (exit status $status)") ;;
esac
nothing_left || failed+=("leftovers")

say "result"
for what in "${failed[@]}"; do echo "FAILED: $what"; done
grep -E '^=*.* in [0-9.]+s( \([0-9:]+\))?( =+)?$' "$log" | tail -n 1 || true
((${#failed[@]} == 0))
