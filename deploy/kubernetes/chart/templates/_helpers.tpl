{{- define "prejit.labels" -}}
app.kubernetes.io/name: prejit
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "prejit.container" -}}
image: {{ .Values.image | quote }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
{{- end }}
{{- define "prejit.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  fsGroup: 10001
  seccompProfile: { type: RuntimeDefault }
{{- end }}
