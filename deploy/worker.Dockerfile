# The worker: torch, transformers, the model. For an NVIDIA GPU build with TORCH_BACKEND=cuda.
FROM python:3.13-slim

ARG TORCH_BACKEND=cpu
ARG TORCH_SPEC=

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The folders exist with this owner so that volumes mounted there get it too.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /models tokenloom \
    && install -d -o tokenloom -g tokenloom -m 0700 /run/tokenloom /models

WORKDIR /opt/tokenloom
COPY deploy/install_torch.py deploy/install_torch.py
RUN python deploy/install_torch.py --backend "$TORCH_BACKEND" $TORCH_SPEC

COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY worker worker
COPY cli cli
# The ranges are in pyproject.toml
# hadolint ignore=DL3013
RUN pip install '.[worker]'

# The name of the project only looks like a token
# hadolint ignore=DL3064
ENV TOKENLOOM_CACHE_DIR=/models \
    HF_HOME=/models/huggingface \
    TOKENLOOM_SUBMIT_ENDPOINT=ipc:///run/tokenloom/submit.sock \
    TOKENLOOM_PUBLISH_ENDPOINT=ipc:///run/tokenloom/publish.sock
USER 10001:10001
VOLUME ["/run/tokenloom", "/models"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenloom"]
CMD ["worker"]
