#!/usr/bin/env bash
# kube_start.sh DIR PORT: starts the servers beside it on loopback, with their state in DIR, and prints "ready:" once
# they answer. They end with it. DIR/kubeconfig is for kubectl and helm, DIR/crd.kubeconfig for custom resources.
set -euo pipefail
bin=$(cd "$(dirname "$0")" && pwd)/bin
dir=${1:?a folder for the state}; base=${2:?the first of seven ports}
mkdir -p "$dir"; cd "$dir"; dir=$(pwd)
peers="http://127.0.0.1:$((base + 1))"; etcd="http://127.0.0.1:$base"; api=$((base + 4)); custom=$((base + 5))
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT INT TERM
echo 'admintoken,admin,admin,system:masters' >tokens.csv
openssl genrsa -out sa.key 2048 2>/dev/null
for pair in "kubeconfig $api" "crd.kubeconfig $custom"; do
    read -r file port <<<"$pair"
    cat >"$file" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:$port", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: admintoken}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
YAML
done
# asks PORT PATH until it answers
await() {
    for _ in $(seq 240); do
        curl -skf -m 2 -H 'Authorization: Bearer admintoken' "https://127.0.0.1:$1/$2" >/dev/null && return 0
        sleep 0.5
    done
    echo "nothing answers at $1: see $dir/*.log" >&2
    exit 1
}
"$bin/etcd" --data-dir etcd --listen-client-urls "$etcd" --advertise-client-urls "$etcd" --listen-peer-urls "$peers" \
    --initial-advertise-peer-urls "$peers" --initial-cluster "default=$peers" --unsafe-no-fsync >etcd.log 2>&1 & pids+=($!)
"$bin/kube-apiserver" --etcd-servers="$etcd" --bind-address=127.0.0.1 --advertise-address=127.0.0.1 --secure-port=$api \
    --insecure-port=0 --cert-dir=certs --service-cluster-ip-range=10.0.0.0/24 --authorization-mode=RBAC \
    --service-account-issuer=https://kubernetes.local --service-account-signing-key-file=sa.key \
    --service-account-key-file=sa.key --token-auth-file=tokens.csv --allow-privileged=true \
    --disable-admission-plugins=ServiceAccount >api.log 2>&1 & pids+=($!)
await $api readyz
"$bin/kube-controller-manager" --kubeconfig=kubeconfig --service-account-private-key-file=sa.key --bind-address=127.0.0.1 \
    --secure-port=0 --port=0 --leader-elect=false >controllers.log 2>&1 & pids+=($!)
admission=NamespaceLifecycle,MutatingAdmissionPolicy,MutatingAdmissionWebhook,ValidatingAdmissionPolicy,ValidatingAdmissionWebhook
"$bin/crd-apiserver" --etcd-servers="$etcd" --bind-address=127.0.0.1 --secure-port=$custom --cert-dir=crd-certs \
    --authentication-kubeconfig=kubeconfig --authorization-kubeconfig=kubeconfig --kubeconfig=kubeconfig \
    --disable-admission-plugins=$admission >crd.log 2>&1 & pids+=($!)
await $custom livez
echo "ready: kubectl --kubeconfig $dir/kubeconfig; custom resources at https://127.0.0.1:$custom"
wait
