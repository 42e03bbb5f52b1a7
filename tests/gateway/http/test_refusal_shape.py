"""Whatever refuses a request, the client reads OpenAI's shape."""

from __future__ import annotations

import json

import pytest

from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.gateway.http.replies import as_openai_error
from relume.controlplane.gateway.openai.apis import COMPLETIONS
from relume.controlplane.gateway.openai.body import parse


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"detail":"There was an error parsing the body"}', "parsing the body"),
        (b'{"detail":[{"loc":["body"],"msg":"Field required"}]}', "Field required"),
        (b"Not Found", "Not Found"),
        (b"\xff\xfe", "�"),
        (b"", "refused by the worker"),
        (b"[]", "[]"),
        (b'{"error":"flat"}', "flat"),
    ],
)
def test_a_refusal_of_another_shape_is_put_into_openais(body: bytes, message: str) -> None:
    error = json.loads(as_openai_error(404, body))["error"]
    assert message in error["message"]
    assert error["type"] == "not_found_error"


def test_a_refusal_in_openais_shape_is_left_as_it_is() -> None:
    body = b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}'
    assert as_openai_error(400, body) is body


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\x80", b"a\xc3"])
def test_text_that_is_no_utf_8_never_reaches_a_worker(text: bytes) -> None:
    body = b'{"model": "tiny", "prompt": "' + text + b'"}'
    with pytest.raises(ClientError) as refused:
        parse(body, COMPLETIONS)
    assert refused.value.status == 400
