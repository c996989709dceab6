{{/* The name of an object: (list $ STAGE) or (list $ STAGE MODEL). */}}
{{- define "penstock.name" -}}
{{- $parts := list (index . 0).Release.Name (index . 1) -}}
{{- if gt (len .) 2 }}{{ $parts = append $parts (regexReplaceAll "[^a-z0-9]+" ((index . 2).name | lower) "-" | trunc 30 | trimAll "-") }}{{ end -}}
{{- join "-" $parts | trunc 58 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select the pods of a Deployment, with the same arguments. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- if gt (len .) 2 }}
app.kubernetes.io/component: {{ regexReplaceAll "[^A-Za-z0-9._-]+" (index . 2).name "-" | trunc 63 | trimAll "-._" }}
{{- end }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{/* A section of the values, with what a model says otherwise: (list $ STAGE MODEL). As YAML. */}}
{{- define "penstock.section" -}}
{{- $own := dict -}}
{{- if gt (len .) 2 }}{{ $own = get (index . 2) (index . 1) | default dict }}{{ end -}}
{{- mustMergeOverwrite (deepCopy (get (index . 0).Values (index . 1))) (deepCopy $own) | toYaml -}}
{{- end }}

{{- define "penstock.image" -}}
{{ .repository }}:{{ .tag }}
{{- end }}

{{/* Whether the chart runs Redis itself; empty: no. */}}
{{- define "penstock.ownRedis" -}}
{{- if not (or .Values.redis.url .Values.redis.existingSecret) }}true{{ end -}}
{{- end }}

{{- define "penstock.redisSecret" -}}
{{ .Values.redis.existingSecret | default (include "penstock.name" (list . "redis")) }}
{{- end }}
