{{/* {root, name, pool}: the settings that a pool's workers get: what its values say, and by default as many tensor-parallel parts as GPUs, and as many
stages as nodes. */}}
{{- define "trimtab.workerSettings" -}}
{{- $said := deepCopy .pool.settings -}}
{{- if and (gt (int .pool.gpu.count) 1) (not (hasKey $said "tensor_parallel_size")) -}}
{{- $_ := set $said "tensor_parallel_size" (int .pool.gpu.count) -}}
{{- end -}}
{{- if gt (int .pool.multiNode.size) 1 -}}
{{- $_ := set $said "distributed_executor" "ray" -}}
{{- if not (hasKey $said "pipeline_parallel_size") -}}
{{- $_ := set $said "pipeline_parallel_size" (int .pool.multiNode.size) -}}
{{- end -}}
{{- end -}}
{{- toYaml $said -}}
{{- end }}

{{/* A pool's resources: with its GPUs, and with numa.exclusive as a Guaranteed pod of whole cores, which is what the kubelet's static CPU policy and
topology manager place on one NUMA node, beside the GPU. */}}
{{- define "trimtab.workerResources" -}}
{{- $resources := deepCopy .pool.resources -}}
{{- if gt (int .pool.gpu.count) 0 -}}
{{- $gpus := dict .pool.gpu.resource (int .pool.gpu.count) -}}
{{- $_ := set $resources "limits" (mergeOverwrite (deepCopy $resources.limits) $gpus) -}}
{{- $_ := set $resources "requests" (mergeOverwrite (deepCopy ($resources.requests | default dict)) $gpus) -}}
{{- end -}}
{{- if .pool.numa.exclusive -}}
{{- if not (regexMatch "^[1-9][0-9]*$" (toString (get $resources.limits "cpu"))) -}}
{{- fail (printf "pools.%s: numa.exclusive needs resources.limits.cpu to be a whole number of cores" .name) -}}
{{- end -}}
{{- $_ := set $resources "requests" (deepCopy $resources.limits) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* Where a worker finds and keeps models and compiled kernels. Everything that vLLM and its libraries write goes under the one writable place. */}}
{{- define "trimtab.cacheEnv" -}}
- {name: TRIMTAB_CACHE_DIR, value: /var/cache/trimtab}
- {name: HF_HOME, value: /var/cache/trimtab/huggingface}
- {name: VLLM_CACHE_ROOT, value: /var/cache/trimtab/vllm}
- {name: TRITON_CACHE_DIR, value: /var/cache/trimtab/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /var/cache/trimtab/inductor}
- {name: XDG_CACHE_HOME, value: /var/cache/trimtab/xdg}
{{- end }}

{{- define "trimtab.workerMounts" -}}
- {name: shm, mountPath: /dev/shm}
- {name: models, mountPath: /var/cache/trimtab}
{{- with .pool.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What a volume for models is claimed with: {pool}. */}}
{{- define "trimtab.modelClaim" -}}
accessModes: [ReadWriteOnce]
{{- with .pool.modelCache.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .pool.modelCache.size }}}}
{{- end }}

