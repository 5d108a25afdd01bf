# An image for a machine with NVIDIA GPUs: this checkout in /nanochat, its packages in /nanochat/.venv, an unprivileged
# user.
#
#   docker build -t nanochat .
#   docker run --gpus=all --ipc=host -v /fast/disk:/data nanochat torchrun --standalone --nproc-per-node=8 \
#       --signals-to-handle=SIGTERM,SIGINT,SIGUSR1,SIGUSR2 --shutdown-timeout=600 -m scripts.base_train -- --depth=12
#
# /data must be writable for user 1001. --ipc=host gives NCCL the shared memory that it needs between GPUs. The host
# needs the driver (580 or newer for CUDA 13) and NVIDIA's container toolkit. torch includes CUDA, so the base image
# contains little more than the settings that the toolkit reads.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# torch.compile compiles small C programs against Python's headers
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv

RUN useradd --create-home --uid 1001 nanochat && install -d -o nanochat -g nanochat /nanochat /data
USER 1001
WORKDIR /nanochat
ENV UV_PYTHON=/usr/bin/python3 \
    UV_NO_CACHE=1 \
    NANOCHAT_BASE_DIR=/data/nanochat \
    PATH=/nanochat/.venv/bin:$PATH

# the packages have their own layer, which changes to the code do not rebuild
COPY --chown=nanochat:nanochat pyproject.toml uv.lock README.md ./
RUN uv sync --locked --no-install-project --extra dev
COPY --chown=nanochat:nanochat . .
RUN bash dev/setup.sh

STOPSIGNAL SIGTERM
CMD ["python", "-m", "scripts.status"]
