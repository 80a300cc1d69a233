{{/*
What all pods of the chart have in common. Each takes (dict "root" $ "role" … "values" …), "values" being those of the
router or of one pool. Ports: 50051 router, 8000 its HTTP, 50061 worker, 9100 metrics; 50071 health alone, where the other ports are locked;
paths: /etc/diptych, /etc/tls, /etc/public-tls, /etc/api-keys, /etc/hub-token, /model, /cache, /tmp.
*/}}

{{/* "true" where clients have to say who they are, by a key or by an issuer's token. */}}
{{- define "diptych.hasTenants" -}}
{{- $settings := default (dict) .Values.router.settings -}}
{{- $jwt := default (dict) $settings.jwt -}}
{{- if or .Values.router.apiKeys.secretName $jwt.issuer -}}true{{- end -}}
{{- end -}}

{{/* "true" where gRPC speaks TLS or asks who calls: probes have no certificate and no key. */}}
{{- define "diptych.isLocked" -}}
{{- if ne .role "router" -}}
{{- if .root.Values.tls.enabled -}}true{{- end -}}
{{- else if or .values.publicTls.secretName (include "diptych.hasTenants" .root) -}}true{{- end -}}
{{- end -}}

{{- define "diptych.probePort" -}}
{{- if include "diptych.isLocked" . -}}50071{{- else -}}{{ eq .role "router" | ternary 50051 50061 }}{{- end -}}
{{- end -}}

{{/* "true" of a pool whose workers may have both roles, and change them while they run. */}}
{{- define "diptych.isSoft" -}}
{{- if and (eq .role "decode") .values.settings.roles -}}true{{- end -}}
{{- end -}}

{{/* Flags that the chart sets: where to listen, the model, where traces go. The rest is in the file of settings. */}}
{{- define "diptych.args" -}}
- {{ include "diptych.isSoft" . | eq "true" | ternary "worker" .role }}
- --config=/etc/diptych/settings.yaml
- --listen=0.0.0.0:{{ eq .role "router" | ternary 50051 50061 }}
{{- if .root.Values.metrics.enabled }}
- --metrics-port=9100
{{- end }}
- {{ printf "--model=%s" .root.Values.model.source | toJson }}
- --cache-dir=/cache
{{- if eq .role "router" }}
- {{ .values.http.enabled | ternary "--http-port=8000" "--no-http" }}
- --no-http-metrics
{{- end }}
{{- if and (eq .role "router") .root.Values.model.servedName }}
- {{ printf "--served-model-name=%s" .root.Values.model.servedName | toJson }}
{{- end }}
{{- with .root.Values.tracing.endpoint }}
- --otlp-endpoint={{ . }}
{{- end }}
{{- if include "diptych.isLocked" . }}
- --health-port=50071
{{- end }}
{{- if .root.Values.tls.enabled }}
- --tls.certificate=/etc/tls/tls.crt
- --tls.key=/etc/tls/tls.key
- --tls.ca=/etc/tls/ca.crt
- --tls.domain={{ .root.Values.tls.domain }}
{{- end }}
{{- if eq .role "router" }}
{{- if .values.publicTls.secretName }}
- --public-tls.certificate=/etc/public-tls/tls.crt
- --public-tls.key=/etc/public-tls/tls.key
{{- end }}
{{- if .values.apiKeys.secretName }}
- --api-keys=/etc/api-keys/keys
{{- end }}
{{- end }}
{{- end -}}

{{- define "diptych.ownEnv" -}}
- name: HF_HOME
  value: /cache/huggingface
- name: NUMBA_CACHE_DIR
  value: /tmp/kernels
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if .root.Values.model.tokenSecret.name }}
- name: HF_TOKEN_PATH
  value: /etc/hub-token/token
{{- end }}
{{- end -}}

