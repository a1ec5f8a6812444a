# The router: scheduler and HTTP API, without torch.
#
#   docker build -f deploy/docker/router.Dockerfile -t quire/router:0.1.0 .
#
# BASE_IMAGE         Debian or Ubuntu with Python 3.11 or 3.12 and venv
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST, PIP_FIND_LINKS
#                    package indexes, as pip reads them; one with a password belongs into the secret
# secret pip_conf    a pip.conf:          --secret id=pip_conf,src=pip.conf
# secret ca_bundle   certificates in PEM: --secret id=ca_bundle,src=ca.pem
# HTTP_PROXY, HTTPS_PROXY, NO_PROXY       are passed on by Docker itself
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_FIND_LINKS
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY deploy/docker/pip_install.sh deploy/docker/requirements_of.py /src/docker/
COPY requirements /src/requirements
COPY pyproject.toml /src/
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    python3 docker/requirements_of.py pyproject.toml otel >/tmp/wanted.txt && \
    sh docker/pip_install.sh -c requirements/constraints.txt -r /tmp/wanted.txt "setuptools>=77"

# The code is a layer of its own: a release that changes no dependency moves little.
FROM build AS package
COPY pyproject.toml README.md LICENSE /src/
COPY proto /src/proto
COPY settings /src/settings
COPY allocator /src/allocator
COPY checkpoint /src/checkpoint
COPY router /src/router
COPY worker /src/worker
COPY deploy /src/deploy
RUN /opt/venv/bin/python -m pip install --no-cache-dir --no-index --no-deps --no-build-isolation \
    --disable-pip-version-check --target /code /src

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="quire-router" \
      org.opencontainers.image.description="Serves language models: the router (HTTP API and scheduler)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# /models is a volume, shared with the workers: what is made here decides whom it belongs to.
RUN useradd --uid 10001 --user-group --create-home quire && install -d -o quire -g quire /models
ENV PATH=/opt/venv/bin:/opt/quire/bin:$PATH \
    PYTHONPATH=/opt/quire \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    QUIRE_CACHE=/models \
    HF_HOME=/models/hub
COPY --from=build /opt/venv /opt/venv
COPY --from=package /code /opt/quire
USER 10001:10001
WORKDIR /home/quire
EXPOSE 8000
# Alive, not ready: a router without workers waits for them, and restarting it would not help.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python3", "-m", "deploy.health", "router", "--live"]
ENTRYPOINT ["python3", "-m", "deploy.cli"]
CMD ["router"]
