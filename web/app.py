"""The web application: puts together the link to the worker, the text side and the routes.

`create_app` is called once in each web process, after the fork. Whoever runs the process starts the link, which is in
`extensions["link"]` (see gunicorn_conf).
"""

from flask import Flask, Response, g

from common.config import WebConfig, load
from common.ids import new_request_id
from web import errors
from web.link.link import Link
from web.routes import chat, completions, models, status, tokenize
from web.routes.service import Service, WorkerLink
from web.text.model_text import ModelTexts


def create_app(config: WebConfig | None = None, link: WorkerLink | None = None) -> Flask:
    """Return the application. config: by default from the TOKENLOOM_ variables. link: by default a new one."""
    config = config or load(WebConfig)
    link = link or Link(config)
    app = Flask("tokenloom", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_bytes
    app.extensions["link"] = link
    service = Service(link, ModelTexts(config.tokenizer))
    chat.register(app, service)
    completions.register(app, service)
    models.register(app, service)
    tokenize.register(app, service)
    status.register(app, service)
    errors.register(app)
    app.before_request(_name_request)
    app.after_request(_send_request_id)
    return app


def _name_request() -> None:
    g.request_id = new_request_id()


def _send_request_id(response: Response) -> Response:
    response.headers["X-Request-Id"] = g.request_id
    return response