{{/* Each name once: what extraEnv has comes before the chart's own. */}}
{{- define "diptych.env" -}}
{{- $extra := list -}}
{{- range .values.extraEnv }}{{ $extra = append $extra .name }}{{ end -}}
{{- $env := list -}}
{{- range include "diptych.ownEnv" . | fromYamlArray -}}
{{- if not (has .name $extra) }}{{ $env = append $env . }}{{ end -}}
{{- end -}}
{{- $env = concat $env (default (list) .values.extraEnv) -}}
{{- /* Last, as it names others. */ -}}
{{- $where := printf "k8s.namespace.name=%s,k8s.pod.name=$(POD_NAME),k8s.node.name=$(NODE_NAME)" .root.Release.Namespace -}}
{{- range $key, $value := .root.Values.tracing.resourceAttributes }}{{ $where = printf "%s,%s=%s" $where $key $value }}{{ end -}}
{{- $otel := dict "name" "OTEL_RESOURCE_ATTRIBUTES" "value" $where -}}
{{- if not (has $otel.name $extra) }}{{ $env = append $env $otel }}{{ end -}}
{{- toYaml $env -}}
{{- end -}}

{{/* Liveness asks for the process as a whole, readiness for what it serves: who loads or drains must not be killed. */}}
{{- define "diptych.probes" -}}
startupProbe:
  grpc:
    port: {{ include "diptych.probePort" . }}
  {{- toYaml .values.probes.startup | nindent 2 }}
livenessProbe:
  grpc:
    port: {{ include "diptych.probePort" . }}
  {{- toYaml .values.probes.liveness | nindent 2 }}
readinessProbe:
  grpc:
    port: {{ include "diptych.probePort" . }}
    service: {{ include "diptych.isSoft" . | eq "true" | ternary "diptych.v1.Worker" (get (dict "router" "diptych.v1.Inference" "prefill" "diptych.v1.Prefill" "decode" "diptych.v1.Decode") .role) }}
  {{- toYaml .values.probes.readiness | nindent 2 }}
{{- end -}}

{{- define "diptych.podSecurity" -}}
runAsNonRoot: true
{{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
{{- with index $.Values.podSecurity $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- if .Values.podSecurity.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "diptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
capabilities:
  drop: [ALL]
{{- if . }}
  add: [IPC_LOCK]
{{- end }}
{{- end -}}

{{/* Takes out of resources, which it changes, the amounts that are null, whoever gave them. */}}
{{- define "diptych.dropNulls" -}}
{{- range $amounts := list .requests .limits -}}
{{- range $name, $amount := $amounts -}}
{{- if kindIs "invalid" $amount }}{{ $_ := unset $amounts $name }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diptych.resources" -}}
{{- $own := default (dict) .values.resources -}}
{{- $resources := deepCopy $own -}}
{{- include "diptych.dropNulls" $resources -}}
{{- range $resources.claims -}}
{{- $name := .name -}}
{{- $known := list -}}
{{- range $.values.resourceClaims }}{{ $known = append $known .name }}{{ end -}}
{{- if not (has $name $known) -}}
{{- fail (printf "%s: resources.claims: resourceClaims has none of the name %v" $.settingsName $name) -}}
{{- end -}}
{{- end -}}
{{- if and (ne .role "router") .values.rdma.enabled -}}
{{- if not (include "diptych.hasOwnPorts" .values) -}}
{{- fail (printf "%s: rdma.enabled, but settings.transfer.transports has none that uses it: say [nixl, inline]" .settingsName) -}}
{{- end -}}
{{- /* As the program has it: RDMA devices are those with a port; others may be right where ucx_tls is given, but never lo. What the environment says of them comes before the settings, and is not looked at. */ -}}
{{- $transfer := default (dict) .values.settings.transfer -}}
{{- $devices := default "lo" $transfer.ucx_net_devices -}}
{{- $mayBeRdma := or (contains ":" $devices) (and $transfer.ucx_tls (ne $devices "lo")) -}}
{{- range .values.extraEnv -}}
{{- if hasSuffix "_TRANSFER__UCX_NET_DEVICES" .name }}{{ $mayBeRdma = true }}{{ end -}}
{{- if and (hasSuffix "_TRANSFER__UCX_TLS" .name) (ne $devices "lo") }}{{ $mayBeRdma = true }}{{ end -}}
{{- end -}}
{{- if not $mayBeRdma -}}
{{- fail (printf "%s: rdma.enabled, but settings.transfer.ucx_net_devices (%s) names no such device: say mlx5_0:1 or what the pod has" .settingsName $devices) -}}
{{- end -}}
{{- $device := dict "limits" (dict .values.rdma.resourceName .values.rdma.quantity) -}}
{{- $resources = mergeOverwrite $resources $device -}}
{{- end -}}
{{- if ne .role "router" -}}
{{- if and (eq (default "cpu" .values.settings.device) "cuda") (not $resources.claims) -}}
{{- $hasCard := false -}}
{{- range $name, $amount := $own.limits }}{{ if and $amount (hasPrefix "nvidia.com/" $name) }}{{ $hasCard = true }}{{ end }}{{ end -}}
{{- if not $hasCard -}}
{{- fail (printf "%s: settings.device is cuda, and no GPU is asked for: say resources.limits (nvidia.com/gpu: 1) or resources.claims" .settingsName) -}}
{{- end -}}
{{- end -}}
{{- $ranks := int (default 1 .values.settings.tensor_parallel) -}}
{{- $cards := dig "limits" "nvidia.com/gpu" "" $resources -}}
{{- if and $cards (gt $ranks 1) (ne (int $cards) $ranks) -}}
{{- fail (printf "%s: tensor_parallel is %d, and each rank has a GPU: resources.limits must have as many (nvidia.com/gpu is %v)" .settingsName $ranks $cards) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "diptych.mounts" -}}
{{- $own := include "diptych.ownMounts" . -}}
{{- $paths := list -}}
{{- range fromYamlArray $own }}{{ $paths = append $paths .mountPath }}{{ end -}}
{{- range .values.extraVolumeMounts -}}
{{- include "diptych.notOurs" (dict "name" (printf "%s: extraVolumeMounts" $.settingsName) "given" (dict .mountPath "") "ours" $paths) -}}
{{- end -}}
{{- $own }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "diptych.ownMounts" -}}
- name: settings
  mountPath: /etc/diptych
  readOnly: true
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- if or .root.Values.model.existingClaim .root.Values.model.image.reference }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- if .root.Values.model.tokenSecret.name }}
- name: hub-token
  mountPath: /etc/hub-token
  readOnly: true
{{- end }}
{{- if ne .role "router" }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/tls
  readOnly: true
{{- end }}
{{- if eq .role "router" }}
{{- if .values.publicTls.secretName }}
- name: public-tls
  mountPath: /etc/public-tls
  readOnly: true
{{- end }}
{{- if .values.apiKeys.secretName }}
- name: api-keys
  mountPath: /etc/api-keys
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{/* Takes "settingsName" as well, the ConfigMap's. */}}
{{- define "diptych.volumes" -}}
{{- $own := include "diptych.ownVolumes" . -}}
{{- $names := list -}}
{{- range fromYamlArray $own }}{{ $names = append $names .name }}{{ end -}}
{{- range .values.extraVolumes -}}
{{- include "diptych.notOurs" (dict "name" (printf "%s: extraVolumes" $.settingsName) "given" (dict .name "") "ours" $names) -}}
{{- end -}}
{{- $own }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "diptych.ownVolumes" -}}
- name: settings
  configMap:
    name: {{ .settingsName }}
