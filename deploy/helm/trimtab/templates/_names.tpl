{{/* The release as a DNS label: dots and a leading digit, which Helm allows and Services do not, are replaced, and a hash keeps two apart. */}}
{{- define "trimtab.fullname" -}}
{{- $said := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-%s" .Release.Name (.Values.nameOverride | default .Chart.Name)) (contains (.Values.nameOverride | default .Chart.Name) .Release.Name)) -}}
{{- $label := $said | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $label }}{{ $label = printf "t-%s" $label }}{{ end -}}
{{- if ne $label $said }}{{ $label = printf "%s-%s" $label (sha256sum $said | trunc 6) }}{{ end -}}
{{- $label -}}
{{- end }}

{{/* A part's name: {root, part}. 52 characters at most, which is what a StatefulSet leaves room for; the front is cut, the part is not. */}}
{{- define "trimtab.named" -}}
{{- $full := include "trimtab.fullname" .root -}}
{{- $room := sub 51 (len .part) | int -}}
{{- if gt (len $full) $room -}}
{{- $full = printf "%s-%s" (trunc (sub $room 7 | int) $full | trimSuffix "-") (sha256sum $full | trunc 6) -}}
{{- end -}}
{{- printf "%s-%s" $full .part -}}
{{- end }}

{{/* {root, component, pool}: what selects a part's pods. It never changes over the life of a release. */}}
{{- define "trimtab.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . | quote }}
{{- end }}
{{- with .pool }}
trimtab/pool: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "trimtab.labels" -}}
{{ include "trimtab.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* {root, image}: the image of a part, or the chart's; by digest where there is one, else by tag, else by the chart's version. */}}
{{- define "trimtab.image" -}}
{{- $own := .image | default dict -}}
{{- $shared := .root.Values.image -}}
{{- $version := ternary $own $shared (or (not (empty $own.tag)) (not (empty $own.digest)) (not (empty $own.repository))) -}}
{{- $repository := $own.repository | default $shared.repository -}}
{{- if $version.digest -}}
{{- printf "%s@%s" $repository $version.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository ($version.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end }}

{{/* host:port of the control plane, for nodes and for commands. */}}
{{- define "trimtab.control" -}}
{{- printf "%s:7071" (include "trimtab.named" (dict "root" . "part" "control")) -}}
{{- end }}

{{/* The Secret with the certificate of {root, kind}: cert-manager's, or the one that is named. */}}
{{- define "trimtab.tlsSecret" -}}
{{- if .root.Values.tls.certManager.enabled -}}
{{- include "trimtab.named" (dict "root" .root "part" (printf "tls-%s" .kind)) -}}
{{- else -}}
{{- get .root.Values.tls.secrets .kind | required (printf "tls.secrets.%s: with tls.enabled and without tls.certManager.enabled, name a Secret that holds ca.crt, tls.crt and tls.key" .kind) -}}
{{- end -}}
{{- end }}

{{/* The Secret with a gateway's key file, or "" where certificates alone say who calls. */}}
{{- define "trimtab.keysSecret" -}}
{{- $keys := .Values.gateway.keys -}}
{{- if $keys.existingSecret -}}
{{- $keys.existingSecret -}}
{{- else if $keys.generate -}}
{{- include "trimtab.named" (dict "root" . "part" "keys") -}}
{{- else if not (and .Values.tls.enabled .Values.gateway.settings.client_certs) -}}
{{- fail "gateway.keys: name a Secret (existingSecret), or let one be made (generate), or use tls.enabled with gateway.settings.client_certs" -}}
{{- end -}}
{{- end }}

{{/* The settings of a pool: workerDefaults with the pool's own over them, as YAML. {root, pool} */}}
{{- define "trimtab.pool" -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy (.pool | default dict)) -}}
{{- toYaml $pool -}}
{{- end }}

{{/* {root, api, kind, name}: the replicas that it has now, where it is there. An autoscaler owns the number, and a chart that says none would
have it set to 1 by the upgrade that switches the autoscaler on. */}}
{{- define "trimtab.replicas" -}}
{{- with lookup .api .kind .root.Release.Namespace .name }}{{ with .spec.replicas }}
  replicas: {{ . }}
{{- end }}{{ end }}
{{- end }}