{{- define "trimtab.workerVolumes" -}}
# The engine's processes talk through it; the container's own 64 MiB are too few for tensor parallelism.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .pool.sharedMemory }}}
{{- if .pool.modelCache.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .pool.modelCache.existingClaim }}}
{{- else if and .pool.modelCache.persistent (gt (int .pool.multiNode.size) 1) }}
# The pods of a group are made anew together, by a set that claims nothing for them: a volume of the pod's own, which goes with it.
- name: models
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels: {{- include "trimtab.selector" .scope | nindent 10 }}
      spec: {{- include "trimtab.modelClaim" . | nindent 8 }}
{{- else if not .pool.modelCache.persistent }}
- name: models
  emptyDir: {sizeLimit: {{ .pool.modelCache.size }}}
{{- end }}
{{- with .pool.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* {root, name, pool, scope}: the pod that serves. */}}
{{- define "trimtab.workerPod" -}}
{{- include "trimtab.podBase" .scope }}
{{ include "trimtab.placement" (dict "placement" .pool "selector" (include "trimtab.selector" .scope)) }}
{{- with .pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
# The pause container is process 1 then, and not the worker: it reaps what the engine leaves behind, and a SIGTERM during the long start ends the worker,
# which the kernel would keep from a process 1 that has not yet asked for it.
shareProcessNamespace: true
# Longer than the drain and what follows it: streams end or move before the kubelet kills.
terminationGracePeriodSeconds: {{ add (ceil .pool.settings.drain_s | int) 30 }}
containers:
  - name: worker
    image: {{ include "trimtab.image" (dict "root" .root "image" .pool.image) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    {{- if gt (int .pool.multiNode.size) 1 }}
    # Ray's head, which the other pods of the group join; vLLM's Ray executor waits for their GPUs.
    command: [sh, -c, "ray start --head --port=6379 --disable-usage-stats && exec trimtab-worker"]
    {{- else }}
    command: [trimtab-worker]
    {{- end }}
    securityContext: {{- include "trimtab.containerSecurity" . | nindent 6 }}
    ports:
      - {name: grpc, containerPort: 7100}
      - {name: metrics, containerPort: 7200}
    env:
      {{- include "trimtab.env" .root | nindent 6 }}
      {{- include "trimtab.cacheEnv" . | nindent 6 }}
      - {name: TRIMTAB_WORKER_NODE_ID, value: $(POD_NAME)}
      - {name: TRIMTAB_WORKER_MESH, value: {{ .root.Values.mesh | quote }}}
      - {name: TRIMTAB_WORKER_POOL, value: {{ .name | quote }}}
      # Its own address and not 0.0.0.0: gateways dial what it says here.
      - {name: TRIMTAB_WORKER_LISTEN, value: "$(POD_IP):7100"}
      - {name: TRIMTAB_WORKER_METRICS, value: "$(POD_IP):7200"}
      - {name: TRIMTAB_WORKER_CONTROL, value: {{ include "trimtab.control" .root | quote }}}
      {{- include "trimtab.tlsEnv" (dict "root" .root "section" "worker") | nindent 6 }}
      {{- include "trimtab.settings" (dict "section" "worker" "settings" (include "trimtab.workerSettings" . | fromYaml)) | nindent 6 }}
      {{- with .pool.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    # A model is fetched, loaded and compiled before the first answer.
    startupProbe: {{- include "trimtab.health" (dict "root" .root "kind" "worker" "port" 7100) | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: {{ max 1 (div (int .pool.startupSeconds) 10) }}
    readinessProbe: {{- include "trimtab.health" (dict "root" .root "kind" "worker" "port" 7100) | nindent 6 }}
      periodSeconds: 15
      timeoutSeconds: 10
      failureThreshold: 2
    # Health is progress: a hung engine stops serving. The control plane has mended it, or had it restarted, long before this does.
    livenessProbe: {{- include "trimtab.health" (dict "root" .root "kind" "worker" "port" 7100) | nindent 6 }}
      periodSeconds: 30
      timeoutSeconds: 10
      failureThreshold: 6
    resources: {{- include "trimtab.workerResources" . | nindent 6 }}
    volumeMounts:
      {{- include "trimtab.mounts" .root | nindent 6 }}
      {{- include "trimtab.workerMounts" . | nindent 6 }}
volumes:
  {{- include "trimtab.volumes" .scope | nindent 2 }}
  {{- include "trimtab.workerVolumes" . | nindent 2 }}
{{- end }}

{{/* The other pods of a group: Ray nodes that bring their GPUs and nothing else. They serve nobody, so they have neither health of their own nor a
certificate; when one ends, the whole group is made anew. */}}
{{- define "trimtab.rayPod" -}}
{{- include "trimtab.podBase" .scope }}
{{ include "trimtab.placement" (dict "placement" (omit .pool "topologySpread") "selector" "") }}
{{- with .pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ add (ceil .pool.settings.drain_s | int) 30 }}
containers:
  - name: ray
    image: {{ include "trimtab.image" (dict "root" .root "image" .pool.image) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [sh, -c, "exec ray start --address=$LWS_LEADER_ADDRESS:6379 --node-manager-port=6380 --block --disable-usage-stats"]
    # The leader drains; its streams need these GPUs until it has.
    lifecycle: {preStop: {sleep: {seconds: {{ add (ceil .pool.settings.drain_s | int) 10 }}}}}
    securityContext: {{- include "trimtab.containerSecurity" . | nindent 6 }}
    env:
      {{- include "trimtab.env" .root | nindent 6 }}
      {{- include "trimtab.cacheEnv" . | nindent 6 }}
      {{- with .pool.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    startupProbe:
      tcpSocket: {port: 6380}
      periodSeconds: 10
      failureThreshold: {{ max 1 (div (int .pool.startupSeconds) 10) }}
    readinessProbe:
      tcpSocket: {port: 6380}
      periodSeconds: 15
    livenessProbe:
      tcpSocket: {port: 6380}
      periodSeconds: 30
      failureThreshold: 6
    resources: {{- include "trimtab.workerResources" . | nindent 6 }}
    volumeMounts:
      {{- include "trimtab.scratchMounts" . | nindent 6 }}
      {{- include "trimtab.workerMounts" . | nindent 6 }}
volumes:
  {{- include "trimtab.scratchVolumes" . | nindent 2 }}
  {{- include "trimtab.workerVolumes" . | nindent 2 }}
{{- end }}