- name: cache
{{- with .root.Values.model.cache }}
{{- if .existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .existingClaim | quote }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .sizeLimit }}
{{- end }}
{{- end }}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- include "diptych.modelVolume" .root }}
{{- with .root.Values.model.tokenSecret }}
{{- if .name }}
- name: hub-token
  secret:
    secretName: {{ .name | quote }}
    defaultMode: 0440
    items:
      - key: {{ .key | quote }}
        path: token
{{- end }}
{{- end }}
{{- if ne .role "router" }}
{{- $settings := default (dict) .values.settings }}
{{- /* With auto they may be. */}}
{{- $isOnCards := and (ne (default "cpu" $settings.device) "cpu") (gt (int $settings.tensor_parallel) 1) }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ default ($isOnCards | ternary "1Gi" "64Mi") .values.shmSize }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "diptych.tlsSecret" (dict "root" .root "role" .role) | quote }}
    defaultMode: 0440
{{- end }}
{{- if eq .role "router" }}
{{- with .values.publicTls.secretName }}
- name: public-tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- if .values.apiKeys.secretName }}
- name: api-keys
  secret:
    secretName: {{ .values.apiKeys.secretName | quote }}
    defaultMode: 0440
    items:
      - key: {{ .values.apiKeys.key | quote }}
        path: keys
{{- end }}
{{- end }}
{{- end -}}

