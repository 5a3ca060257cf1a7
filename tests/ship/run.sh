#!/usr/bin/env bash
# Builds both images and runs them, on a Debian machine that may have nothing but Python and git, as root:
#
#     tests/ship/run.sh            # builds what is not built yet, and checks all
#     tests/ship/run.sh compose    # the compose part alone
#     tests/ship/run.sh kube       # the images as pods: a first token, an upgrade and a rollback under load
#     tests/ship/run.sh --cuda     # the engine's image for CUDA alone: 4 GB of packages, and 30 GB of disk meanwhile
#     tests/ship/run.sh --check    # seconds: says in a line whether containers run here, and builds nothing
#
# `.ci/run` calls it with --check, and `.ci/nightly` whole: the whole takes a quarter of an hour on two
# idle cores and a gigabyte of packages, which is more than all tests together, and a machine of CI may have no
# network. Where containers cannot run it says so and exits with 77.
#
# SHIP_HOME   where images and the base are kept (default: /var/tmp/penstock-ship)
# BASE        an image to build on; unset, one is made by debootstrap, which stands in for Python's own
# PIP_FIND_LINKS   a folder with torch's wheel for CPUs, where PyTorch's index cannot be reached
# KUBE_SERVERS   with kube: as in tests/ship/kube.sh, which else builds the servers
# CARDS       with --cuda: the cards whose kernels are compiled, with commas between (default: the Dockerfile's)
#
# Not shown here: the published base image, a GPU, and the images of Grafana and Jaeger, which cannot be fetched
# without a registry. Redis and Prometheus are Debian's, under the names that compose.yaml has.
set -euo pipefail
cd "$(dirname "$0")/../.."

cannot() {
    echo "############################################################" >&2
    echo "# NOTHING WAS SHOWN: containers cannot run here: $*" >&2
    echo "############################################################" >&2
    exit 77
}

[ "$(id -u)" = 0 ] || cannot "this is not root"
missing=""
for tool in buildah podman runc debootstrap aardvark-dns; do
    command -v "$tool" >/dev/null || [ -x "/usr/lib/podman/$tool" ] || missing="$missing $tool"
done
if [ -n "$missing" ]; then
    [ "${1:-}" != --check ] || cannot "not installed are$missing (without --check this script installs them)"
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends buildah podman runc netavark \
        aardvark-dns iptables debootstrap >/dev/null; } || cannot "these cannot be installed:$missing"
fi

home="${SHIP_HOME:-/var/tmp/penstock-ship}"
mkdir -p "$home"
cat >"$home/containers.conf" <<END
[containers]
default_ulimits=["nofile=4096:4096","nproc=4096:4096"]
[engine]
runtime="runc"
cgroup_manager="cgroupfs"
events_logger="file"
END
driver="${SHIP_DRIVER:-overlay}"
printf '[storage]\ndriver="%s"\ngraphroot="%s/graph"\nrunroot="%s/run"\n' "$driver" "$home" "$home" >"$home/storage.conf"
export CONTAINERS_CONF="$home/containers.conf" CONTAINERS_STORAGE_CONF="$home/storage.conf"
export BUILDAH_ISOLATION=chroot BUILDAH_FORMAT=docker

image_is_there() { podman image exists "$1"; }

# A container of this machine's own `true` and the libraries that it needs.
if [ "${1:-}" = --check ]; then
    own=$(type -P true)
    files=$({ echo "$own"; ldd "$own" | grep -o '/[^ ]*'; } | sort -u)
    { tar -chf - $files | podman import -q - localhost/penstock-check &&
        podman run --rm --network none localhost/penstock-check "$own" &&
        podman rmi -f localhost/penstock-check; } >"$home/check.log" 2>&1 || cannot "$(tail -1 "$home/check.log")"
    echo "containers run here: tests/ship/run.sh builds the images, runs them, and brings compose.yaml up"
    exit 0
fi

# -- the base, and Debian's packages under the names of images that cannot be fetched. Like Python's own image it has
# Python's headers, which Triton compiles with.
base="${BASE:-localhost/penstock-base:bookworm-headers}"
if ! image_is_there "$base"; then
    [ -f "$home/root/usr/include/python3.11/Python.h" ] || {
        rm -rf "$home/root"
        debootstrap --variant=minbase --include=python3,python3-venv,libpython3-dev,ca-certificates \
            bookworm "$home/root" >"$home/debootstrap.log"
    }
    tar -C "$home/root" --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' -c . |
        podman import -q - "$base" || cannot "an image cannot be imported"
