# A worker: the agent, the library and torch.  The training script is mounted at /job.  From the root:
#   docker build -f docker/worker.Dockerfile --target cpu  -t gridtrain-worker .
#   docker build -f docker/worker.Dockerfile --target cuda -t gridtrain-worker:latest-cuda .
#   docker build ... --build-arg CUDA_INDEX=https://download.pytorch.org/whl/cu126     for an older driver
# Without BuildKit `--target cuda` builds the cpu image as well; that costs time only.
ARG PYTHON_IMAGE=python:3.11-slim

# Dependencies come before our own code, so that a change of ours does not fetch torch again.
FROM ${PYTHON_IMAGE} AS prepared
LABEL org.gridtrain.stage="build"
WORKDIR /src
COPY docker/wheelhouse /wheelhouse
COPY docker/requirements.py pyproject.toml constraints.txt ./
RUN python -m venv --without-pip /opt/gridtrain && python requirements.py worker > requirements.txt

# What both images have besides torch.
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="gridtrain worker" \
      org.opencontainers.image.description="Joins a training run and trains in it" \
      org.opencontainers.image.licenses="Apache-2.0"
# The same user as in the coordinator's image, whose invitation local workers read.
RUN useradd --uid 10001 --user-group --home-dir /state --no-create-home --shell /usr/sbin/nologin gridtrain \
    && install -d -m 0700 -o gridtrain -g gridtrain /state /invitations /models
COPY docker/worker-entry.sh /usr/local/bin/worker-entry
ENV PATH=/opt/gridtrain/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/state \
    GRIDTRAIN_EXPORT_DIR=/models
USER 10001:10001
WORKDIR /job
# The coordinator has let this worker in, and its script runs.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/bin/sh", "-c", "grep -qsz ^GRIDTRAIN_IDENTITY= /proc/[0-9]*/environ"]
# It ends in exec: SIGTERM reaches the agent, which leaves the run gracefully.
ENTRYPOINT ["worker-entry"]
CMD ["python", "train.py"]

FROM prepared AS install-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/gridtrain/bin/python install --no-cache-dir --find-links /wheelhouse \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY gridtrain ./gridtrain
COPY coordinator ./coordinator
COPY worker ./worker
RUN pip --python /opt/gridtrain/bin/python install --no-cache-dir --find-links /wheelhouse --no-deps .

FROM runtime AS cpu
COPY --from=install-cpu /opt/gridtrain /opt/gridtrain

FROM prepared AS install-cuda
ARG CUDA_INDEX=
RUN pip --python /opt/gridtrain/bin/python install --no-cache-dir --find-links /wheelhouse \
        ${CUDA_INDEX:+--extra-index-url "${CUDA_INDEX}"} -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY gridtrain ./gridtrain
COPY coordinator ./coordinator
COPY worker ./worker
RUN pip --python /opt/gridtrain/bin/python install --no-cache-dir --find-links /wheelhouse --no-deps .

FROM runtime AS cuda
# What the NVIDIA container toolkit brings in; which GPUs, compose.yaml or --gpus says.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=install-cuda /opt/gridtrain /opt/gridtrain
