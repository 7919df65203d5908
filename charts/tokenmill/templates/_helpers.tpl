{{/* Names and labels. Each kind of worker is a component of its own. */}}
{{- define "tokenmill.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tokenmill.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tokenmill.labels" -}}
{{ include "tokenmill.selector" . }}
app.kubernetes.io/version: {{ .Values.image.tag | default .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Argument: list of the root and `api` or `worker`. */}}
{{- define "tokenmill.image" -}}
{{- $root := index . 0 -}}
{{- $root.Values.image.prefix }}tokenmill-{{ index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{- define "tokenmill.redisSecret" -}}
{{- .Values.redis.existingSecret | default (printf "%s-redis" (include "tokenmill.fullname" .)) -}}
{{- end -}}

{{/* Fails with a sentence where no Redis can be reached. */}}
{{- define "tokenmill.checkRedis" -}}
{{- if .Values.redis.enabled -}}
{{- if not (or .Values.redis.password .Values.redis.existingSecret) -}}
{{- fail "set redis.password (at least 16 letters, digits, - or _) or redis.existingSecret" -}}
{{- end -}}
{{- else if not .Values.redis.external.urlSecret -}}
{{- fail "redis.enabled is false: set redis.external.urlSecret to a Secret with the key url" -}}
{{- end -}}
{{- end -}}

{{/* REDIS_URL and the model: the environment of the API and of each worker. */}}
{{- define "tokenmill.environment" -}}
{{- include "tokenmill.checkRedis" . -}}
{{- if .Values.redis.enabled -}}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "tokenmill.redisSecret" . }}, key: password}}
- name: REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "tokenmill.fullname" . }}-redis:6379/0
{{- else -}}
- name: REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.external.urlSecret }}, key: url}}
{{- end }}
{{- with .Values.model.name }}
- {name: TOKENMILL_MODEL, value: {{ . | quote }}}
{{- end }}
{{- with .Values.model.servedName }}
- {name: TOKENMILL_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "tokenmill.podSecurity" -}}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tokenmill.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Rolls the pods when a shared setting changes. */}}
{{- define "tokenmill.settingsChecksum" -}}
{{- toYaml .Values.settings | sha256sum -}}
{{- end -}}

{{/* The values of one kind of worker over the defaults. Arguments: root, kind. */}}
{{- define "tokenmill.kind" -}}
{{- $root := index . 0 -}}
{{- $kind := index . 1 -}}
{{- mergeOverwrite (deepCopy $root.Values.workerDefaults) (deepCopy (get $root.Values.workers $kind | default dict)) | toYaml -}}
{{- end -}}

{{/* The value of a setting as a string. Helm keeps numbers as floats, which it would write as 1e+07. */}}
{{- define "tokenmill.value" -}}
{{- kindIs "string" . | ternary . (toJson .) | quote -}}
{{- end -}}
