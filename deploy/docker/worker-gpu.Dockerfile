# A worker that computes on an NVIDIA GPU, its FlashInfer kernels compiled ahead of time.
#
#   docker build -f deploy/docker/worker-gpu.Dockerfile -t quire/worker-gpu:0.1.0 .
#
# BUILD_IMAGE        with nvcc; compiles the kernels, needs no GPU, is not part of the result
# BASE_IMAGE         of the result: the same distribution and Python, no compiler
# CUDA_ARCHS         architectures to compile for; HEAD_DIMS: head sizes
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST, PIP_FIND_LINKS
#                    package indexes, as pip reads them; one with a password belongs into the secret
# secret pip_conf    a pip.conf:          --secret id=pip_conf,src=pip.conf
# secret ca_bundle   certificates in PEM: --secret id=ca_bundle,src=ca.pem
# HTTP_PROXY, HTTPS_PROXY, NO_PROXY       are passed on by Docker itself
# TORCH_INDEX        where torch comes from: an index URL, or empty for pip's own
ARG BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG BASE_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BUILD_IMAGE} AS build
RUN apt-get update && \
    apt-get install -y --no-install-recommends python3 python3-dev python3-venv ninja-build g++ && \
    rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG PIP_FIND_LINKS
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY deploy/docker/pip_install.sh deploy/docker/requirements_of.py /src/docker/
COPY requirements /src/requirements
# The largest layer first: it changes least.
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    sh docker/pip_install.sh -c requirements/constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/gpu.txt
COPY pyproject.toml /src/
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    python3 docker/requirements_of.py pyproject.toml gpu >/tmp/wanted.txt && \
    sh docker/pip_install.sh -c requirements/constraints.txt -r /tmp/wanted.txt "setuptools>=77"

FROM build AS kernels
ARG CUDA_ARCHS=8.0,8.6,8.9,9.0a,10.0a
ARG HEAD_DIMS=64,128,256
COPY worker /src/worker
# Linking wants a libcuda, which only hosts with a driver have; the toolkit's stub stands in. The finished
# libraries go where FlashInfer looks before it would compile.
RUN ln -sf /usr/local/cuda/lib64/stubs/libcuda.so /usr/lib/x86_64-linux-gnu/libcuda.so && \
    FLASHINFER_WORKSPACE_BASE=/tmp/kernels PYTHONPATH=/src \
    /opt/venv/bin/python -m worker.gpu.prebuild --arch "$CUDA_ARCHS" --head-dim "$HEAD_DIMS" \
    --dtype bfloat16,float16 --kv-cache-dtype auto,fp8_e4m3,fp8_e5m2 --sliding-window && \
    sh -c 'for file in $(find /tmp/kernels -path "*/cached_ops/*.so"); do \
    name=$(basename "$file" .so); \
    install -D "$file" $(echo /opt/venv/lib/python3*/site-packages)/flashinfer/data/aot/$name/$name.so || exit 1; \
    done' && rm -rf /tmp/kernels

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
LABEL org.opencontainers.image.title="quire-worker-gpu" \
      org.opencontainers.image.description="Serves language models: a worker on an NVIDIA GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Triton compiles a launcher for its kernels with the C compiler at the first start; FlashInfer needs none.
RUN apt-get update && \
    apt-get install -y --no-install-recommends python3 python3-dev gcc libc6-dev ca-certificates && \
    rm -rf /var/lib/apt/lists/*
# /run/quire-gpus is a volume too: the locks by which workers share the host's GPUs.
RUN useradd --uid 10001 --user-group --create-home quire && install -d -o quire -g quire /models && \
    install -d -m 1777 /run/quire-gpus
ENV PATH=/opt/venv/bin:/opt/quire/bin:$PATH \
    PYTHONPATH=/opt/quire \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    QUIRE_CACHE=/models \
    HF_HOME=/models/hub \
    QUIRE_HOST=0.0.0.0 \
    QUIRE_PORT=50051 \
    QUIRE_CLAIM_GPU=true \
    QUIRE_GPU_LOCK_DIR=/run/quire-gpus \
    FLASHINFER_DISABLE_JIT=1 \
    FLASHINFER_WORKSPACE_BASE=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMP_NUM_THREADS=4
COPY --from=kernels /opt/venv /opt/venv
COPY --from=package /code /opt/quire
USER 10001:10001
WORKDIR /home/quire
EXPOSE 50051
# The first start fetches the model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s CMD ["python3", "-m", "deploy.health", "worker"]
ENTRYPOINT ["python3", "-m", "deploy.cli"]
CMD ["worker"]
