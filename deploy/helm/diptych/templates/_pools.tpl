{{/* One pool's values as JSON: what all of its role have, and what it says otherwise. Of (dict "root" $ "role" … "pool" …). */}}
{{- define "diptych.poolValues" -}}
{{- $all := index .root.Values .role -}}
{{- $own := default (dict) (index $all.pools .pool) -}}
{{- mustMergeOverwrite (deepCopy (omit $all "pools")) (deepCopy $own) | toJson -}}
{{- end -}}

{{/* host:port of every worker of a role, as a JSON list: each pod of a StatefulSet has a name of its own. */}}
{{- define "diptych.addresses" -}}
{{- $addresses := list -}}
{{- range $pool := keys (index .root.Values .role "pools") | sortAlpha -}}
{{- $at := dict "root" $.root "role" $.role "pool" $pool -}}
{{- $values := include "diptych.poolValues" $at | fromJson -}}
{{- $service := include "diptych.poolName" $at -}}
{{- $count := $values.autoscaling.enabled | ternary $values.autoscaling.maxReplicas $values.replicas -}}
{{- range $index := until (int $count) -}}
{{- $host := printf "%s-%d.%s.%s.svc.%s" $service $index $service $.root.Release.Namespace $.root.Values.clusterDomain -}}
{{- $addresses = append $addresses (printf "%s:50061" $host) -}}
{{- end -}}
{{- end -}}
{{- $addresses | toJson -}}
{{- end -}}

{{/* "true" if workers may move KV other than over their gRPC port: by a transport that has ports of its own. */}}
{{- define "diptych.hasOtherTransports" -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $pool := keys (index $.Values $role "pools") -}}
{{- $values := include "diptych.poolValues" (dict "root" $ "role" $role "pool" $pool) | fromJson -}}
{{- $transfer := default (dict) $values.settings.transfer -}}
{{- if ne (default (list "nixl" "inline") $transfer.transports | toJson) `["inline"]` -}}true{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The router's file of settings, as JSON, which is YAML that keeps whole numbers whole. */}}
{{- define "diptych.routerSettings" -}}
{{- $prefill := include "diptych.addresses" (dict "root" . "role" "prefill") | fromJsonArray -}}
{{- $decode := include "diptych.addresses" (dict "root" . "role" "decode") | fromJsonArray -}}
{{- if not $decode -}}
{{- fail "decode.pools: at least one decode worker is needed" -}}
{{- end -}}
{{- $own := dict "prefill" $prefill "decode" $decode -}}
{{- mergeOverwrite (deepCopy .Values.router.settings) $own | toPrettyJson -}}
{{- end -}}
