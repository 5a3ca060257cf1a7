{{/* The template of an engine's pods: (dict "root" $ "engine" $engine "isWorker" false). Of a group, the leader
has rank 0 and serves; a worker has no listener. With one GPU in each pod the pods are the ranks; with more,
torchrun starts a pod's ranks. */}}
{{- define "penstock.enginePod" -}}
{{- $root := .root }}
{{- $engine := .engine }}
{{- $name := include "penstock.engine" . }}
{{- $selector := include "penstock.selector" (dict "root" $root "component" "engine" "model" $engine.name) }}
{{- $source := $engine.source }}
{{- $ranks := max 1 (int $engine.gpus) }}
{{- $isWorker := default false .isWorker }}
{{- $isGroup := gt (int $engine.nodes) 1 }}
metadata:
  labels:
    {{- include "penstock.podLabels" (dict "root" $root "component" "engine" "model" $engine.name) | nindent 4 }}
    {{- with $engine.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    penstock.dev/settings: {{ include "penstock.engineToml" . | sha256sum }}
    {{- with $engine.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "penstock.fullname" $root }}-engines
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "penstock.graceS" (dict "root" $root "drainS" (include "penstock.engineDrainS" . | int)) }}
  securityContext:
    {{- include "penstock.podSecurity" $root | nindent 4 }}
  {{- with $engine.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- include "penstock.placement" (dict "root" $root "of" $engine "selector" $selector) | trim | nindent 2 }}
  {{- with $source.hub }}
  initContainers:
    - name: download
      image: {{ include "penstock.image" (dict "root" $root "image" $engine.image) }}
      imagePullPolicy: {{ $engine.image.pullPolicy }}
      command: ["python", "-c"]
      args:
        - |
          import sys
          from pathlib import Path
          from engine.runtime.setup.hub import download
          print(download(sys.argv[1], sys.argv[2], Path("/models")))
        - {{ .repo | quote }}
        - {{ .revision | quote }}
      env:
        - name: HOME
          value: /tmp
        - name: HF_HOME
          value: /tmp/hub
        {{- with .endpoint }}
        - name: HF_ENDPOINT
          value: {{ . | quote }}
        {{- end }}
        {{- with .tokenSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
        {{- end }}
        {{- with $engine.download.proxy }}
        - name: HTTPS_PROXY
          value: {{ . | quote }}
        {{- end }}
        {{- if $engine.download.caSecret.name }}
        - name: SSL_CERT_FILE
          value: /etc/penstock-ca/ca.crt
        - name: REQUESTS_CA_BUNDLE
          value: /etc/penstock-ca/ca.crt
        {{- end }}
        {{- with $engine.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml $engine.download.resources | nindent 8 }}
      securityContext:
        {{- include "penstock.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: models
          mountPath: /models
        - name: tmp
          mountPath: /tmp
        {{- if $engine.download.caSecret.name }}
        - name: ca
          mountPath: /etc/penstock-ca
          readOnly: true
        {{- end }}
        {{- with $engine.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "penstock.image" (dict "root" $root "image" $engine.image) }}
      imagePullPolicy: {{ $engine.image.pullPolicy }}
      {{- if and $isGroup (gt $ranks 1) }}
      command: ["torchrun"]
      args:
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --nproc-per-node={{ $ranks }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port={{ $engine.rendezvousPort }}
        - --max-restarts=0
        - -m
        - engine
        - serve
        - --config
        - /etc/penstock/engine.toml
      {{- else }}
      command: ["penstock", "engine"]
      args: ["--config", "/etc/penstock/engine.toml"]
      {{- end }}
      env:
        - name: HOME
          value: /tmp
        - name: HF_HUB_OFFLINE
          value: "1"
        - name: TRITON_CACHE_DIR
          value: /var/cache/penstock/triton
        {{- if and $isGroup (eq $ranks 1) }}
        - name: RANK
          value: $(LWS_WORKER_INDEX)
        - name: WORLD_SIZE
          value: $(LWS_GROUP_SIZE)
        - name: MASTER_ADDR
          value: $(LWS_LEADER_ADDRESS)
        - name: MASTER_PORT
          value: {{ $engine.rendezvousPort | quote }}
        {{- end }}
        {{- with $engine.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $isWorker }}
      ports:
        - name: http
          containerPort: {{ $engine.port }}
          protocol: TCP
        - name: probes
          containerPort: {{ $engine.probePort }}
          protocol: TCP
      {{- include "penstock.probes" (dict "of" $engine.probes "isHttps" false) | nindent 6 }}
      {{- end }}
      lifecycle:
        {{- if $isWorker }}
        preStop:
          exec:
            command: ["python", "/etc/penstock/group.py", "worker", {{ $engine.probePort | toString | quote }}]
        {{- else if and $isGroup (gt $ranks 1) }}
        preStop:
          exec:
            command: ["python", "/etc/penstock/group.py", "leader", {{ $root.Values.drain.endpointDelayS | toString | quote }}]
        {{- else }}
        {{- include "penstock.preStop" $root | nindent 8 }}
        {{- end }}
      resources:
        {{- $resources := deepCopy $engine.resources }}
        {{- if eq $engine.kvDisk.volume "emptyDir" }}
        {{- $room := dict "ephemeral-storage" (printf "%dGi" (int $engine.kvDisk.sizeGiB)) }}
        {{- $_ := set $resources "requests" (merge (default (dict) $resources.requests) $room) }}
        {{- end }}
        {{- if gt (int $engine.gpus) 0 }}
        {{- $_ := set $resources "limits" (merge (dict $engine.gpuResource (toString $engine.gpus)) (default (dict) $resources.limits)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "penstock.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/penstock
          readOnly: true
        - name: tmp
          mountPath: /tmp
        - name: cache
          mountPath: /var/cache/penstock
        {{- if not $source.demo }}
        - name: models
          mountPath: /models
          readOnly: true
        {{- end }}
        {{- if ne $engine.kvDisk.volume "none" }}
        - name: kv
          mountPath: /var/lib/penstock/kv
        {{- end }}
        {{- if gt $ranks 1 }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- if include "penstock.hasHopTls" $root }}
        - name: hop
          mountPath: /etc/penstock-hop
          readOnly: true
        {{- end }}
        {{- with $engine.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ $name }}
    - name: tmp
      emptyDir:
        sizeLimit: 2Gi
    - name: cache
      emptyDir:
        sizeLimit: 4Gi
    {{- with $source.claim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ .name }}
        readOnly: true
    {{- end }}
    {{- with $source.image }}
    - name: models
      image:
        reference: {{ .reference | quote }}
        pullPolicy: {{ default "IfNotPresent" .pullPolicy }}
    {{- end }}
    {{- with $source.hub }}
    {{- if or .cache.claim .cache.create }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ default (print $name "-models") .cache.claim }}
    {{- else if .cache.size }}
    - name: models
      emptyDir:
        sizeLimit: {{ .cache.size }}
    {{- end }}
    {{- end }}
    {{- if and $source.hub $engine.download.caSecret.name }}
    - name: ca
      secret:
        secretName: {{ $engine.download.caSecret.name }}
        items:
          - {key: {{ $engine.download.caSecret.key }}, path: ca.crt}
    {{- end }}
    {{- if eq $engine.kvDisk.volume "emptyDir" }}
    - name: kv
      emptyDir:
        sizeLimit: {{ $engine.kvDisk.sizeGiB }}Gi
    {{- end }}
    {{- if gt $ranks 1 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $engine.sharedMemory }}
    {{- end }}
    {{- if include "penstock.hasHopTls" $root }}
    - name: hop
      secret:
        secretName: {{ include "penstock.engineHopSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- with $engine.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
