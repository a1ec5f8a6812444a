# A worker that computes on an NVIDIA GPU, its FlashInfer kernels compiled ahead of time.
#
#   docker build -f deploy/docker/worker-gpu.Dockerfile -t quire/worker-gpu:0.1.0 .
#
# The CUDA libraries come with torch and nvcc comes as a package, so no image of NVIDIA's is needed, and no GPU to
# build. The result holds neither nvcc nor g++; it keeps gcc, with which Triton makes the launchers of its kernels
# at the first start.
#
# BASE_IMAGE         Debian or Ubuntu with Python 3.11 or 3.12 and venv
# CUDA_ARCHS         architectures that kernels are compiled for (compute capabilities)
# HEAD_DIMS, DTYPES, KV_CACHE_DTYPES
#                    what they are compiled for; fewer of each make a shorter build and a smaller image
# PREBUILD_FLAGS     empty leaves out the variants for models with sliding windows
# MAX_JOBS           compilers at once; each takes up to 4 GB
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST, PIP_FIND_LINKS
#                    package indexes, as pip reads them; one with a password belongs into the secret
# secret pip_conf    a pip.conf:          --secret id=pip_conf,src=pip.conf
# secret ca_bundle   certificates in PEM: --secret id=ca_bundle,src=ca.pem
# HTTP_PROXY, HTTPS_PROXY, NO_PROXY       are passed on by Docker itself
# TORCH_INDEX        where torch comes from: an index URL, or empty for pip's own
ARG BASE_IMAGE=python:3.11-slim-bookworm

# What both stages below begin with. Debian's Python has its headers in a package of their own; the official
# image has them anyway.
FROM ${BASE_IMAGE} AS base
RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc libc6-dev && \
    headers=$(python3 -c "import sysconfig; print(sysconfig.get_paths(scheme='posix_prefix')['include'])") && \
    if [ ! -e "$headers/Python.h" ]; then apt-get install -y --no-install-recommends python3-dev; fi && \
    rm -rf /var/lib/apt/lists/*

FROM base AS build
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
    python3 docker/requirements_of.py pyproject.toml gpu otel | grep -v '^flashinfer' >/tmp/wanted.txt && \
    sh docker/pip_install.sh -c requirements/constraints.txt -r /tmp/wanted.txt "setuptools>=77" && \
    sh docker/pip_install.sh --no-deps -r requirements/flashinfer.txt

FROM build AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# Headers of the libraries that came with torch (cuRAND) join the compiler's own. The linker looks for names
# without a version, and for a libcuda, which only hosts with a driver have.
ENV CUDA_HOME=/opt/cuda/nvidia/cu13
RUN --mount=type=secret,id=pip_conf --mount=type=secret,id=ca_bundle \
    sh docker/pip_install.sh --no-deps --target /opt/cuda -r requirements/cuda-compiler.txt && \
    cp -rsn /opt/venv/lib/python3*/site-packages/nvidia/cu13/include/. "$CUDA_HOME/include/" && \
    ln -sfn lib "$CUDA_HOME/lib64" && mkdir -p "$CUDA_HOME/lib/stubs" && \
    ln -sf libcudart.so.13 "$CUDA_HOME/lib/libcudart.so" && \
    echo | gcc -shared -x c -Wl,-soname,libcuda.so.1 -o "$CUDA_HOME/lib/stubs/libcuda.so" -
ARG CUDA_ARCHS=8.0,8.6,8.9,9.0a,10.0a
ARG HEAD_DIMS=64,128,256
ARG DTYPES=bfloat16,float16
ARG KV_CACHE_DTYPES=auto,fp8_e4m3,fp8_e5m2
ARG PREBUILD_FLAGS=--sliding-window
ARG MAX_JOBS
COPY worker/__init__.py /src/worker/
COPY worker/gpu/__init__.py worker/gpu/prebuild.py worker/gpu/triton_cache.py /src/worker/gpu/
# The finished libraries lie where FlashInfer looks before it would compile; /kernels has them for the last stage.
RUN FLASHINFER_WORKSPACE_BASE=/tmp/kernels PYTHONPATH=/src PATH=/opt/cuda/bin:$PATH MAX_JOBS=${MAX_JOBS:-$(nproc)} \
    /opt/venv/bin/python -m worker.gpu.prebuild --arch "$CUDA_ARCHS" --head-dim "$HEAD_DIMS" \
    --dtype "$DTYPES" --kv-cache-dtype "$KV_CACHE_DTYPES" $PREBUILD_FLAGS && \
    rm -rf /tmp/kernels && cd /opt/venv && \
    mkdir /kernels && cp -a --parents lib/python3*/site-packages/flashinfer/data/aot /kernels/

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

FROM base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="quire-worker-gpu" \
      org.opencontainers.image.description="Serves language models: a worker on an NVIDIA GPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
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
COPY --from=build /opt/venv /opt/venv
COPY --from=kernels /kernels /opt/venv
COPY --from=package /code /opt/quire
USER 10001:10001
WORKDIR /home/quire
EXPOSE 50051
# The first start fetches the model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s CMD ["python3", "-m", "deploy.health", "worker"]
ENTRYPOINT ["python3", "-m", "deploy.cli"]
CMD ["worker"]
