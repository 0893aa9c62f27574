"""What a program written with LiteLLM does; prints what it saw as JSON. Runs in the client's own environment.

python litellm_program.py BASE_URL MODEL
"""

import json
import sys

import litellm

HI = [{"role": "user", "content": "hello"}]


def main(base_url: str, model: str) -> dict[str, object]:
    server = {"model": f"openai/{model}", "api_base": base_url, "api_key": "any", "num_retries": 0, "timeout": 60}
    whole = litellm.completion(messages=HI, max_tokens=20, seed=5, **server)
    stream = litellm.completion(messages=HI, max_tokens=20, seed=5, stream=True, **server)
    seen: dict[str, object] = {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
    }
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 100_000}], **server)
    except litellm.ContextWindowExceededError as error:
        seen["too long"] = error.status_code
    try:
        litellm.completion(messages=HI, temperature=9, **server)
    except litellm.BadRequestError as error:
        seen["bad"] = error.status_code
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
