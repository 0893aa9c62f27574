"""A validated request and its prompts as token ids → what is asked of the worker, or why it cannot be.

Pure: no HTTP, no sockets.
"""

from common.errors import ErrorCode, RequestError
from common.wire import ModelInfo
from web.generation import StopRules
from web.link.call import CallSpec
from web.schema.chat import ChatRequest
from web.schema.generation import GenerationRequest
from web.text.model_text import ModelText
from web.text.tokenizer import TextTokenizer

MAX_PROMPT_LOGPROBS = 1_000_000
"""Log-probabilities of one prompt that are told at most: they make one message of the worker's."""


def check_model(name: str | None, model: ModelInfo) -> None:
    """Raise RequestError unless a request names the served model, or none."""
    if name and name != model.id:
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND, f"the model {name[:200]!r} is not served here; {model.id!r} is", "model"
        )


def refuse_hopeless(text: str, field: str, model: ModelInfo, tokenizer: TextTokenizer) -> None:
    """Raise RequestError for a text so long that it cannot fit, before minutes are spent on encoding all of it."""
    if tokenizer.exceeds(text, model.max_model_len):
        raise _too_long(f"more than {model.max_model_len}", field, model)


def encode_chat(request: ChatRequest, model: ModelInfo, text: ModelText) -> list[int]:
    """Return the prompt of a chat. Raises RequestError when it cannot be made, or cannot fit."""
    messages = [message.for_template() for message in request.messages]
    refuse_hopeless("".join(message["content"] for message in messages), "messages", model, text.tokenizer)
    return text.encode_chat(messages, request.template_options())


def call_specs(
    request: GenerationRequest, prompts: list[list[int]], prompt_field: str, model: ModelInfo, tokenizer: TextTokenizer
) -> list[CallSpec]:
    """Return the calls: for each prompt as many as answers were asked for, one after another.

    Raises RequestError that names the field which does not fit the model.
    """
    _check_ids(request, model)
    prompts = [_truncated(ids, request.truncate_prompt_tokens, model) for ids in prompts]
    for ids in prompts:
        _check_prompt(ids, prompt_field, model)
    _check_limit(request, max(map(len, prompts)), model)
    _check_prompt_logprobs(request, max(map(len, prompts)))
    stop_token_ids = [token_id for stop in request.stops if (token_id := tokenizer.special_id(stop)) is not None]
    breakers = tuple(tokenizer.last_token(text) for text in request.breakers)
    limit = request.limit
    return [
        CallSpec(
            prompt_ids=ids,
            params=params,
            max_tokens=limit[1] if limit else model.max_model_len - len(ids),
            stop_token_ids=list(dict.fromkeys([*stop_token_ids, *(request.stop_token_ids or [])])),
            ignore_eos=bool(request.ignore_eos),
            priority=request.priority or 0,
            tenant=request.cache_salt or "",
            num_logprobs=request.num_logprobs,
            prompt_logprobs=request.echoes and request.num_logprobs is not None,
        )
        for ids in prompts
        for params in request.sampling_params(breakers)
    ]


def stop_rules(request: GenerationRequest, spec: CallSpec, model: ModelInfo) -> StopRules:
    """Return what ends the answer of a call on this side, and what is hidden of it."""
    ends = frozenset(spec.stop_token_ids)
    return StopRules(
        strings=request.stops,
        token_ids=ends if spec.ignore_eos else ends | frozenset(model.eos_token_ids),
        min_tokens=request.min_tokens or 0,
        kept=bool(request.include_stop_str_in_output),
    )


def _truncated(ids: list[int], at_most: int | None, model: ModelInfo) -> list[int]:
    """Return the end of a prompt; -1 leaves room for one token of an answer."""
    if at_most is None:
        return ids
    return ids[-(model.max_model_len - 1 if at_most < 0 else at_most) :]


def _check_prompt_logprobs(request: GenerationRequest, longest: int) -> None:
    if request.echoes and request.num_logprobs is not None:
        most = MAX_PROMPT_LOGPROBS // (1 + request.num_logprobs)
        if longest > most:
            message = f"logprobs: with so many of them, echo is for prompts of at most {most} tokens"
            raise RequestError(ErrorCode.INVALID_REQUEST, message, "logprobs")


def _check_ids(request: GenerationRequest, model: ModelInfo) -> None:
    for name, ids in (
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids),
        ("stop_token_ids", request.stop_token_ids),
    ):
        if ids and max(ids) >= model.vocab_size:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{name}: has token ids outside the vocabulary", name)


def _check_prompt(ids: list[int], field: str, model: ModelInfo) -> None:
    if not ids:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{field}: is empty", field)
    if max(ids) >= model.vocab_size:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{field}: has token ids outside the vocabulary", field)
    if len(ids) >= model.max_model_len:
        raise _too_long(str(len(ids)), field, model)


def _too_long(num_tokens: str, field: str, model: ModelInfo) -> RequestError:
    return RequestError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {model.max_model_len} tokens. "
        f"However, your prompt has {num_tokens} tokens, which leaves no room for an answer.",
        field,
    )


def _check_limit(request: GenerationRequest, longest: int, model: ModelInfo) -> None:
    if request.limit and longest + request.limit[1] > model.max_model_len:
        name, value = request.limit
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {model.max_model_len} tokens. However, {name} asks for {value} "
            f"tokens after a prompt of {longest}. Lower {name} or leave it out.",
            name,
        )
