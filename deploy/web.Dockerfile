# The web tier: Gunicorn and Flask. Holds neither torch nor the worker's code.
FROM python:3.13-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The same user as the worker's, because both use the sockets in /run/tokenloom.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /models tokenloom \
    && install -d -o tokenloom -g tokenloom -m 0700 /run/tokenloom /models

WORKDIR /opt/tokenloom
COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY web web
COPY cli cli
# The ranges are in pyproject.toml
# hadolint ignore=DL3013
RUN pip install '.[web]'

# The name of the project only looks like a token
# hadolint ignore=DL3064
ENV TOKENLOOM_HOST=0.0.0.0 \
    TOKENLOOM_PORT=8000 \
    TOKENLOOM_SUBMIT_ENDPOINT=ipc:///run/tokenloom/submit.sock \
    TOKENLOOM_PUBLISH_ENDPOINT=ipc:///run/tokenloom/publish.sock
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenloom"]
CMD ["web"]
