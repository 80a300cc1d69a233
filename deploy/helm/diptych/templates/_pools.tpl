{{/* The names of a role's pools as a JSON list, in order; null takes one away, whoever named it. Of (dict "root" $ "role" …). */}}
{{- define "diptych.pools" -}}
{{- $names := list -}}
{{- range $name, $own := index .root.Values .role "pools" -}}
{{- if kindIs "map" $own }}{{ $names = append $names $name }}{{ end -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* One pool's values as JSON: what all of its role have, and what it says otherwise. Of (dict "root" $ "role" … "pool" …). */}}
{{- define "diptych.poolValues" -}}
{{- $all := index .root.Values .role -}}
{{- $own := default (dict) (index $all.pools .pool) -}}
{{- mustMergeOverwrite (dict "settings" (dict)) (deepCopy (omit $all "pools")) (deepCopy $own) | toJson -}}
{{- end -}}

{{/* Where workers of a role are found, as a JSON list: for each pool its service's name, or what DNS has for its port. */}}
{{- define "diptych.names" -}}
{{- $names := list -}}
{{- range $pool := include "diptych.pools" . | fromJsonArray -}}
{{- $service := include "diptych.poolName" (dict "root" $.root "role" $.role "pool" $pool) -}}
{{- $inDns := printf "_grpc._tcp.%s.%s.svc.%s" $service $.root.Release.Namespace $.root.Values.clusterDomain -}}
{{- $names = append $names (eq $.root.Values.router.discovery "dns" | ternary $inDns $service) -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* Where all processes' metrics are: their headless services, whose names have the address of each pod. */}}
{{- define "diptych.metricsAddresses" -}}
{{- $names := list (printf "%s-headless" (include "diptych.routerName" .)) -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $pool := include "diptych.pools" (dict "root" $ "role" $role) | fromJsonArray -}}
{{- $names = append $names (include "diptych.poolName" (dict "root" $ "role" $role "pool" $pool)) -}}
{{- end -}}
{{- end -}}
{{- join ":9100," $names }}:9100
{{- end -}}

{{/* "true" if the test's request is traced wherever anything is: the router grants what it asks for, or traces all. */}}
{{- define "diptych.looksForTrace" -}}
{{- $settings := default (dict) .Values.router.settings -}}
{{- $asked := hasKey $settings "trace_caller_per_s" | ternary $settings.trace_caller_per_s 10.0 -}}
{{- $share := hasKey $settings "trace_sample_ratio" | ternary $settings.trace_sample_ratio 1.0 -}}
{{- if and .Values.metrics.enabled (or (gt (float64 $asked) 0.0) (ge (float64 $share) 1.0)) -}}true{{- end -}}
{{- end -}}

{{/* "true" if there is any worker of a role. */}}
{{- define "diptych.hasWorkers" -}}
{{- range $pool := include "diptych.pools" . | fromJsonArray -}}
{{- $values := include "diptych.poolValues" (dict "root" $.root "role" $.role "pool" $pool) | fromJson -}}
{{- if or $values.autoscaling.enabled $values.keda.enabled (gt (int $values.replicas) 0) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" if some pool of decode has workers that may compute prompts for others. */}}
{{- define "diptych.hasSoft" -}}
{{- range $pool := include "diptych.pools" (dict "root" . "role" "decode") | fromJsonArray -}}
{{- $values := include "diptych.poolValues" (dict "root" $ "role" "decode" "pool" $pool) | fromJson -}}
{{- include "diptych.isSoft" (dict "role" "decode" "values" $values) -}}
{{- end -}}
{{- end -}}

{{/* "true" of a pool's values whose workers may move KV other than over their gRPC port: by a transport that has ports of its own, which settings or a variable may name. */}}
{{- define "diptych.hasOwnPorts" -}}
{{- $transfer := default (dict) .settings.transfer -}}
{{- if ne (default (list "nixl" "inline") $transfer.transports | toJson) `["inline"]` -}}true{{- end -}}
{{- range .extraEnv -}}
{{- $mayName := or .valueFrom (regexMatch "nixl|ucxx|staged" (toString .value)) -}}
{{- if and $mayName (regexMatch "_TRANSFER(__TRANSPORTS)?$" (upper .name)) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" if any pool's workers may. */}}
{{- define "diptych.hasOtherTransports" -}}
{{- range $role := list "prefill" "decode" -}}
{{- range $pool := include "diptych.pools" (dict "root" $ "role" $role) | fromJsonArray -}}
{{- $values := include "diptych.poolValues" (dict "root" $ "role" $role "pool" $pool) | fromJson -}}
{{- include "diptych.hasOwnPorts" $values -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
"true" if no prefill pool makes a pair with a decode pool, as values have it: each two say of some setting that must be equal
that it is another. What is not said, or auto, may fit.
*/}}
{{- define "diptych.hasNoPair" -}}
{{- $fits := false -}}
{{- range $prefill := include "diptych.pools" (dict "root" . "role" "prefill") | fromJsonArray -}}
{{- range $decode := include "diptych.pools" (dict "root" $ "role" "decode") | fromJsonArray -}}
{{- $differs := false -}}
{{- range $setting := list "block_size" "dtype" "kv_cache_dtype" -}}
{{- $said := list -}}
{{- range $role, $pool := dict "prefill" $prefill "decode" $decode -}}
{{- $values := include "diptych.poolValues" (dict "root" $ "role" $role "pool" $pool) | fromJson -}}
{{- $value := index (default (dict) $values.settings) $setting | default "auto" | toString -}}
{{- if ne $value "auto" }}{{ $said = append $said $value }}{{ end -}}
{{- end -}}
{{- if gt (uniq $said | len) 1 }}{{ $differs = true }}{{ end -}}
{{- end -}}
{{- if not $differs }}{{ $fits = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not (or $fits (include "diptych.hasSoft" .)) -}}true{{- end -}}
{{- end -}}

{{/* The router's file of settings, as JSON, which is YAML that keeps whole numbers whole. */}}
{{- define "diptych.routerSettings" -}}
{{- if not (include "diptych.hasWorkers" (dict "root" . "role" "decode")) -}}
{{- fail "decode.pools: at least one decode worker is needed" -}}
{{- end -}}
{{- $prefill := include "diptych.names" (dict "root" . "role" "prefill") | fromJsonArray -}}
{{- $decode := include "diptych.names" (dict "root" . "role" "decode") | fromJsonArray -}}
{{- $source := .Values.router.discovery -}}
{{- $settings := default (dict) .Values.router.settings -}}
{{- if and (ne $source "dns") $settings.dns -}}
{{- fail (printf "router.settings.dns: belongs to router.discovery dns, but that is %s" $source) -}}
{{- end -}}
{{- $own := dict "discovery" $source $source (dict "prefill" $prefill "decode" $decode) -}}
{{- mergeOverwrite (deepCopy $settings) $own | toPrettyJson -}}
{{- end -}}

{{/*
What a worker's `affinity` is: its own, and the nearness that `colocation` asks for. Of (dict "root" $ "role" … "pool" …
"values" …). The first pod of all is near itself, so it may go anywhere.
*/}}
{{- define "diptych.affinity" -}}
{{- $affinity := deepCopy (default (dict) .values.affinity) -}}
{{- with .root.Values.colocation -}}
{{- if and .topologyKey (ne $.role "router") -}}
{{- $labels := include "diptych.selector" (dict "root" $.root "pool" (.byPool | ternary $.pool "")) | fromYaml -}}
{{- $component := dict "key" "app.kubernetes.io/component" "operator" "In" "values" (list "prefill" "decode") -}}
{{- $term := dict "topologyKey" .topologyKey "labelSelector" (dict "matchLabels" $labels "matchExpressions" (list $component)) -}}
{{- $near := default (dict) $affinity.podAffinity -}}
{{- $kind := .required | ternary "requiredDuringSchedulingIgnoredDuringExecution" "preferredDuringSchedulingIgnoredDuringExecution" -}}
{{- $own := .required | ternary $term (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $_ := set $near $kind (append (default (list) (index $near $kind)) $own) -}}
{{- $_ := set $affinity "podAffinity" $near -}}
{{- end -}}
{{- end -}}
{{- if $affinity }}{{ toYaml $affinity }}{{ end -}}
{{- end -}}
