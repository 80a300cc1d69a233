{{/* The names of one group's pods, as a regular expression. Of (dict "name" … "component" …). */}}
{{- define "diptych.podPattern" -}}
{{ .name }}-{{ eq .component "router" | ternary "[a-z0-9]+-[a-z0-9]+" "[0-9]+" }}
{{- end -}}

{{/* Those of all pods that serve: of this release alone, whatever else runs in its namespace. */}}
{{- define "diptych.podPatterns" -}}
{{- $patterns := list (include "diptych.podPattern" (dict "name" (include "diptych.routerName" .) "component" "router")) -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $pool := keys (index $.Values $role "pools") | sortAlpha -}}
{{- $name := include "diptych.poolName" (dict "root" $ "role" $role "pool" $pool) -}}
{{- $patterns = append $patterns (include "diptych.podPattern" (dict "name" $name "component" $role)) -}}
{{- end -}}
{{- end -}}
{{- join "|" $patterns -}}
{{- end -}}

{{/*
What KEDA asks Prometheus for one group of pods. Of (dict "root" $ "name" … "component" … "values" …). A count is compared
per pod, a share as it is.
*/}}
{{- define "diptych.triggers" -}}
{{- if not .root.Values.metrics.enabled }}
{{- fail (printf "%s: keda scales by metrics that no pod tells: turn metrics.enabled on" .name) -}}
{{- end -}}
{{- $pods := printf `namespace="%s", pod=~"%s"` .root.Release.Namespace (include "diptych.podPattern" .) -}}
{{- $address := required "keda.serverAddress: KEDA has to be told where Prometheus is" .root.Values.keda.serverAddress -}}
{{- $asked := list -}}
{{- if eq .component "router" -}}
{{- $query := printf "sum(diptych_router_requests_waiting{%s}) + sum(diptych_router_requests_placed{%s})" $pods $pods -}}
{{- $asked = append $asked (dict "query" $query "type" "AverageValue" "threshold" .values.keda.openRequests) -}}
{{- else -}}
{{- $waiting := printf "sum(diptych_sequences_waiting{%s})" $pods -}}
{{- $asked = append $asked (dict "query" $waiting "type" "AverageValue" "threshold" .values.keda.waitingSequences) -}}
{{- $held := printf `sum(diptych_kv_blocks{%s, owner!~"free|cached"}) / sum(diptych_kv_blocks{%s})` $pods $pods -}}
{{- $asked = append $asked (dict "query" $held "type" "Value" "threshold" .values.keda.kvUsage) -}}
{{- end -}}
{{- range $asked }}
- type: prometheus
  metricType: {{ .type }}
  metadata:
    serverAddress: {{ $address }}
    query: {{ .query | quote }}
    threshold: {{ .threshold | quote }}
    # Else KEDA takes what Prometheus does not know for 0, and all but the fewest pods go.
    ignoreNullValues: "false"
{{- end }}
{{- with .values.keda.triggers }}
{{ toYaml . }}
{{- end }}
{{- end -}}
