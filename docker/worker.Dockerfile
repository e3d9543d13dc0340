# A worker: the agent, the library and torch.  The training script is mounted at /job.  Build from the root:
#   docker build -f docker/worker.Dockerfile -t gridtrain-worker .
#   docker build ... --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126     for GPUs
FROM python:3.11-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c constraints.txt ".[worker]" \
    && rm -rf /src/* \
    && useradd --create-home --uid 10001 gridtrain

USER gridtrain
WORKDIR /job

# The exec form: SIGTERM reaches the agent, which leaves the run gracefully.
ENTRYPOINT ["gridtrain"]
CMD ["worker", "tcp://coordinator:7700", "--", "python", "train.py"]
