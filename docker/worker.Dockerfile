# A worker: the agent, the library and torch.  The training script is mounted at /job.  From the root:
#   docker build -f docker/worker.Dockerfile --target cpu  -t gridtrain-worker .
#   docker build -f docker/worker.Dockerfile --target cuda -t gridtrain-worker:latest-cuda .
#   docker build ... --build-arg CUDA_INDEX=https://download.pytorch.org/whl/cu126     for an older driver
# Without BuildKit, `--target cuda` also builds the cpu image, which does no harm but takes time.
ARG PYTHON_IMAGE=python:3.11-slim

# Dependencies are installed before our code, so that a change to the code does not download torch again.
FROM ${PYTHON_IMAGE} AS prepared
LABEL org.gridtrain.stage="build"
WORKDIR /src
COPY docker/wheelhouse /wheelhouse
COPY docker/requirements.py pyproject.toml constraints.txt ./
RUN python -m venv --without-pip /opt/gridtrain && python requirements.py worker > requirements.txt

# Common to both images, apart from torch.
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="gridtrain worker" \
      org.opencontainers.image.description="Joins a training run and trains in it" \
      org.opencontainers.image.licenses="Apache-2.0"
# The same user as in the coordinator's image, so that local workers can read the invitation.
RUN useradd --uid 10001 --user-group --home-dir /state --no-create-home --shell /usr/sbin/nologin gridtrain \
    && install -d -m 0700 -o gridtrain -g gridtrain /state /invitations /models
COPY docker/worker-entry.sh /usr/local/bin/worker-entry
ENV PATH=/opt/gridtrain/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    XDG_STATE_HOME=/state \
    GRIDTRAIN_EXPORT_DIR=/models
USER 10001:10001
WORKDIR /job
# Healthy once the coordinator has admitted this worker and its script is running.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/bin/sh", "-c", "grep -qsz ^GRIDTRAIN_IDENTITY= /proc/[0-9]*/environ"]
# The script ends with exec, so that SIGTERM reaches the agent, which leaves the run in an orderly way.
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
# Capabilities from the NVIDIA container toolkit; compose.yaml or --gpus selects the GPUs.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=install-cuda /opt/gridtrain /opt/gridtrain
