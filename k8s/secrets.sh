#!/bin/sh
# Prints every Secret of secrets.example.yaml with fresh random values, writes no file and applies nothing:
#   sh k8s/secrets.sh | kubectl create -f -
set -eu

# random LENGTH: that many letters and digits from the kernel; nothing that a URI or YAML would have to escape.
random() {
    LC_ALL=C tr -dc 'A-Za-z0-9' < /dev/urandom | head -c "$1"
}

# secret NAMESPACE NAME, then KEY VALUE pairs; a value is one line.
secret() {
    printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s, namespace: %s}\n' "$2" "$1"
    printf 'type: Opaque\nstringData:\n'
    shift 2
    while [ $# -gt 0 ]; do
        printf '  %s: "%s"\n' "$1" "$2"
        shift 2
    done
}

database=postgres.flowmill.svc.cluster.local:5432
mlflow_password=$(random 32) flyte_password=$(random 32)
task_key=$(random 20) task_secret=$(random 40)
flyte_key=$(random 20) flyte_secret=$(random 40)

secret flowmill minio-root root_user "root-$(random 12)" root_password "$(random 40)"
secret flowmill postgres username postgres password "$(random 32)" \
    mlflow_password "$mlflow_password" flyte_password "$flyte_password"
secret flowmill mlflow database_uri "postgresql+psycopg2://mlflow:$mlflow_password@$database/mlflow" \
    access_key_id "$(random 20)" secret_access_key "$(random 40)"
secret flowmill flyte-s3 access_key_id "$flyte_key" secret_access_key "$flyte_secret"
secret flowmill flowmill-s3 access_key_id "$task_key" secret_access_key "$task_secret"
secret flowmill-development flowmill-s3 access_key_id "$task_key" secret_access_key "$task_secret"
secret flyte flyte-config-secrets \
    202-database-secrets.yaml "{database: {postgres: {password: $flyte_password}}}" \
    203-storage-secrets.yaml "{storage: {stow: {config: {access_key_id: $flyte_key, secret_key: $flyte_secret}}}}"
