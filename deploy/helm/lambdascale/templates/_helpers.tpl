{{- define "ls.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "ls.selector" -}}
app.kubernetes.io/name: lambdascale
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "ls.labels" -}}
{{ include "ls.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "ls.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "ls.container" -}}
{{ include "ls.image" .root }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "ls.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Pods of a role on machines of their own, as far as there are any. */ -}}
{{- define "ls.apart" -}}
affinity:
  podAntiAffinity:
    {{- if .must }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector: {matchLabels: {{ include "ls.selector" . | fromYaml | toJson }}}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector: {matchLabels: {{ include "ls.selector" . | fromYaml | toJson }}}
    {{- end }}
{{- end }}

{{- define "ls.natsUrls" -}}
{{- $name := include "ls.name" . -}}
{{- $urls := list -}}
{{- range $i := until (int .Values.nats.replicas) -}}
{{- $urls = append $urls (printf "nats://%s-nats-%d.%s-nats:4222" $name $i $name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{- define "ls.env" -}}
- {name: LAMBDASCALE_BUS_URL, value: {{ include "ls.natsUrls" .root | quote }}}
- {name: LAMBDASCALE_BUS_REPLICAS, value: {{ min 3 .root.Values.nats.replicas | quote }}}
- {name: LAMBDASCALE_TELEMETRY_LOG_JSON, value: "true"}
- {name: LAMBDASCALE_TELEMETRY_METRICS_HOST, value: 0.0.0.0}
{{- if ne .role "gateway" }}
- {name: LAMBDASCALE_{{ upper .role }}_METRICS_PORT, value: "9100"}
{{- end }}
{{- if .root.Values.credentials.enabled }}
- {name: LAMBDASCALE_BUS_CREDENTIALS, value: /credentials}
- {name: LAMBDASCALE_BUS_TLS_AUTHORITY, value: /credentials/servers.pem}
{{- if has .role (list "planner" "registry") }}
- {name: LAMBDASCALE_{{ upper .role }}_SIGNING_KEY_FILE, value: /credentials/signing.key}
{{- end }}
{{- end }}
{{- end }}

{{- define "ls.settings" -}}
- {name: settings, mountPath: /etc/lambdascale, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.credentials.enabled }}
- {name: credentials, mountPath: /credentials, readOnly: true}
{{- end }}
{{- end }}

{{- define "ls.volumes" -}}
- {name: settings, configMap: {name: {{ include "ls.name" .root }}-settings}}
- {name: tmp, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
{{- if .root.Values.credentials.enabled }}
- {name: credentials, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{- end }}
{{- end }}

{{- /* Kubernetes lets a Secret's files be read by a group; services want keys that only their owner can read. */ -}}
{{- define "ls.copyCredentials" -}}
{{- if .root.Values.credentials.enabled }}
initContainers:
  - name: credentials
    {{- include "ls.container" . | nindent 4 }}
    command: [sh, -c, "umask 077 && cp -L /secret/{{ .from | default "" }}* /credentials/"]
    {{- if .from }}
    env:
      - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    {{- end }}
    resources: {limits: {memory: 64Mi}}
    volumeMounts:
      - {name: secret, mountPath: /secret, readOnly: true}
      - {name: credentials, mountPath: /credentials}
{{- end }}
{{- end }}

{{- define "ls.probes" -}}
startupProbe: {httpGet: {path: /live, port: {{ . }}}, periodSeconds: 2, failureThreshold: 60}
livenessProbe: {httpGet: {path: /live, port: {{ . }}}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
readinessProbe: {httpGet: {path: /ready, port: {{ . }}}, periodSeconds: 5, timeoutSeconds: 5}
{{- end }}