fi
podman run --rm --network none "$base" true 2>"$home/first-run.log" || cannot "$(tail -1 "$home/first-run.log")"

find_links="${PIP_FIND_LINKS:-}"
build() {
    local name="$1" file="$2"
    shift 2
    echo "+ building $name"
    buildah bud -q --pull=never --layers -f "$file" --build-arg BASE="$base" -v /etc/ssl/certs:/etc/ssl/certs:ro \
        --build-arg REVISION="$(git rev-parse HEAD 2>/dev/null || echo unknown)" "$@" -t "$name" . \
        >"$home/build.log" 2>&1 || { tail -20 "$home/build.log" >&2; exit 1; }
}
own_tools() {
    [ -x "$home/tools/bin/podman-compose" ] && return
    python3 -m venv "$home/tools" && "$home/tools/bin/pip" install -q --require-hashes -r gateway/requirements.txt &&
        "$home/tools/bin/pip" install -q 'podman-compose==1.6.0'
}
if [ "${1:-}" = --cuda ]; then
    own_tools || cannot "packages of PyPI cannot be installed"
    cards="${CARDS:-$(sed -n 's/^ARG CARDS=//p' engine/Dockerfile)}"
    SECONDS=0
    build localhost/penstock-engine:cuda engine/Dockerfile --build-arg VARIANT=cuda --build-arg CARDS="$cards"
    echo "  built, or found, in $SECONDS s"
    exec env PYTHONPATH=. "$home/tools/bin/python" -m tests.ship.cuda "$base" "$cards"
fi
build localhost/penstock-gateway:dev gateway/Dockerfile
if [ -n "$find_links" ]; then
    build localhost/penstock-engine:dev engine/Dockerfile --build-arg PIP_FIND_LINKS="$find_links" \
        --build-arg PIP_EXTRA_INDEX_URL= -v "$find_links:$find_links:ro"
else
    build localhost/penstock-engine:dev engine/Dockerfile
fi
if [ "${1:-}" = kube ]; then
    own_tools || cannot "packages of PyPI cannot be installed"
    exec env PYTHONPATH=. PYTHON="$home/tools/bin/python" tests/ship/kube.sh --only served
fi
redis=$(grep -o 'docker.io/library/redis:[^ }]*' compose.yaml)
prometheus=$(grep -o 'docker.io/prom/prometheus:[^ }]*' compose.yaml)
if ! image_is_there "$redis"; then
    printf 'FROM %s\nRUN apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server \\\n && mkdir -p /data && chown 999:999 /data\nVOLUME /data\nWORKDIR /data\n' \
        "$base" >"$home/Dockerfile.redis"
    buildah bud -q --pull=never -f "$home/Dockerfile.redis" -t "$redis" "$home/graph/.." >>"$home/build.log" 2>&1
fi
if ! image_is_there "$prometheus"; then
    printf 'FROM %s\nRUN apt-get update -qq && apt-get install -qq -y --no-install-recommends prometheus wget \\\n && mkdir -p /prometheus && chown 65534:65534 /prometheus\nENTRYPOINT ["prometheus"]\n' \
        "$base" >"$home/Dockerfile.prometheus"
    buildah bud -q --pull=never -f "$home/Dockerfile.prometheus" -t "$prometheus" "$home/graph/.." >>"$home/build.log" 2>&1
fi

# -- what they do, told by a program that needs httpx and PyYAML
own_tools || cannot "packages of PyPI cannot be installed"
if [ -x .venv/bin/python ]; then  # with the engine, which compose has in its image
    [ -d "$home/rotel" ] || { python3 -m venv "$home/rotel" && "$home/rotel/bin/pip" install -q 'rotel==0.0.1a15'; }
    for agent in "$home"/rotel/lib/python3*/site-packages/rotel/rotel-agent; do
        .venv/bin/python -m tests.ship.rotel "$agent"
    done
    if .venv/bin/python -c 'from tests.ship.browser import chromium; chromium()' 2>"$home/chromium.log"; then
        .venv/bin/python -m tests.ship.console "$home/console"  # the pictures are to be looked at
    else
        echo "the console was not shown in a browser: $(tail -1 "$home/chromium.log")" >&2
    fi
fi
exec env PYTHONPATH=. "$home/tools/bin/python" -m tests.ship.containers --home "$home" "$@"
