"""Web pages of other origins: which headers an answer has for them, with and without allowed origins."""

from __future__ import annotations

from typing import Any

import pytest

from relume.controlplane.serve_settings import load
from relume.events.settings.config_error import ConfigError
from tests.gateway.client_requests import stream_body, text_body

TEXT = "/v1/completions"
PAGE = "https://chat.example.org"
ALLOWED = "access-control-allow-origin"
PREFLIGHT = (
    f"origin: {PAGE}\r\naccess-control-request-method: POST\r\n"
    "access-control-request-headers: authorization,content-type\r\n"
)
KEY = f"origin: {PAGE}\r\nauthorization: Bearer k\r\n"


async def test_an_allowed_page_gets_its_preflight_and_its_answers(rig: Any) -> None:
    async with rig(allowed_origins=frozenset({PAGE}), api_keys=frozenset({"k"})) as r:
        preflight = await r.ask(TEXT, method="OPTIONS", headers=PREFLIGHT)
        assert preflight.status == 204, "a browser sends no key with this question"
        assert preflight.headers[ALLOWED] == PAGE
        assert preflight.headers["access-control-allow-methods"] == "POST, OPTIONS"
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        assert int(preflight.headers["access-control-max-age"]) > 0
        for body in (text_body(), stream_body()):
            answer = await r.ask(TEXT, body, headers=KEY)
            assert (answer.status, answer.headers[ALLOWED]) == (200, PAGE)
            assert answer.headers["access-control-expose-headers"] == "*"
            assert answer.headers["vary"] == "origin"
        wrong = await r.ask(TEXT, text_body(), headers=f"origin: {PAGE}\r\n")
        assert (wrong.status, wrong.headers[ALLOWED]) == (401, PAGE), "the page sees why"


async def test_no_other_page_is_allowed_anything(rig: Any) -> None:
    other = PREFLIGHT.replace("chat.", "evil.")
    async with rig(allowed_origins=frozenset({PAGE}), api_keys=frozenset({"k"})) as r:
        assert (await r.ask(TEXT, method="OPTIONS", headers=other)).status == 401
        answer = await r.ask(TEXT, text_body(), headers=KEY.replace("chat.", "evil."))
        assert answer.status == 200 and ALLOWED not in answer.headers
        assert (
            ALLOWED not in (await r.ask(TEXT, text_body(), headers=KEY.split("\r\n", 1)[1])).headers
        )


async def test_without_allowed_origins_no_answer_has_such_headers(rig: Any) -> None:
    async with rig() as r:
        preflight = await r.ask(TEXT, method="OPTIONS", headers=PREFLIGHT)
        answer = await r.ask(TEXT, text_body(), headers=KEY)
    for one in (preflight, answer):
        assert not [name for name in one.headers if name.startswith("access-control")]


async def test_any_page(rig: Any) -> None:
    async with rig(allowed_origins=frozenset("*")) as r:
        preflight = await r.ask(TEXT, method="OPTIONS", headers=PREFLIGHT)
        models = await r.ask("/v1/models", method="GET", headers=f"origin: {PAGE}\r\n")
        missing = await r.ask("/v1/nothing", b"{}", headers=f"origin: {PAGE}\r\n")
    assert [one.headers[ALLOWED] for one in (preflight, models, missing)] == ["*"] * 3
    assert "vary" not in models.headers


async def test_names_of_headers_that_are_none_are_not_repeated(rig: Any) -> None:
    bad = PREFLIGHT.replace("authorization,content-type", "x: y; <b>")
    async with rig(allowed_origins=frozenset("*")) as r:
        preflight = await r.ask(TEXT, method="OPTIONS", headers=bad)
    assert preflight.status == 204 and "access-control-allow-headers" not in preflight.headers


@pytest.mark.parametrize(
    "origin", ["chat.example.org", f"{PAGE}/", f"{PAGE}/chat", "https://", "**"]
)
def test_what_is_no_origin_is_refused_with_a_remedy(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"scheme://host\[:port\]"):
        load({"allowed_origins": origin}, {})
    found = load({"allowed_origins": f"{PAGE},http://localhost:3000"}, {})
    assert found.allowed_origins == (PAGE, "http://localhost:3000")
