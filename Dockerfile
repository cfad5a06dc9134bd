# One image for every role: `docker run IMAGE node`, `docker run IMAGE gateway`, ...
# It runs on CPUs. docker-compose.gpu.yml makes one for GPUs: an image with torch's CUDA build as BASE, and
# TORCH=system.

ARG BASE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE} AS base
# Nodes compile their kernels for the processor they run on (services/node/engine/kernels). They are not optimised
# while they are linked, so what does that (64 MB) is left out. No two builds have the same caches and logs.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /usr/lib/gcc/*/*/lto1 /usr/bin/*lto-dump* /var/lib/apt/lists/* /var/cache/*/* /var/log/*

FROM base AS build
ARG TORCH=cpu
# With SOURCE_DATE_EPOCH, compiled files hold a digest of their source, and not its time: two builds make the same. Only
# compileall makes any.
ENV LS_TORCH=$TORCH PIP_NO_CACHE_DIR=1 SOURCE_DATE_EPOCH=0 PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/lambdascale
COPY lambdascale ./
COPY requirements/torch.lock requirements/
COPY requirements/run.lock requirements/
# The launcher makes the virtual environment, from the locks and their hashes, and then runs
# services.cli. That is an empty module here, so that a change of the code leaves this layer be.
# Nobody compiles against torch here, tests packages or installs any: 290 MB. Names of what torch's libraries
# keep to themselves, which debuggers show, are another 90 MB. (Libraries that auditwheel has patched, such as
# numpy's, do not load any more without theirs.)
RUN mkdir -p services/cli && touch services/cli/__main__.py && ./lambdascale && rm -r services \
    && packages=$(echo .venv/lib/python3*/site-packages) && torch=$packages/torch \
    && rm -rf "$torch/test" "$torch/include" "$torch"/bin/*test* "$torch"/bin/*Test "$torch"/bin/protoc* \
    "$packages/pip" "$packages"/pip-* \
    && find "$packages" -type d -name tests -prune -exec rm -r {} + \
    && find "$packages" -path '*/torch/lib/libtorch_*.so' -exec strip --strip-unneeded {} +
COPY shared shared
COPY services services
COPY simulation simulation
COPY benchmarks benchmarks
# The image's root may be read-only, and then Python could not keep what it compiles.
RUN .venv/bin/python -m compileall -q shared services simulation benchmarks

FROM base
# No --create-home: it would put a shell's dotfiles into the nodes' volumes.
RUN SOURCE_DATE_EPOCH=0 useradd --uid 10001 --user-group --no-log-init --home-dir /var/lib/lambdascale \
    --shell /usr/sbin/nologin lambdascale \
    && install -d -o lambdascale -g lambdascale -m 750 /var/lib/lambdascale \
    && install -d -o lambdascale -g lambdascale -m 700 /credentials
COPY --from=build /opt/lambdascale /opt/lambdascale
ENV PATH=/opt/lambdascale/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    LAMBDASCALE_NODE_DATA_DIR=/var/lib/lambdascale
WORKDIR /opt/lambdascale
USER 10001:10001
# No HEALTHCHECK: what healthy means differs by role; docker-compose.yml has one for each.
ENTRYPOINT ["python", "-m", "services.cli"]
CMD ["--help"]
