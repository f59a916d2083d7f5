#!/usr/bin/env bash
# Install what the container tests need and the machine lacks, from Debian's packages. Needs root.
set -euo pipefail
missing=()
command -v podman >/dev/null || missing+=(podman buildah catatonit netavark aardvark-dns iptables)
command -v runc >/dev/null || missing+=(runc)
command -v debootstrap >/dev/null || missing+=(debootstrap)
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing+=(postgresql)
if [ ${#missing[@]} -gt 0 ] || ! command -v promtool >/dev/null; then
  apt-get update -qq
fi
if [ ${#missing[@]} -gt 0 ]; then
  echo "installing ${missing[*]}"
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${missing[@]}" >/dev/null
fi
if ! command -v promtool >/dev/null; then  # one program of a package whose server would start
  folder=$(mktemp -d)
  (cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root prometheus && dpkg-deb --extract prometheus_*.deb .)
  install "$folder/usr/bin/promtool" /usr/local/bin/promtool
  rm -rf "$folder"
fi
