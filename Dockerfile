# One image for every role: `docker run IMAGE node`, `docker run IMAGE gateway`, ...
# It runs on CPUs; on GPU servers, see docs/deploy.md.

FROM python:3.11-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/lambdascale
COPY lambdascale ./
COPY requirements/run.lock requirements/
# The launcher makes the virtual environment, from the lock and its hashes, and then runs
# services.cli. That is an empty module here, so that a change of the code leaves this layer be.
RUN mkdir -p services/cli && touch services/cli/__main__.py && ./lambdascale && rm -r services
COPY services services
COPY shared shared
COPY simulation simulation
RUN .venv/bin/python -m compileall -q services shared

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --user-group --no-log-init --home-dir /var/lib/lambdascale --create-home \
    --shell /usr/sbin/nologin lambdascale
# Nodes compile their kernels for the processor they run on (services/node/engine/kernels).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/lambdascale /opt/lambdascale
ENV PATH=/opt/lambdascale/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    LAMBDASCALE_NODE_DATA_DIR=/var/lib/lambdascale
WORKDIR /opt/lambdascale
USER 10001:10001
# No HEALTHCHECK: what healthy means differs by role; docker-compose.yml has one for each.
ENTRYPOINT ["python", "-m", "services.cli"]
CMD ["--help"]
