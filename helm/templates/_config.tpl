{{/* The Service whose DNS names and endpoints are the replicas of a model. */}}
{{- define "penstock.engineService" -}}
{{ include "penstock.engine" . }}
{{- end -}}

{{/* The number of replicas that there may be. */}}
{{- define "penstock.replicasMax" -}}
{{- if eq .engine.autoscaling.mode "none" }}{{ int .engine.replicas }}{{ else }}{{ int .engine.autoscaling.maxReplicas }}{{ end -}}
{{- end -}}

{{/* The base URLs of a model's replicas. Their names stay when pods are replaced, so the places of prefixes do. */}}
{{- define "penstock.replicas" -}}
{{- $urls := list -}}
{{- if .engine.isOurs -}}
  {{- $name := include "penstock.engine" . -}}
  {{- $scheme := ternary "https" "http" (eq (include "penstock.hasHopTls" .root) "true") -}}
  {{- $domain := printf "%s.%s.svc.%s" (include "penstock.engineService" .) .root.Release.Namespace .root.Values.clusterDomain -}}
  {{- range $index := until (int (include "penstock.replicasMax" .)) -}}
    {{- $urls = append $urls (printf "%s://%s-%d.%s:%d" $scheme $name $index $domain (int $.engine.port)) -}}
  {{- end -}}
{{- else -}}
  {{- $urls = .engine.urls -}}
{{- end -}}
{{- toJson (dict "urls" $urls) -}}
{{- end -}}

{{/* Where the replicas of a model are found: the names of those that are ready, or their addresses. */}}
{{- define "penstock.discovery" -}}
{{- $name := include "penstock.engine" . -}}
{{- if eq .engine.discovery "watch" -}}
  {{- $service := ternary (print $name "-leaders") $name .engine.isGroup -}}
  {{- toJson (dict "kubernetes" (dict "service" $service "namespace" .root.Release.Namespace "port" "http")) -}}
{{- else -}}
  {{- $scheme := ternary "https" "http" (eq (include "penstock.hasHopTls" .root) "true") -}}
  {{- $srv := printf "_http._tcp.%s.%s.svc.%s" $name .root.Release.Namespace .root.Values.clusterDomain -}}
  {{- toJson (dict "srv" $srv "scheme" $scheme "interval_s" 5) -}}
{{- end -}}
{{- end -}}

{{/* Truth ("true" or nothing): the gateways watch endpoints. */}}
{{- define "penstock.watches" -}}
{{- range (include "penstock.engines" . | fromJson).engines -}}
  {{- if and .isOurs (eq .discovery "watch") }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* gateway.toml: what takes a restart ("penstock.gatewayRestart"), and what is read again by itself. */}}
{{- define "penstock.gatewayToml" -}}
{{ include "penstock.gatewayRestart" . }}
{{- $read := pick .Values.gateway.settings "keys" "tenants" "issuers" "grants" "certificates" -}}
{{- with (include "penstock.tenants" . | fromJson).tenants }}{{ $_ := set $read "tenants" . }}{{ end }}
{{ include "penstock.tomlLines" $read }}
{{- end -}}

{{- define "penstock.gatewayRestart" -}}
{{- $own := omit .Values.gateway.settings "keys" "tenants" "issuers" "grants" "certificates" -}}
{{- $models := list -}}
{{- range (include "penstock.engines" . | fromJson).engines -}}
  {{- $it := dict "root" $ "engine" . -}}
  {{- $model := dict "name" .served -}}
  {{- if .isOurs }}{{ $_ := set $model "upstream_model" .served }}{{ end -}}
  {{- if and .isOurs (ne .discovery "names") -}}
    {{- $_ := set $model "discovery" (include "penstock.discovery" $it | fromJson) -}}
  {{- else -}}
    {{- $_ := set $model "replicas" (include "penstock.replicas" $it | fromJson).urls -}}
  {{- end -}}
  {{- $models = append $models (mergeOverwrite $model (default (dict) .gateway)) -}}
{{- end -}}
{{- $_ := set $own "models" $models -}}
{{- $listen := dict "host" .Values.bindAddress "port" .Values.gateway.port -}}
{{- if eq .Values.gateway.tls.mode "inFront" -}}
  {{- $_ := set $listen "plaintext" true -}}
{{- else -}}
  {{- $tls := dict "cert" "/etc/penstock-tls/tls.crt" "key" "/etc/penstock-tls/tls.key" -}}
  {{- $_ := set $listen "tls" (merge $tls (dig "listen" "tls" (dict) .Values.gateway.settings)) -}}
{{- end -}}
{{- $_ := set $own "listen" $listen -}}
{{- $admin := dict "host" .Values.bindAddress "port" .Values.gateway.adminPort -}}
{{- $name := include "penstock.adminName" . -}}
{{- $short := trimSuffix ".svc" $name -}}
{{- $_ := set $admin "names" (concat (list $name $short (trimSuffix (print "." .Release.Namespace) $short)) .Values.gateway.adminNames) -}}
{{- if .Values.gateway.adminTls.secret -}}
  {{- $files := "/etc/penstock-admin-tls/" -}}
  {{- $_ := set $admin "tls" (dict "cert" (print $files "tls.crt") "key" (print $files "tls.key")) -}}
{{- else -}}
  {{- $_ := set $admin "plaintext" true -}}
{{- end -}}
{{- $_ := set $own "admin" $admin -}}
{{- if include "penstock.hasHopTls" . -}}
  {{- $files := "/etc/penstock-hop/" -}}
  {{- $_ := set $own "hop" (dict "ca" (print $files "ca.crt") "cert" (print $files "tls.crt") "key" (print $files "tls.key")) -}}
{{- end -}}
{{- $times := dict "total_s" .Values.drain.longestStreamS "drain_s" (include "penstock.gatewayDrainS" . | int) -}}
{{- $_ := set $times "drain_delay_s" .Values.drain.endpointDelayS -}}
{{- $_ := set $own "timeouts" (mergeOverwrite $times (default (dict) $own.timeouts)) -}}
{{- $url := include "penstock.redisUrl" . -}}
{{- if $url -}}
  {{- $redis := dict "url" $url -}}
  {{- if .Values.redis.existingSecret }}{{ $_ := set $redis "password" "file:/etc/penstock-redis/password" }}{{ end -}}
  {{- $_ := set $own "redis" (mergeOverwrite $redis (default (dict) $own.redis)) -}}
{{- end -}}
{{- $quotas := dict "store" (ternary "redis" "memory" (ne $url "")) "gateways" (include "penstock.gatewaysMax" . | int) -}}
{{- $_ := set $own "quotas" (mergeOverwrite $quotas (default (dict) $own.quotas)) -}}
{{- include "penstock.tomlLines" $own | trim -}}
{{- end -}}