{{- define "diptych.modelVolume" -}}
{{- with .Values.model }}
{{- if and .existingClaim .image.reference }}
{{- fail "model: existingClaim and image.reference are both mounted at /model: give one" }}
{{- end }}
{{- if .existingClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .existingClaim | quote }}
    readOnly: true
{{- else if .image.reference }}
{{- if semverCompare "<1.31-0" $.Capabilities.KubeVersion.Version }}
{{- fail "model.image: Kubernetes has images as volumes since 1.31" }}
{{- end }}
- name: model
  image:
    reference: {{ .image.reference }}
    pullPolicy: {{ .image.pullPolicy }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Longer than all that the process waits for after SIGTERM, so that nothing is cut off. */}}
{{- define "diptych.gracePeriod" -}}
{{- $settings := default (dict) .values.settings -}}
{{- $timers := default (dict) $settings.timers -}}
{{- $drain := hasKey $timers "drain_s" | ternary $timers.drain_s 20.0 -}}
{{- $lameDuck := hasKey $timers "lame_duck_s" | ternary $timers.lame_duck_s 0.25 -}}
{{- $leave := hasKey $timers "leave_s" | ternary $timers.leave_s 35.0 -}}
{{- $waits := addf $drain (eq .role "router" | ternary $leave 0.0) (mulf 2 $lameDuck) (default 0 .values.preStopSeconds) -}}
{{- $given := .values.terminationGracePeriodSeconds -}}
{{- if and $given (lt (float64 $given) (float64 $waits)) -}}
{{- fail (printf "%s: terminationGracePeriodSeconds: %v cuts off what takes %v s (preStopSeconds and timers)" .role $given $waits) -}}
{{- end -}}
{{- default (addf $waits 10 | ceil) $given | int -}}
{{- end -}}

{{/* Where pods go, and all else that a pod's specification takes as it is. Takes "selector" as well. */}}
{{- define "diptych.podCommon" -}}
{{- range $key, $value := .values.podLabels -}}
{{- if hasKey (fromYaml $.selector) $key -}}
{{- fail (printf "%s: podLabels: by %s pods are found, and the chart sets it" $.settingsName $key) -}}
{{- end -}}
{{- end -}}
{{- $labels := include "diptych.labels" (dict "root" .root "component" .role "pool" .pool) | fromYaml -}}
{{- include "diptych.notOurs" (dict "name" (printf "%s: podLabels" .settingsName) "given" .values.podLabels "ours" (keys $labels)) -}}
{{- include "diptych.notOurs" (dict "name" (printf "%s: podAnnotations" .settingsName) "given" .values.podAnnotations "ours" (list "checksum/settings")) -}}
automountServiceAccountToken: {{ and (eq .role "router") (eq .root.Values.router.discovery "kubernetes") }}
# Addresses of services as environment variables would look like settings.
enableServiceLinks: false
serviceAccountName: {{ include "diptych.serviceAccountName" .root | quote }}
terminationGracePeriodSeconds: {{ include "diptych.gracePeriod" . }}
securityContext:
  {{- include "diptych.podSecurity" .root | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "diptych.affinity" . }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{- hasKey . "labelSelector" | ternary . (merge (dict "labelSelector" (dict "matchLabels" (fromYaml $.selector))) .) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- with .values.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The container. */}}
{{- define "diptych.container" -}}
- name: diptych
  image: {{ include "diptych.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [diptych]
  args:
    {{- include "diptych.args" . | nindent 4 }}
  env:
    {{- include "diptych.env" . | nindent 4 }}
  ports:
    - name: grpc
      containerPort: {{ eq .role "router" | ternary 50051 50061 }}
    {{- if and (eq .role "router") .values.http.enabled }}
    - name: http
      containerPort: 8000
    {{- end }}
    {{- if .root.Values.metrics.enabled }}
    - name: metrics
      containerPort: 9100
    {{- end }}
    {{- if include "diptych.isLocked" . }}
    - name: health
      containerPort: 50071
    {{- end }}
  {{- include "diptych.probes" . | nindent 2 }}
  {{- with .values.preStopSeconds }}
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ . | quote }}]
  {{- end }}
  resources:
    {{- include "diptych.resources" . | nindent 4 }}
  securityContext:
    {{- include "diptych.containerSecurity" (and (ne .role "router") .values.rdma.enabled .values.rdma.ipcLock) | nindent 4 }}
  volumeMounts:
    {{- include "diptych.mounts" . | nindent 4 }}
{{- end -}}
