# The coordinator: admits workers, keeps the journal, receives no gradients.  No torch, no compiler, no pip.
# From the repository's root:
#   docker build -f docker/coordinator.Dockerfile -t gridtrain-coordinator .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
LABEL org.gridtrain.stage="build"
WORKDIR /src
COPY docker/wheelhouse /wheelhouse
COPY docker/requirements.py pyproject.toml constraints.txt ./
RUN python -m venv --without-pip /opt/gridtrain \
    && python requirements.py coordinator > requirements.txt \
    && pip --python /opt/gridtrain/bin/python install --no-cache-dir --find-links /wheelhouse \
        -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY gridtrain ./gridtrain
COPY coordinator ./coordinator
COPY worker ./worker
RUN pip --python /opt/gridtrain/bin/python install --no-cache-dir --find-links /wheelhouse --no-deps .

FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="gridtrain coordinator" \
      org.opencontainers.image.description="Admits a training run's workers and keeps its journal" \
      org.opencontainers.image.licenses="Apache-2.0"
# The same user as in the worker's image, so that local workers can read the invitation.
RUN useradd --uid 10001 --user-group --home-dir /state --no-create-home --shell /usr/sbin/nologin gridtrain \
    && install -d -m 0700 -o gridtrain -g gridtrain /state /invitations
COPY --from=build /opt/gridtrain /opt/gridtrain
ENV PATH=/opt/gridtrain/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/state
USER 10001:10001
WORKDIR /state
EXPOSE 7700 7780
# Queries the coordinator over its port, with the operator's key; it is healthy if it answers within 4 s.
# The timeout is longer because starting Python may take longer than that on a busy machine.
HEALTHCHECK --interval=10s --timeout=30s --start-period=20s --retries=3 \
    CMD ["/bin/sh", "-c", "gridtrain status --run \"${GRIDTRAIN_RUN:-default}\" --json > /dev/null"]
# Exec form, so that SIGTERM reaches the daemon, which closes its journal.
ENTRYPOINT ["gridtrain"]
CMD ["coordinator", "--listen", "tcp://0.0.0.0:7700"]
