{{/* Names and labels. Pods of a StatefulSet carry its name and a hash in a label: 28 + "-prefill-" + 14 leaves room. */}}
{{- define "diptych.fullname" -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full = contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- end -}}
{{- $full = $full | trunc 28 | trimSuffix "-" -}}
{{- /* Releases may have other names, services may not: Kubernetes would refuse these alone, with all else installed. */ -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "fullnameOverride: %s begins names of services, which have to be of small letters, digits and hyphens, with a letter first: say another" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{- define "diptych.routerName" -}}
{{ include "diptych.fullname" . }}-router
{{- end -}}

{{/* Of (dict "root" $ "role" "prefill" "pool" "main"). */}}
{{- define "diptych.poolName" -}}
{{ include "diptych.fullname" .root }}-{{ .role }}-{{ .pool }}
{{- end -}}

{{- define "diptych.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "diptych.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What finds pods. Of (dict "root" $ "component" "router") and, for one pool, "pool". */}}
{{- define "diptych.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . | quote }}
{{- end }}
{{- with .pool }}
diptych/pool: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "diptych.labels" -}}
{{ include "diptych.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Fails where "given", a dict or nothing, has a key of the list "ours": there would be two of it. "name" is of the value. */}}
{{- define "diptych.notOurs" -}}
{{- range $key, $value := .given -}}
{{- if has $key $.ours -}}
{{- fail (printf "%s: %s is the chart's own" $.name $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diptych.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default $.Chart.AppVersion .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What clients call the model: as the program calls `demo`, a folder, a .gguf file and a hub id. */}}
{{- define "diptych.servedName" -}}
{{- $source := .Values.model.source -}}
{{- if .Values.model.servedName -}}
{{ .Values.model.servedName }}
{{- else if eq $source "demo" -}}
SmolLM2-135M-Instruct
{{- else if hasPrefix "/" $source -}}
{{ base $source | trimSuffix ".gguf" }}
{{- else -}}
{{ splitList "@" $source | first }}
{{- end -}}
{{- end -}}

{{/* "true" where some of a policy's peers may be outside the release's namespace. */}}
{{- define "diptych.letsOthersIn" -}}
{{- range . -}}
{{- if or (hasKey . "namespaceSelector") (hasKey . "ipBlock") -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* The secret with a role's certificate. Of (dict "root" $ "role" …). */}}
{{- define "diptych.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "diptych.fullname" .root) .role) (index .root.Values.tls.secrets .role) -}}
{{- end -}}

{{/* What gateways and meshes are to take a gRPC port for. Gateway API knows no "grpc", and a mesh would read it in the clear. Of whether it speaks TLS. */}}
{{- define "diptych.grpcProtocol" -}}
{{ . | ternary "https" "kubernetes.io/h2c" }}
{{- end -}}
