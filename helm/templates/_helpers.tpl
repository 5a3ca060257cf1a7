{{/* Names and labels. */}}

{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.gateway" -}}
{{ include "penstock.fullname" . }}-gateway
{{- end -}}

{{/* The name of a model's workload: (dict "root" $ "engine" $engine). */}}
{{- define "penstock.engine" -}}
{{ include "penstock.fullname" .root }}-{{ .engine.name }}
{{- end -}}

{{/* Labels that select a component's pods: (dict "root" $ "component" "gateway" "model" ""). */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
penstock.dev/model: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: none that changes with the chart's version, or every upgrade would replace every engine. */}}
{{- define "penstock.podLabels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An object's head: (dict "root" $ "name" ... "component" ... "model" ...). */}}
{{- define "penstock.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A reference to an image: (dict "root" $ "image" $image). */}}
{{- define "penstock.image" -}}
{{- $registry := default .root.Values.global.imageRegistry .image.registry -}}
{{- if $registry }}{{ trimSuffix "/" $registry }}/{{ end -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end -}}

{{/* The engines of all models, as {"engines": [...]} in JSON: each the common settings with its own above. */}}
{{- define "penstock.engines" -}}
{{- $engines := list -}}
{{- $seen := dict -}}
{{- range .Values.models -}}
  {{- if hasKey $seen .name }}{{ fail (printf "models: %q is there twice" .name) }}{{ end -}}
  {{- $_ := set $seen .name true -}}
  {{- $engine := mergeOverwrite (deepCopy (omit $.Values.engine "source")) (deepCopy .) -}}
  {{- $source := default $.Values.engine.source .source -}}
  {{- $_ := set $engine "source" $source -}}
  {{- $_ := set $engine "served" (default .name .servedName) -}}
  {{- $_ := set $engine "isOurs" (empty .urls) -}}
  {{- $_ := set $engine "isGroup" (eq $engine.workload "LeaderWorkerSet") -}}
  {{- if eq $engine.discovery "auto" -}}
    {{- $isFixed := or (eq $engine.autoscaling.mode "none") $engine.isGroup -}}
    {{- $_ := set $engine "discovery" (ternary "names" "dns" $isFixed) -}}
  {{- end -}}
  {{- if $engine.isOurs -}}
    {{- include "penstock.checkEngine" (dict "root" $ "engine" $engine) -}}
  {{- end -}}
  {{- $engines = append $engines $engine -}}
{{- end -}}
{{- toJson (dict "engines" $engines) -}}
{{- end -}}

{{- define "penstock.checkEngine" -}}
{{- $engine := .engine -}}
{{- $name := printf "models[%s]" $engine.name -}}
{{- if ne (len $engine.source) 1 -}}
  {{- fail (printf "%s: source needs exactly one of demo, claim, image and hub" $name) -}}
{{- end -}}
{{- if and (gt (int $engine.nodes) 1) (not $engine.isGroup) -}}
  {{- fail (printf "%s: nodes of %d need workload: LeaderWorkerSet" $name (int $engine.nodes)) -}}
{{- end -}}
{{- if and $engine.source.image (semverCompare "<1.33-0" .root.Capabilities.KubeVersion.Version) -}}
  {{- fail (printf "%s: source.image needs Kubernetes 1.33 or newer" $name) -}}
{{- end -}}
{{- if and $engine.pdb.enabled (eq (toString $engine.pdb.maxUnavailable) "0") -}}
  {{- fail (printf "%s: pdb.maxUnavailable of 0 would block every eviction: a node could not be drained" $name) -}}
{{- end -}}
{{- include "penstock.checkKvDisk" . -}}
{{- $auto := $engine.autoscaling -}}
{{- if and (ne $auto.mode "none") (gt (int $auto.minReplicas) (int $auto.maxReplicas)) -}}
  {{- fail (printf "%s: autoscaling.minReplicas is above autoscaling.maxReplicas" $name) -}}
{{- end -}}
{{- if and (eq $engine.discovery "watch") (ne .root.Values.hop.mode "plain") -}}
  {{- fail (printf "%s: discovery: watch finds addresses, for which the hop's certificates are not: use dns or names" $name) -}}
{{- end -}}
{{- if and (eq $engine.discovery "dns") $engine.isGroup -}}
  {{- fail (printf "%s: discovery: dns needs a StatefulSet: the leaders of groups have no SRV records" $name) -}}
{{- end -}}
{{- if and $engine.inferencePool.enabled (not $engine.inferencePool.picker) -}}
  {{- fail (printf "%s: inferencePool needs picker, the Service of an endpoint picker" $name) -}}
{{- end -}}
{{- end -}}

{{/* What the engine would refuse at its start, and what could never find a file again. */}}
{{- define "penstock.checkKvDisk" -}}
{{- $engine := .engine -}}
{{- $name := printf "models[%s]: kvDisk" $engine.name -}}
{{- if ne $engine.kvDisk.volume "none" -}}
  {{- if gt (int (mul (max 1 (int $engine.gpus)) (int $engine.nodes))) 1 -}}
    {{- fail (printf "%s needs a model on one GPU: with several, volume has to be none" $name) -}}
  {{- end -}}
  {{- $settings := $engine.settings -}}
  {{- $isOff := eq (toString $settings.prefix_cache) "false" -}}
  {{- if or $isOff (regexMatch "^0([A-Za-z]|$)" (toString $settings.swap_memory)) -}}
    {{- fail (printf "%s needs the tiers above it: prefix_cache and swap_memory in settings" $name) -}}
  {{- end -}}
{{- end -}}
{{- if eq $engine.kvDisk.volume "claim" -}}
  {{- if $engine.isGroup -}}
    {{- fail (printf "%s.volume: claim needs workload: StatefulSet, whose pods keep their names" $name) -}}
  {{- end -}}
  {{- $cache := dig "hub" "cache" (dict) $engine.source -}}
  {{- if and $cache (not (or $cache.claim $cache.create)) -}}
    {{- fail (printf "%s.volume: claim needs source.hub.cache.claim or create: weights that are downloaded again count as others" $name) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Seconds of the longest answer: what is set for all, or the longest that a model or tenant may have. */}}
{{- define "penstock.longestStreamS" -}}
{{- $settings := .Values.gateway.settings -}}
{{- $longest := .Values.drain.longestStreamS -}}
{{- $holders := list $settings -}}
{{- range (default (list) $settings.tenants) }}{{ $holders = append $holders . }}{{ end -}}
{{- range .Values.models }}{{ $holders = append $holders (default (dict) .gateway) }}{{ end -}}
{{- range $holders -}}
  {{- $total := dig "timeouts" "total_s" 0 . -}}
  {{- if gt (float64 $total) (float64 $longest) }}{{ $longest = $total }}{{ end -}}
{{- end -}}
{{- ceil $longest -}}
{{- end -}}

{{/* Seconds for which the gateway lets open streams run after it has stopped taking new ones. */}}
{{- define "penstock.gatewayDrainS" -}}
{{- $own := dig "timeouts" "drain_s" 0 .Values.gateway.settings -}}
{{- if $own }}{{ ceil $own }}{{ else }}{{ include "penstock.longestStreamS" . }}{{ end -}}
{{- end -}}

{{/* Seconds that an engine takes to drain. */}}
{{- define "penstock.engineDrainS" -}}
{{- $own := dig "drain_timeout_s" 0 .engine.settings -}}
{{- if $own }}{{ ceil $own }}{{ else }}{{ include "penstock.longestStreamS" .root }}{{ end -}}
{{- end -}}

{{- define "penstock.graceS" -}}
{{- add .root.Values.drain.endpointDelayS .drainS .root.Values.drain.marginS -}}
{{- end -}}

{{/* The wait before SIGTERM of an engine: others go on sending until they have learned that the pod is going. A
gateway waits by itself (drain_delay_s). */}}
{{- define "penstock.preStop" -}}
preStop:
  {{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
  sleep:
    seconds: {{ .Values.drain.endpointDelayS }}
  {{- else }}
  exec:
    command: ["sleep", {{ .Values.drain.endpointDelayS | quote }}]
  {{- end }}
{{- end -}}

{{- define "penstock.podSecurity" -}}
{{ toYaml .Values.podSecurityContext }}
{{- end -}}

{{- define "penstock.containerSecurity" -}}
{{ toYaml .Values.containerSecurityContext }}
{{- end -}}

{{/* Probes of a port by the name `probes`: (dict "of" $component.probes "isHttps" false). */}}
{{- define "penstock.probes" -}}
startupProbe:
  httpGet:
    path: /startupz
    port: probes
    {{- if .isHttps }}
    scheme: HTTPS
    {{- end }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ max 1 (ceil (divf .of.startupS 2)) }}
readinessProbe:
  httpGet:
    path: /readyz
    port: probes
    {{- if .isHttps }}
    scheme: HTTPS
    {{- end }}
  periodSeconds: {{ .of.readyPeriodS }}
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  httpGet:
    path: /livez
    port: probes
    {{- if .isHttps }}
    scheme: HTTPS
    {{- end }}
  periodSeconds: {{ .of.livePeriodS }}
  timeoutSeconds: 5
  failureThreshold: {{ default 6 .of.liveFailures }}
{{- end -}}

{{/* Where a component's pods may run: (dict "root" $ "of" $component "selector" "..."). */}}
{{- define "penstock.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  {{- $own := dict "labelSelector" (dict "matchLabels" ($.selector | fromYaml)) }}
  - {{ toYaml (merge (deepCopy .) $own) | indent 4 | trim }}
  {{- end }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A value as TOML, on one line. JSON's texts are TOML's; a whole number is written as one. */}}
{{- define "penstock.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $index, $key := keys . | sortAlpha -}}
{{ if $index }}, {{ end }}{{ $key }} = {{ include "penstock.toml" (get $ $key) }}
{{- end -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $index, $value := . -}}
{{ if $index }}, {{ end }}{{ include "penstock.toml" $value }}
{{- end -}} ]
{{- else if kindIs "string" . -}}
{{ toJson . }}
{{- else if kindIs "bool" . -}}
{{ . }}
{{- else if eq (float64 .) (floor .) -}}
{{ printf "%.0f" (float64 .) }}
{{- else -}}
{{ printf "%v" . }}
{{- end -}}
{{- end -}}

{{/* A file's lines: plain values first, then sections, then lists of tables. */}}
{{- define "penstock.tomlLines" -}}
{{- $plain := dict }}{{ $sections := dict }}{{ $lists := dict -}}
{{- range $key, $value := . -}}
  {{- if kindIs "map" $value }}{{ $_ := set $sections $key $value -}}
  {{- else if and (kindIs "slice" $value) (kindIs "map" (first $value)) }}{{ $_ := set $lists $key $value -}}
  {{- else }}{{ $_ := set $plain $key $value }}{{ end -}}
{{- end -}}
{{- range $key := keys $plain | sortAlpha }}
{{ $key }} = {{ include "penstock.toml" (get $plain $key) }}
{{- end }}
{{- range $key := keys $sections | sortAlpha }}

[{{ $key }}]
{{- include "penstock.tomlPairs" (get $sections $key) }}
{{- end }}
{{- range $key := keys $lists | sortAlpha }}
{{- range $table := get $lists $key }}

[[{{ $key }}]]
{{- include "penstock.tomlPairs" $table }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.tomlPairs" -}}
{{- range $key := keys . | sortAlpha }}
{{ $key }} = {{ include "penstock.toml" (get $ $key) }}
{{- end }}
{{- end -}}

{{- define "penstock.hasHopTls" -}}
{{- if ne .Values.hop.mode "plain" }}true{{ end -}}
{{- end -}}

{{- define "penstock.gatewayHopSecret" -}}
{{- if eq .Values.hop.mode "secrets" -}}
{{ required "hop.mode secrets needs hop.gatewaySecret" .Values.hop.gatewaySecret }}
{{- else -}}
{{ include "penstock.gateway" . }}-hop
{{- end -}}
{{- end -}}

{{- define "penstock.engineHopSecret" -}}
{{- if eq .Values.hop.mode "secrets" -}}
{{ required "hop.mode secrets needs hop.engineSecret" .Values.hop.engineSecret }}
{{- else -}}
{{ include "penstock.fullname" . }}-engines-hop
{{- end -}}
{{- end -}}

{{- define "penstock.publicTlsSecret" -}}
{{- if eq .Values.gateway.tls.mode "secret" -}}
{{ required "gateway.tls.mode secret needs gateway.tls.secret" .Values.gateway.tls.secret }}
{{- else -}}
{{ include "penstock.gateway" . }}-tls
{{- end -}}
{{- end -}}

{{/* The name in DNS of the gateways' admin listeners, which their certificate is for. */}}
{{- define "penstock.adminName" -}}
{{ include "penstock.gateway" . }}-admin.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "penstock.redisUrl" -}}
{{- if .Values.redis.url -}}
{{ .Values.redis.url }}
{{- else if .Values.redis.dev.enabled -}}
redis://{{ include "penstock.fullname" . }}-redis:6379
{{- end -}}
{{- end -}}

{{/* Truth ("true" or nothing) of a three-valued mode: (dict "root" $ "mode" "auto" "api" "..."). */}}
{{- define "penstock.wanted" -}}
{{- if or (eq .mode "always") (and (eq .mode "auto") (.root.Capabilities.APIVersions.Has .api)) }}true{{ end -}}
{{- end -}}

{{/* Truth ("true" or nothing): the chart makes the keys, since nothing else says who may call. */}}
{{- define "penstock.makesKeys" -}}
{{- $settings := .Values.gateway.settings -}}
{{- $isTold := or .Values.auth.existingSecret $settings.keys $settings.issuers $settings.certificates -}}
{{- if and .Values.auth.create (not $isTold) (ne (dig "directory" "store" "file" $settings) "redis") }}true{{ end -}}
{{- end -}}

{{- define "penstock.keysSecret" -}}
{{ include "penstock.fullname" . }}-keys
{{- end -}}

{{/* The tenants of gateway.toml as {"tenants": [...]} in JSON: that of the key that the chart makes, too. */}}
{{- define "penstock.tenants" -}}
{{- $tenants := default (list) .Values.gateway.settings.tenants -}}
{{- if include "penstock.makesKeys" . -}}
  {{- $isThere := false -}}
  {{- range $tenants }}{{ if eq .id $.Values.auth.tenant }}{{ $isThere = true }}{{ end }}{{ end -}}
  {{- if not $isThere }}{{ $tenants = append $tenants (dict "id" .Values.auth.tenant) }}{{ end -}}
{{- end -}}
{{- toJson (dict "tenants" $tenants) -}}
{{- end -}}

{{/* Fails where several gateways without Redis would each allow all of a limit. What is in Secrets, the gateways
refuse: they know how many they are (quotas.gateways). */}}
{{- define "penstock.checkLimits" -}}
{{- $store := dig "quotas" "store" (ternary "redis" "memory" (ne (include "penstock.redisUrl" .) "")) .Values.gateway.settings -}}
{{- if and (gt (include "penstock.gatewaysMax" . | int) 1) (ne $store "redis") -}}
  {{- $says := "%s: several gateways would each allow all of it: give redis.url, or have one gateway" -}}
  {{- range .Values.models }}{{ if dig "limits" "" (default (dict) .gateway) }}{{ fail (printf $says (printf "models[%s].gateway.limits" .name)) }}{{ end }}{{ end -}}
  {{- range $kind := list "tenants" "keys" "certificates" "grants" -}}
    {{- range $at, $holder := (default (list) (get $.Values.gateway.settings $kind)) -}}
      {{- range $name := list "limits" "model_limits" -}}
        {{- if get $holder $name }}{{ fail (printf $says (printf "gateway.settings.%s[%d].%s" $kind $at $name)) }}{{ end -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Fails where a value has the name that it had before (former.json), and says the new one. */}}
{{- define "penstock.checkFormer" -}}
{{- range $old, $new := .Files.Get "former.json" | fromJson -}}
  {{- $names := splitList "." $old -}}
  {{- $holders := list (list $old $.Values) -}}
  {{- if eq (first $names) "engine" -}}
    {{- range $.Values.models }}{{ $holders = append $holders (list (printf "models[%s].%s" .name (rest $names | join ".")) (dict "engine" .)) }}{{ end -}}
  {{- end -}}
  {{- range $holder := $holders -}}
    {{- $inside := last $holder -}}
    {{- range $name := initial $names }}{{ $inside = default (dict) (get $inside $name) }}{{ end -}}
    {{- if hasKey $inside (last $names) }}{{ fail (printf "%s is %s now" (first $holder) $new) }}{{ end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
