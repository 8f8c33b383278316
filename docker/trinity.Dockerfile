# ASTuner with the trinity backbone: GPUs with vLLM, or a trial on a CPU; docs/containers.md.
ARG BASE=debian:bookworm-20250520-slim
ARG DEVICE=cpu
FROM ${BASE} AS base
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH UV_EXCLUDE_NEWER=2026-11-28 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1 PIP_NO_CACHE_DIR=1
# Triton compiles at run time, with Python's headers.
# hadolint ignore=DL3008  # Debian keeps one version of each; BASE says which Debian
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 astuner \
 && install --directory --owner=astuner /work
WORKDIR /opt/astuner
COPY . .
RUN python3 -m venv "$VIRTUAL_ENV" \
 && pip install --quiet uv==0.13.9

FROM base AS cpu
ARG TORCH_INDEX=""
ENV TRINITY_PLATFORM=cpu
RUN pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint requirements/constraints-trinity.txt torch \
 && uv pip install --constraint requirements/constraints-trinity.txt -r requirements/newcomer.txt \
      -e plugins/astuner_ray -e plugins/astuner_ray/cpu -e plugins/astuner_trinity -e plugins/astuner_trinity/cpu

# As docs/backbones/trinity.md says; vLLM decides which torch.
FROM base AS cuda
RUN uv pip install --override requirements/overrides-trinity.txt -r requirements/newcomer.txt -e plugins/astuner_ray -e 'plugins/astuner_trinity[vllm]'

FROM ${DEVICE}
RUN python -m compileall -q astuner_core plugins
USER 10001
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=1m CMD ["astuner", "doctor"]
ENTRYPOINT ["astuner"]
CMD ["--help"]
