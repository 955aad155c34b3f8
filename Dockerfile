# The suite and all that it needs. The driver of a GPU is the host's (NVIDIA's container toolkit).
#
#   docker build -t open-instruct .                              # for GPUs; --build-arg TORCH=cpu for a machine without
#   docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" open-instruct sft FILE.yaml --output_dir OUT
FROM python:3.11-slim-bookworm

# A C compiler for what is compiled when it is first used, and lscpu (util-linux) for vLLM on a CPU.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git util-linux \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH=cuda
COPY . /opt/open_instruct
RUN OPEN_INSTRUCT_TORCH=$TORCH /opt/open_instruct/scripts/install.sh && rm -rf /root/.cache

ENV PATH=/opt/open_instruct/.venv/bin:$PATH \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /work
ENTRYPOINT ["open-instruct"]
