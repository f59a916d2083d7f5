#!/bin/sh
# Make a stand-in for the base image `python:3.11-slim` from Debian's packages, where no container registry is reached.
# Needs debootstrap, root, and podman or docker. Usage: images/lookalike.sh [NAME]   then: make images BUILD="--python-image NAME"
set -eu
name=${1:-localhost/python:3.11-slim}
engine=$(command -v podman || command -v docker)
folder=$(mktemp -d)
trap 'rm -rf "$folder" "$folder.log"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3.11,python3-pip,python3.11-venv bookworm "$folder" \
  >"$folder.log" || { cat "$folder.log" >&2; exit 1; }
ln -sf python3.11 "$folder/usr/bin/python"
# As in the real one: pip may install, and nothing of apt's is kept.
rm -rf "$folder"/usr/lib/python3*/EXTERNALLY-MANAGED "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
tar -C "$folder" -c . | "$engine" import --change 'ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
  --change 'ENV LANG=C.UTF-8' --change 'CMD ["python3"]' - "$name" >&2
echo "$name"
