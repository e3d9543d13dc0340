# The coordinator: core dependencies only, no torch.  Build from the repository's root:
#   docker build -f docker/coordinator.Dockerfile -t gridtrain-coordinator .
FROM python:3.11-slim

WORKDIR /src
COPY . .
RUN pip install --no-cache-dir ".[coordinator]" && rm -rf /src/* \
    && useradd --create-home --uid 10001 gridtrain \
    && install -d -o gridtrain -g gridtrain /state

USER gridtrain
WORKDIR /state
VOLUME /state
EXPOSE 7700

# The exec form: SIGTERM reaches the daemon, which closes its journal.
ENTRYPOINT ["gridtrain"]
CMD ["coordinator", "--listen", "tcp://0.0.0.0:7700", "--state", "/state"]