{{- define "penstock.gatewaysMax" -}}
{{- if .Values.gateway.autoscaling.enabled }}{{ .Values.gateway.autoscaling.maxReplicas }}{{ else }}{{ .Values.gateway.replicas }}{{ end -}}
{{- end -}}

{{/* The directory, or the name, of an engine's model. */}}
{{- define "penstock.modelPath" -}}
{{- $source := .engine.source -}}
{{- if $source.demo -}}
demo
{{- else if $source.hub -}}
/models/models--{{ $source.hub.repo | replace "/" "--" }}/snapshots/{{ $source.hub.revision }}
{{- else if $source.claim -}}
/models/{{ $source.claim.path }}
{{- else -}}
/models/{{ $source.image.path }}
{{- end -}}
{{- end -}}

{{/* engine.toml of one model. */}}
{{- define "penstock.engineToml" -}}
{{- $engine := .engine -}}
{{- $own := dict "model" (include "penstock.modelPath" . | trimSuffix "/") "served_model_name" $engine.served -}}
{{- $_ := set $own "host" .root.Values.bindAddress -}}
{{- $_ := set $own "port" $engine.port -}}
{{- $_ := set $own "probe_port" $engine.probePort -}}
{{- $_ := set $own "startup_timeout_s" $engine.probes.startupS -}}
{{- $_ := set $own "drain_timeout_s" (include "penstock.engineDrainS" . | int) -}}
{{- $ranks := mul (max 1 (int $engine.gpus)) (int $engine.nodes) -}}
{{- if gt (int $ranks) 1 }}{{ $_ := set $own "tensor_parallel_size" (int $ranks) }}{{ end -}}
{{- if gt (int $engine.gpus) 0 }}{{ $_ := set $own "device" "cuda" }}{{ end -}}
{{- if ne $engine.kvDisk.volume "none" -}}
  {{- /* A directory of its own within: the volume's belongs to root, and the engine closes it to all others. */ -}}
  {{- $_ := set $own "kv_disk_dir" "/var/lib/penstock/kv/pages" -}}
  {{- $_ := set $own "kv_disk_bytes" (div (mul (int64 $engine.kvDisk.sizeGiB) 1073741824 9) 10) -}}
{{- end -}}
{{- if include "penstock.hasHopTls" .root -}}
  {{- $_ := set $own "tls_cert" "/etc/penstock-hop/tls.crt" -}}
  {{- $_ := set $own "tls_key" "/etc/penstock-hop/tls.key" -}}
  {{- $_ := set $own "tls_client_ca" "/etc/penstock-hop/ca.crt" -}}
{{- end -}}
{{- include "penstock.tomlLines" (mergeOverwrite $own $engine.settings) | trim -}}
{{- end -}}

{{- define "penstock.dnsEgress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{/* The ports of the Redis at redis.url: {"ports": [...]} in JSON. */}}
{{- define "penstock.redisPorts" -}}
{{- $ports := list -}}
{{- if .Values.redis.url -}}
  {{- $hosts := regexReplaceAll "/[0-9]*$" (regexReplaceAll "^rediss?://" .Values.redis.url "") "" -}}
  {{- range $host := splitList "," $hosts -}}
    {{- $port := regexFind ":[0-9]+$" $host | trimPrefix ":" | default "6379" -}}
    {{- $ports = append $ports (int $port) -}}
  {{- end -}}
{{- end -}}
{{- toJson (dict "ports" (uniq $ports)) -}}
{{- end -}}

{{- define "penstock.scaled" -}}
{{- if .engine.isGroup -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: StatefulSet
{{- end }}
name: {{ .name }}
{{- end -}}

{{/* Up at once; down by one replica at a time, whose cache is lost, and only after a while. */}}
{{- define "penstock.scaling" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies:
    - type: Percent
      value: 100
      periodSeconds: 60
scaleDown:
  stabilizationWindowSeconds: {{ .stabilizationS }}
  policies:
    - type: Pods
      value: 1
      periodSeconds: 300
{{- end -}}

{{- define "penstock.hopCertificate" -}}
duration: {{ .Values.hop.duration }}
renewBefore: {{ .Values.hop.renewBefore }}
privateKey:
  algorithm: ECDSA
  size: 256
  rotationPolicy: Always
issuerRef:
  name: {{ default (print (include "penstock.fullname" .) "-hop") .Values.hop.issuer.name }}
  kind: {{ .Values.hop.issuer.kind }}
  group: {{ .Values.hop.issuer.group }}
{{- end -}}
