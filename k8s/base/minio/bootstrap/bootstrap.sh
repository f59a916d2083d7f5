#!/bin/sh
# Makes the buckets and their users. Every step gives the same result when it is done again.
# Only mc, sleep and the shell's own words: the image of mc has little else.
set -eu

tries=0
until mc alias set store "$S3_ENDPOINT" "$ROOT_USER" "$ROOT_PASSWORD"; do
    tries=$((tries + 1))
    if [ "$tries" -ge 60 ]; then
        echo "no answer from $S3_ENDPOINT after $tries tries: is the pod minio-0 ready, is Secret minio-root right?" >&2
        exit 1
    fi
    sleep 2
done

for bucket in flowmill flyte mlflow; do
    mc mb --ignore-existing "store/$bucket"
done

mc version enable store/flowmill
# The whole lifecycle of the bucket is this file: what is not in it is taken away.
mc ilm rule import store/flowmill < /bootstrap/lifecycle.json

# add_user NAME KEY SECRET: a user with key KEY that may do what policy-NAME.json says, and nothing else.
add_user() {
    mc admin policy create store "flowmill-$1" "/bootstrap/policy-$1.json"
    mc admin user add store "$2" "$3"
    if ! answer=$(mc admin policy attach store "flowmill-$1" --user "$2" 2>&1); then
        case "$answer" in
            *"already in effect"*) ;;
            *) echo "$answer" >&2; exit 1 ;;
        esac
    fi
}

add_user task "$TASK_KEY" "$TASK_SECRET"
add_user flyte "$FLYTE_KEY" "$FLYTE_SECRET"
add_user mlflow "$MLFLOW_KEY" "$MLFLOW_SECRET"

mc ls store
mc ilm rule ls store/flowmill
echo "buckets, users, policies, versioning and lifecycle are in place"
