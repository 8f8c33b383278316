# ASTuner with the local backbone, for CPUs and for one GPU; docs/containers.md.
ARG BASE=debian:bookworm-20250520-slim
FROM ${BASE}
ARG TORCH_INDEX=""
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH UV_EXCLUDE_NEWER=2026-11-28 UV_NO_CACHE=1 UV_SYSTEM_CERTS=1 PIP_NO_CACHE_DIR=1
# hadolint ignore=DL3008  # Debian keeps one version of each; BASE says which Debian
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 astuner \
 && install --directory --owner=astuner /work
WORKDIR /opt/astuner
COPY . .
# torch first and by pip, as in the Makefile: the build that TORCH_INDEX says is not exchanged for another one then.
ARG DEVICE=cpu
RUN python3 -m venv "$VIRTUAL_ENV" \
 && pip install --quiet uv==0.13.9 \
 && case "$DEVICE" in \
      cpu) pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --constraint requirements/constraints.txt torch ;; \
      cuda) pip install --quiet --constraint requirements/constraints.txt torch ;; \
      *) echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 1 ;; \
    esac \
 && uv pip install --constraint requirements/constraints.txt -r requirements/newcomer.txt \
 && python -m compileall -q astuner_core plugins
USER 10001
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=1m CMD ["astuner", "doctor"]
ENTRYPOINT ["astuner"]
CMD ["--help"]
