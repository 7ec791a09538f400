#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a torch checkpoint in RAM, as root:
#
#     sudo examples/quickstart.sh [MOUNTPOINT]
#
# Installs what is missing, mounts ckptfs (at a temporary directory below /mnt unless told otherwise), saves and loads a
# real checkpoint, kills the daemon's worker on the way, shows where the bytes are, trains a little, and unmounts. Leaves
# nothing mounted however it ends; may be run again at any time. Needs no S3, no etcd, no cluster.
#
#   QUICKSTART_DAEMON_VENV   virtual environment for ckptfs (default: .venv-quickstart in the repository)
#   QUICKSTART_TRAIN_VENV    virtual environment for torch, which knows nothing of ckptfs (default: .venv-train)
#   QUICKSTART_SIZE          the most memory that the filesystem may use (default: 2GiB)
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
daemon_venv=${QUICKSTART_DAEMON_VENV:-$repo/.venv-quickstart}
train_venv=${QUICKSTART_TRAIN_VENV:-$repo/.venv-train}
size=${QUICKSTART_SIZE:-2GiB}
torch='torch==2.13.0'

say() { printf '\n== %s\n' "$*"; }
die() { printf 'quickstart: %s\n' "$*" >&2; exit 1; }

[[ $EUID == 0 ]] || die "please run as root: mounting with kernel passthrough needs it"
[[ -e /dev/fuse ]] || die "/dev/fuse is missing; try 'modprobe fuse' (in a container: --device /dev/fuse --cap-add SYS_ADMIN)"

# --- What is missing ---------------------------------------------------------------------------------------------

python=
for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done

# pyfuse3 is built from source, with the C headers of libfuse and of Python.
if [[ ! -x $daemon_venv/bin/ckptfs ]]; then
    packages=(fuse3 libfuse3-dev pkg-config gcc)
    headers='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'
    if [[ -z $python ]]; then
        packages+=(python3 python3-dev python3-venv)
    elif ! "$python" -c "$headers" || ! "$python" -c 'import ensurepip' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        packages+=("python$version-dev" "python$version-venv")
    fi
    if command -v apt-get >/dev/null && ! dpkg -s "${packages[@]}" >/dev/null 2>&1; then
        say "installing ${packages[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    fi
    python=${python:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or later is needed"
    say "installing ckptfs into $daemon_venv"
    "$python" -m venv --clear "$daemon_venv"
    "$daemon_venv/bin/pip" install -q -e "$repo"
fi
if ! "$train_venv/bin/python" -c 'import torch' 2>/dev/null; then
    say "installing $torch into $train_venv"
    "$python" -m venv --clear "$train_venv"
    "$train_venv/bin/pip" install -q "$torch" numpy
fi
ckptfs=$daemon_venv/bin/ckptfs
trainer=$train_venv/bin/python

# --- Mount -------------------------------------------------------------------------------------------------------

made=
mounted=
clean_up() {
    local status=$?
    if [[ -n $mounted ]] && ! "$ckptfs" umount "$mountpoint" --force --discard; then
        umount -l "$mountpoint" 2>/dev/null || true
        status=1
    fi
    [[ -z $made ]] || rmdir "$made" 2>/dev/null || true
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

mountpoint=${1:-}
if [[ -z $mountpoint ]]; then
    mkdir -p /mnt
    made=$(mktemp -d /mnt/ckptfs-quickstart-XXXXXX)
    mountpoint=$made
elif [[ ! -d $mountpoint ]]; then
    mkdir -p "$mountpoint"
    made=$mountpoint
fi

say "ckptfs mount $mountpoint --size $size"
"$ckptfs" mount "$mountpoint" --size "$size" --name "quickstart-$$"
mounted=yes

# --- A real checkpoint -------------------------------------------------------------------------------------------

say "saving and loading with torch, unmodified"
worker_pid() { "$ckptfs" status "$mountpoint" --json | sed -n 's/.*"worker_pid": *\([0-9]*\).*/\1/p'; }
"$trainer" - "$mountpoint" "$(worker_pid)" <<'PY'
import os, signal, sys, time
import torch

mountpoint, worker = sys.argv[1], int(sys.argv[2])
state = {f"layer{n}": torch.randn(5_000_000) for n in range(10)}
path = os.path.join(mountpoint, "model.pt")


def timed(what, action):
    begin = time.perf_counter()
    result = action()
    took = time.perf_counter() - begin
    print(f"  {what}: {os.path.getsize(path) / 1e6:.0f} MB in {took:.2f} s", flush=True)
    return result


timed("torch.save", lambda: torch.save(state, path))
timed("torch.save over it", lambda: torch.save(state, path))
os.kill(worker, signal.SIGKILL)
print(f"  kill -9 {worker}: that was the filesystem's worker", flush=True)
loaded = timed("torch.load", lambda: torch.load(path, weights_only=True))
assert all(torch.equal(loaded[name], state[name]) for name in state)
mapped = torch.load(path, weights_only=True, mmap=True)
assert all(torch.equal(mapped[name], state[name]) for name in state)
print("  every value is as it was saved")
PY

say "training, killed in the middle, and resumed"
train=("$trainer" "$repo/examples/train.py" "$mountpoint/run" --steps 60 --every 10 --keep 2)
"${train[@]}" --pause-s 0.02 &
pid=$!
for _ in {1..600}; do
    compgen -G "$mountpoint/run/step-*.pt" >/dev/null && break
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
done
kill -KILL "$pid" 2>/dev/null || true
wait "$pid" 2>/dev/null || true
"${train[@]}"

say "where the bytes are"
"$ckptfs" ls "$mountpoint"
"$ckptfs" ls "$mountpoint/run"
"$ckptfs" status "$mountpoint"

say "unmounting, and giving the memory back"
"$ckptfs" umount "$mountpoint" --discard
mounted=
say "done"
