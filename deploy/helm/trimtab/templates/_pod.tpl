{{/* A setting's value as the text that a process reads: lists with commas, objects as JSON, whole numbers without an exponent. */}}
{{- define "trimtab.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if kindIs "map" . -}}
{{- toJson . -}}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{/* {section, settings}: each as TRIMTAB_<SECTION>_<KEY>. */}}
{{- define "trimtab.settings" -}}
{{- $section := upper .section -}}
{{- range $key, $value := .settings }}
{{- if not (kindIs "invalid" $value) }}
- name: TRIMTAB_{{ $section }}_{{ upper $key }}
  value: {{ include "trimtab.text" $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* What every process has: its pod's name and address, a home that it can write to, and a user's name, for which some libraries ask. */}}
{{- define "trimtab.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /var/lib/trimtab
- name: USER
  value: trimtab
- name: TRIMTAB_STATE_DIR
  value: /var/lib/trimtab
{{- end }}

{{/* {root, section}: TLS, or that plain text is meant. Files, not copies of them: a certificate that is renewed is read anew. */}}
{{- define "trimtab.tlsEnv" -}}
{{- if .root.Values.tls.enabled }}
- name: TRIMTAB_{{ upper .section }}_TLS_CA
  value: /etc/trimtab/tls/ca.crt
- name: TRIMTAB_{{ upper .section }}_TLS_CERT
  value: /etc/trimtab/tls/tls.crt
- name: TRIMTAB_{{ upper .section }}_TLS_KEY
  value: /etc/trimtab/tls/tls.key
{{- else }}
- name: TRIMTAB_{{ upper .section }}_INSECURE
  value: "true"
{{- end }}
{{- end }}

{{/* The pod's own certificate, for `trimtab` verbs that are run in it. */}}
{{- define "trimtab.verbTls" -}}
{{- if .Values.tls.enabled }}
- name: TRIMTAB_TLS_CA
  value: /etc/trimtab/tls/ca.crt
- name: TRIMTAB_TLS_CERT
  value: /etc/trimtab/tls/tls.crt
- name: TRIMTAB_TLS_KEY
  value: /etc/trimtab/tls/tls.key
- name: TRIMTAB_TLS_MESH
  value: {{ .Values.mesh }}
{{- end }}
{{- end }}

{{/* For the pods that run `trimtab` verbs: who they are, and whom they ask. */}}
{{- define "trimtab.verbEnv" -}}
{{ include "trimtab.env" . }}
- name: TRIMTAB_CONTROL
  value: {{ include "trimtab.control" . }}
- name: TRIMTAB_GATEWAY
  value: {{ include "trimtab.named" (dict "root" . "part" "gateway") }}:7070
{{- include "trimtab.verbTls" . }}
{{- with .Values.verbs.token.existingSecret }}
- name: TRIMTAB_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.verbs.token.key | quote }}}}
{{- end }}
{{- end }}

{{- define "trimtab.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/trimtab}
{{- end }}

{{- define "trimtab.scratchVolumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 2Gi}
- name: state
  emptyDir: {sizeLimit: 2Gi}
{{- end }}

{{- define "trimtab.mounts" -}}
{{ include "trimtab.scratchMounts" . }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/trimtab/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* {root, kind} */}}
{{- define "trimtab.volumes" -}}
{{ include "trimtab.scratchVolumes" . }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "trimtab.tlsSecret" . | quote }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* {root, part}: what stands in every pod. Service links are off: Kubernetes would set TRIMTAB_CONTROL_PORT and the like for a Service of that
name, and a process refuses settings that it does not know. */}}
{{- define "trimtab.podBase" -}}
serviceAccountName: {{ include "trimtab.named" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.podSecurity.runAsUser }}
  runAsUser: {{ include "trimtab.text" . }}
  {{- end }}
  {{- with .root.Values.podSecurity.runAsGroup }}
  runAsGroup: {{ include "trimtab.text" . }}
  {{- end }}
  {{- with .root.Values.podSecurity.fsGroup }}
  fsGroup: {{ include "trimtab.text" . }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "trimtab.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* {placement, selector}: where pods may run. Spread over hosts and zones, as far as there are any, unless the values say otherwise. */}}
{{- define "trimtab.placement" -}}
{{- with .placement.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .placement.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .placement.topologySpread }}
topologySpreadConstraints:
  {{- range .placement.topologySpread }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- $.selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* {root, kind, port}: gRPC health. The kubelet's own gRPC probe can't speak TLS; with TLS the process's own settings are used to ask it. */}}
{{- define "trimtab.health" -}}
{{- if .root.Values.tls.enabled -}}
exec: {command: [python, -m, trimtab_cli.healthy, {{ .kind }}]}
{{- else -}}
grpc: {port: {{ .port }}}
{{- end -}}
{{- end }}
