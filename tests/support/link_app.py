"""A web application that is nothing but the link: token ids in, token ids out. For tests of the link under Gunicorn.

`gunicorn -c python:web.gunicorn_conf "tests.support.link_app:create_app()"`. A stream is one JSON object a line of
data: `{"ids"}` with the index and position, `{"finish"}`, `{"error"}`; then `[DONE]`.
"""

import json
import os
from collections.abc import Iterator

from flask import Flask, Response, jsonify, request
from flask.typing import ResponseReturnValue

from common.config import WebConfig, load
from common.errors import RequestError
from common.params import SamplingParams
from common.wire import Failed, Finished, Tokens
from web.link.call import CallGroup, CallSpec, ClientGone
from web.link.link import Link


def create_app() -> Flask:
    app = Flask(__name__)
    link = Link(load(WebConfig))
    app.extensions["link"] = link

    @app.get("/state")
    def state() -> ResponseReturnValue:
        return {"pid": os.getpid(), "ready": link.ready, "why": link.why_not_ready(), "open": link.open_requests}

    @app.get("/ready")
    def ready() -> ResponseReturnValue:
        return {}, 200 if link.ready else 503

    @app.post("/generate")
    def generate() -> ResponseReturnValue:
        body = request.get_json()
        spec = CallSpec(body["prompt_ids"], SamplingParams(seed=body.get("seed", 0)), body["max_tokens"])
        specs = [spec] * body.get("n", 1)
        group = link.open(specs, "cmpl", request.environ["gunicorn.socket"])
        try:
            group.wait_accepted()
        except BaseException:
            group.close()
            raise
        if body.get("stream", True):
            return Response(_stream(group), mimetype="text/event-stream")
        try:
            return jsonify([_as_json(item) for item in group.events() if item])
        finally:
            group.close()

    @app.errorhandler(RequestError)
    def refused(error: RequestError) -> ResponseReturnValue:
        return {"error": error.code}, error.kind.status

    @app.errorhandler(ClientGone)
    def gone(error: ClientGone) -> ResponseReturnValue:
        return "", 499

    return app


def _stream(group: CallGroup) -> Iterator[str]:
    try:
        for item in group.events():
            yield f"data: {json.dumps(_as_json(item))}\n\n" if item else ": ping\n\n"
        yield "data: [DONE]\n\n"
    except ClientGone:
        return
    finally:
        group.close()


def _as_json(item: tuple[int, Tokens | Finished | Failed]) -> dict[str, object]:
    index, event = item
    if isinstance(event, Tokens):
        return {"index": index, "pos": event.pos, "ids": event.ids}
    if isinstance(event, Finished):
        return {"index": index, "finish": event.reason}
    return {"index": index, "error": event.code}
