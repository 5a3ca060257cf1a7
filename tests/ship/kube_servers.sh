#!/usr/bin/env bash
# tests/ship/kube_servers.sh DIR: builds the servers that tests/ship/kube.sh starts, as root on Debian 12.
#
#     etcd 3.4, kube-apiserver and kube-controller-manager 1.20    from Debian 12's source package
#     an apiextensions server (custom resources, CEL) of 1.36      from Debian sid's packages of Go libraries
#
# Debian 12 has no newer Kubernetes, and its Go modules cannot be had where Go's proxy is out of reach. 400 MB are
# downloaded; the builds take 8 and 4 minutes of CPU. DIR gets bin/ and start.
set -euo pipefail
dir=${1:?a folder for the servers}
here=$(cd "$(dirname "$0")" && pwd)
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
mkdir -p "$dir/bin"; dir=$(cd "$dir" && pwd)
work=${KUBE_BUILD:-$(mktemp -d)}; mkdir -p "$work"

apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates curl dpkg-dev etcd-server golang-1.19-go jq make openssl rsync
cp "$(command -v etcd)" "$dir/bin/etcd"

# apt with lists of its own: the machine's stay as they are. $1: name, $2: line of sources.list
own_apt() {
    local state="$work/apt-$1"
    mkdir -p "$state/lists/partial" "$state/archives/partial"
    printf '%s\n' "$2" >"$state/sources.list"
    : >"$state/status"
    options=(-qq -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$state/lists"
        -o "Dir::State::status=$state/status" -o "Dir::Cache=$state" -o "Dir::Cache::archives=$state/archives"
        -o APT::Install-Recommends=false -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update
}

if [ ! -x "$dir/bin/kube-apiserver" ]; then
    own_apt source "deb-src $mirror bookworm main"
    (cd "$work" && apt-get "${options[@]}" source kubernetes)
    mkdir -p "$work/go/src/k8s.io"
    ln -sfn "$(echo "$work"/kubernetes-1.20*/)" "$work/go/src/k8s.io/kubernetes"
    (cd "$work/go/src/k8s.io/kubernetes" &&
        PATH="/usr/lib/go-1.19/bin:$PATH" GOPATH="$work/go" GO111MODULE=off GOFLAGS= CGO_ENABLED=0 \
            make WHAT="cmd/kube-apiserver cmd/kube-controller-manager")
    find "$work/go/src/k8s.io/kubernetes/" -path '*/bin/*' -name 'kube-*' -type f -exec cp {} "$dir/bin/" \;
fi

if [ ! -x "$dir/bin/crd-apiserver" ]; then
    own_apt sid "deb [trusted=yes] $mirror sid main"
    apt-get "${options[@]}" -y --download-only install golang-k8s-apiextensions-apiserver-dev golang-go
    mkdir -p "$work/root"
    for package in "$work"/apt-sid/archives/*.deb; do dpkg-deb -x "$package" "$work/root"; done
    go=$(echo "$work"/root/usr/lib/go-*/bin/go)
    (cd "$work/root/usr/share/gocode" &&
        GOROOT=${go%/bin/go} GOPATH="$work/root/usr/share/gocode" GO111MODULE=off GOFLAGS= CGO_ENABLED=0 \
            "$go" build -o "$dir/bin/crd-apiserver" k8s.io/apiextensions-apiserver)
fi

cp "$here/kube_start.sh" "$dir/start"
echo "the servers are in $dir"
