{{/* The names of one group's pods, as a regular expression. Of (dict "name" … "component" …). */}}
{{- define "diptych.podPattern" -}}
{{ .name }}-{{ eq .component "router" | ternary "[a-z0-9]+-[a-z0-9]+" "[0-9]+" }}
{{- end -}}

{{/* Those of all pods that serve: of this release alone, whatever else runs in its namespace. */}}
{{- define "diptych.podPatterns" -}}
{{- $patterns := list (include "diptych.podPattern" (dict "name" (include "diptych.routerName" .) "component" "router")) -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $pool := include "diptych.pools" (dict "root" $ "role" $role) | fromJsonArray -}}
{{- $name := include "diptych.poolName" (dict "root" $ "role" $role "pool" $pool) -}}
{{- $patterns = append $patterns (include "diptych.podPattern" (dict "name" $name "component" $role)) -}}
{{- end -}}
{{- end -}}
{{- join "|" $patterns -}}
{{- end -}}

{{/* "true" of a pool whose workers compute prompts that others, or all, may wait for. */}}
{{- define "diptych.computesPrompts" -}}
{{- $isSoft := include "diptych.isSoft" (dict "role" .component "values" .values) -}}
{{- $others := or (include "diptych.hasWorkers" (dict "root" .root "role" "prefill")) (include "diptych.hasSoft" .root) -}}
{{- if or (eq .component "prefill") $isSoft (not $others) -}}true{{- end -}}
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
{{- $settings := default (dict) .values.settings -}}
{{- $places := hasKey $settings "max_num_seqs" | ternary $settings.max_num_seqs 64.0 -}}
{{- $running := printf "sum(diptych_sequences_running{%s})" $pods -}}
{{- $asked = append $asked (dict "query" $running "type" "AverageValue" "threshold" (mulf .values.keda.placeUsage $places)) -}}
{{- if include "diptych.computesPrompts" . -}}
{{- $router := dict "name" (include "diptych.routerName" .root) "component" "router" -}}
{{- $requests := printf `sum(diptych_router_requests_waiting{namespace="%s", pod=~"%s"})` .root.Release.Namespace (include "diptych.podPattern" $router) -}}
{{- /* Workers that are idle half of the time are not what requests wait for. */ -}}
{{- $isBusy := printf "(sum(rate(diptych_engine_step_seconds_sum{%s}[2m])) > bool 0.5 * count(diptych_sequences_running{%s}))" $pods $pods -}}
{{- $asked = append $asked (dict "query" (printf "%s * %s" $requests $isBusy) "type" "AverageValue" "threshold" .values.keda.waitingRequests) -}}
{{- end -}}
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
