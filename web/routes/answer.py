"""Runs the calls of one HTTP request and answers with what they generate, whole or as a stream.

The status is decided before the first byte: nothing is sent until the worker has accepted every call. Whatever
happens, the calls are closed in the end: when the client leaves, the worker stops working for it.
"""

import logging
import time
from collections.abc import Iterator

from flask import Response, g, request

from common.errors import RequestError
from common.wire import ModelInfo
from web.answers import DONE, Format, Writer, event_bytes
from web.errors import error_json
from web.generation import Choice, Generation
from web.link.call import CallGroup, CallSpec, ClientGone
from web.prepare import stop_rules
from web.routes.service import Service
from web.schema.generation import GenerationRequest
from web.text.decode_stream import DecodeStream
from web.text.model_text import ModelText

log = logging.getLogger(__name__)

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def answer(
    service: Service,
    asked: GenerationRequest,
    specs: list[CallSpec],
    model: ModelInfo,
    text: ModelText,
    form: Format,
    prefix: str,
) -> Response:
    """Submit the calls and return the response. Raises RequestError or ClientGone before anything was sent."""
    calls = service.link.open(specs, prefix, request.environ.get("gunicorn.socket"))
    try:
        g.request_id = calls.ids[0]
        calls.wait_accepted()
        choices = [Choice(_decode_stream(asked, spec, text), stop_rules(asked, spec, model)) for spec in specs]
        generation = Generation(calls, specs, choices, asked.num_choices, asked.echoes)
        writer = Writer(form, calls.ids[0], int(time.time()), model.id, len(specs))
        if not asked.stream:
            body = writer.whole(generation.answers(), generation.usage)
            calls.close()
            return Response(body, mimetype="application/json")
    except BaseException:
        calls.close()
        raise
    events = _stream(calls, generation, writer, asked.include_usage)
    response = Response(events, mimetype="text/event-stream", headers=STREAM_HEADERS)
    # The generator's own `finally` does not run when it was never started.
    response.call_on_close(calls.close)
    return response


def _decode_stream(asked: GenerationRequest, spec: CallSpec, text: ModelText) -> DecodeStream:
    """Control tokens have no text, unless all were asked for, or the one that ends the answer."""
    if asked.skip_special_tokens is False:
        return text.decode_stream(shown=text.tokenizer.special_ids)
    return text.decode_stream(frozenset(spec.stop_token_ids) if asked.include_stop_str_in_output else frozenset())


def _stream(calls: CallGroup, generation: Generation, writer: Writer, include_usage: bool) -> Iterator[bytes]:
    """Yield the SSE events. After the first byte a failure is an event too."""
    try:
        yield from writer.stream(generation.deltas(), include_usage)
        if include_usage:
            yield writer.usage_chunk(generation.usage)
        yield DONE
    except ClientGone:
        return
    except RequestError as error:
        log.warning("%s failed after its first byte: %s", calls.ids[0], error.message)
        yield event_bytes(error_json(error))
        yield DONE
    finally:
        calls.close()
