"""What a program written with openai-python does; prints what it saw as JSON. Runs in the client's own environment.

python openai_python_program.py BASE_URL MODEL
"""

import json
import sys

import openai

HI = [{"role": "user", "content": "hello"}]


def main(base_url: str, model: str) -> dict[str, object]:
    client = openai.OpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=60)
    seen: dict[str, object] = {"version": openai.__version__}

    seen["models"] = [each.id for each in client.models.list()]
    seen["model"] = client.models.retrieve(model).id

    whole = client.chat.completions.create(
        model=model, messages=HI, max_tokens=20, seed=5, logprobs=True, top_logprobs=2
    )
    seen["whole"] = whole.choices[0].message.content
    seen["finish"] = whole.choices[0].finish_reason
    seen["usage"] = whole.usage.completion_tokens
    seen["logprobs"] = "".join(bytes(t.bytes).decode("latin-1") for t in whole.choices[0].logprobs.content)

    stream = client.chat.completions.create(
        model=model, messages=HI, max_tokens=20, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    seen["streamed"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    seen["stream_usage"] = chunks[-1].usage.completion_tokens
    seen["role"] = chunks[0].choices[0].delta.role

    several = client.chat.completions.create(model=model, messages=HI, max_tokens=8, seed=5, n=3)
    seen["several"] = [each.index for each in several.choices]

    text = client.completions.create(model=model, prompt="hello", max_tokens=8, seed=5, echo=True, logprobs=1)
    seen["text"] = text.choices[0].text
    seen["text_tokens"] = "".join(text.choices[0].logprobs.tokens)

    seen["errors"] = {
        "parameter": error_of(lambda: client.chat.completions.create(model=model, messages=HI, temperature=9)),
        "model": error_of(lambda: client.chat.completions.create(model="other", messages=HI)),
        "context": error_of(lambda: client.completions.create(model=model, prompt="word " * 100_000)),
    }
    with client.chat.completions.create(model=model, messages=HI, max_tokens=2000, stream=True) as stream:
        next(iter(stream))  # and leave
    return seen


def error_of(call) -> list[object]:
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.param, error.code]
    return []


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
