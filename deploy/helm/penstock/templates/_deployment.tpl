{{/* A stage's Deployment and its PodDisruptionBudget: a dict of root, stage, model (or nothing), image. */}}
{{- define "penstock.deployment" -}}
{{- $names := ternary (list .root .stage .model) (list .root .stage) (not (empty .model)) -}}
{{- $section := include "penstock.section" $names | fromYaml -}}
{{- $values := .root.Values -}}
{{- $hasFiles := has .stage (list "gateway" "jobs") -}}
{{- $hasModels := and $values.modelsVolume.enabled (has .stage (list "tokenizer" "compute" "encoder")) -}}
{{- $gpus := int (get $section "gpus" | default 0) -}}
{{- $probe := dict "exec" (dict "command" (list "python" "-m" "services.operator.healthcheck" .stage)) "timeoutSeconds" 10 -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "penstock.name" $names }}
  labels: {{- include "penstock.labels" $names | nindent 4 }}
spec:
  {{- if not (and $values.keda.enabled (hasKey $section "scaling")) }}
  replicas: {{ $section.replicas }}
  {{- end }}
  selector:
    matchLabels: {{- include "penstock.selector" $names | nindent 6 }}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  template:
    metadata:
      labels: {{- include "penstock.labels" $names | nindent 8 }}
      annotations:
        penstock/settings: {{ include (print .root.Template.BasePath "/settings.yaml") .root | sha256sum | trunc 16 | quote }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: 20  # at SIGTERM it hands on what it has, or ends its streams so that they can be resumed
      securityContext: {runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
      {{- with $values.imagePullSecrets }}
      imagePullSecrets: {{ range . }}{{ nindent 8 (printf "- name: %s" .) }}{{ end }}
      {{- end }}
      {{- with $section.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $section.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $section.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $section.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "penstock.selector" $names | nindent 14 }}
      containers:
        - name: {{ .stage }}
          image: {{ .image }}
          command: [python, -m, services.{{ .stage }}]
          {{- if eq .stage "gateway" }}
          ports: [{name: http, containerPort: 8000}]
          {{- end }}
          envFrom:
            - configMapRef: {name: {{ include "penstock.name" (list .root "settings") }}}
          env:
            - name: PENSTOCK_REDIS_URL
              valueFrom: {secretKeyRef: {name: {{ include "penstock.redisSecret" .root }}, key: {{ .stage }}}}
            {{- if .model }}
            - {name: PENSTOCK_MODEL, value: {{ .model.source | quote }}}
            - {name: PENSTOCK_SERVED_MODEL_NAME, value: {{ prepend (.model.aliases | default list) .model.name | join "," | quote }}}
            {{- end }}
            {{- if eq .stage "gateway" }}
            - {name: PENSTOCK_HOST, value: 0.0.0.0}
            {{- if $section.keysSecret }}
            - {name: PENSTOCK_AUTH, value: "true"}
            - {name: PENSTOCK_KEYS_FILE, value: /keys/keys.json}
            {{- end }}
            {{- if $section.tlsSecret }}
            - {name: PENSTOCK_TLS_CERTIFICATE, value: /tls/tls.crt}
            - {name: PENSTOCK_TLS_KEY, value: /tls/tls.key}
            {{- end }}
            {{- end }}
            {{- if $gpus }}
            - {name: PENSTOCK_DEVICE, value: cuda}
            - {name: PENSTOCK_MAX_NUM_SEQS, value: "256"}
            - {name: PENSTOCK_MAX_BATCHED_TOKENS, value: "2048"}
            - {name: TRITON_CACHE_DIR, value: /triton}
            {{- end }}
            {{- range $name, $value := $section.settings }}
            - {name: {{ $name }}, value: {{ $value | quote }}}
            {{- end }}
          securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
          resources:
            requests: {{- toYaml $section.resources.requests | nindent 14 }}
            limits: {{- toYaml (merge (ternary (dict "nvidia.com/gpu" $gpus) (dict) (gt $gpus 0)) $section.resources.limits) | nindent 14 }}
          startupProbe: {{- merge (dict "periodSeconds" 5 "failureThreshold" (div (add $section.startupS 4) 5)) $probe | toYaml | nindent 12 }}
          readinessProbe: {{- merge (dict "periodSeconds" 10 "failureThreshold" 2) $probe | toYaml | nindent 12 }}
          # long: while Redis is away nobody is in the registry, and a restart would not bring it back
          livenessProbe: {{- merge (dict "periodSeconds" 20 "failureThreshold" 30) $probe | toYaml | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: models, mountPath: /models, readOnly: true}
            {{- if $hasFiles }}
            - {name: files, mountPath: /files}
            {{- end }}
            {{- if $gpus }}
            - {name: triton, mountPath: /triton}
            {{- end }}
            {{- if $values.redis.tlsSecret }}
            - {name: redis-tls, mountPath: /redis-tls, readOnly: true}
            {{- end }}
            {{- if and (eq .stage "gateway") $section.keysSecret }}
            - {name: keys, mountPath: /keys, readOnly: true}
            {{- end }}
            {{- if and (eq .stage "gateway") $section.tlsSecret }}
            - {name: tls, mountPath: /tls, readOnly: true}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {}}
        {{- if $hasModels }}
        {{- $claim := $values.modelsVolume.existingClaim | default (include "penstock.name" (list .root "models")) }}
        - {name: models, persistentVolumeClaim: {claimName: {{ $claim }}, readOnly: true}}
        {{- else }}
        - {name: models, emptyDir: {}}
        {{- end }}
        {{- if and $hasFiles $values.jobs.enabled (hasPrefix "/" $values.files.url) }}
        - {name: files, persistentVolumeClaim: {claimName: {{ $values.files.existingClaim | default (include "penstock.name" (list .root "files")) }}}}
        {{- else if $hasFiles }}
        - {name: files, emptyDir: {}}
        {{- end }}
        {{- if $gpus }}
        - {name: triton, emptyDir: {}}
        {{- end }}
        {{- with $values.redis.tlsSecret }}
        - {name: redis-tls, secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}}
        {{- end }}
        {{- if and (eq .stage "gateway") $section.keysSecret }}
        - {name: keys, secret: {secretName: {{ $section.keysSecret }}}}
        {{- end }}
        {{- if and (eq .stage "gateway") $section.tlsSecret }}
        - {name: tls, secret: {secretName: {{ $section.tlsSecret }}}}
        {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "penstock.name" $names }}
  labels: {{- include "penstock.labels" $names | nindent 4 }}
spec:
  maxUnavailable: {{ $section.maxUnavailable }}
  selector:
    matchLabels: {{- include "penstock.selector" $names | nindent 6 }}
{{- end }}
