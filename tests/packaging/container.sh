#!/bin/sh
# [DEVICE=cuda] container.sh [ENGINE...]: builds docker/ENGINE.Dockerfile (local, verl and trinity) on a base of Debian's
# packages, and tries it as far as there is no GPU: no image hub and no daemon, but root, buildah, mmdebstrap and 30 GB (for
# CUDA 60). pip's settings and the certificates of this machine go into the base, and the folder PIP_FIND_LINKS, if it is
# set, is lent while an image is built.
set -eu
cd "$(dirname "$0")/../.."
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
run() { command=$1; shift; buildah --storage-driver vfs --root "$made/store" --runroot "$made/run" "$command" "$@"; }
mkdir -p "$made/base/certificates"
mmdebstrap --quiet --variant=minbase bookworm "$made/base/debian.tar"
cp /usr/local/share/ca-certificates/*.crt "$made/base/certificates" 2>/dev/null || true
cp /etc/pip.conf "$made/base" 2>/dev/null || echo '[global]' >"$made/base/pip.conf"
engines=${*:-local verl trinity} device=${DEVICE:-cpu}
set --
if test -n "${PIP_FIND_LINKS:-}"; then
  echo "find-links = $PIP_FIND_LINKS" >>"$made/base/pip.conf"
  set -- --volume "$PIP_FIND_LINKS:$PIP_FIND_LINKS:ro"
fi
printf 'FROM scratch\nADD debian.tar /\nCOPY certificates /usr/local/share/ca-certificates\nCOPY pip.conf /etc/pip.conf\n' \
  >"$made/base/Dockerfile"
run bud --isolation chroot --tag debian "$made/base"
for engine in $engines; do
  # Debian's buildah reads a name only.
  sed "s/^FROM \${DEVICE}\$/FROM $device/" "docker/$engine.Dockerfile" >"$made/Dockerfile"
  run bud --isolation chroot --format docker --network host --layers=false "$@" --build-arg BASE=localhost/debian \
    --build-arg DEVICE="$device" --file "$made/Dockerfile" --tag "astuner-$engine" .
  container=$(run from --pull-never "localhost/astuner-$engine")
  run run --isolation chroot "$container" -- sh /opt/astuner/docker/smoke.sh "$(test "$device" = cpu && echo "$engine" || echo debug)"
  run images "localhost/astuner-$engine"
  run rm "$container"
  run rmi "localhost/astuner-$engine"
done
