"""Who may do what, and where the API refuses to listen."""

from __future__ import annotations

import pytest

from relume.controlplane.admin.admin_server import AdminServer
from relume.controlplane.admin.errors import Forbidden, Unauthenticated
from relume.controlplane.admin.principals import Authenticator, Principal
from relume.controlplane.serve_settings import ServeConfig
from relume.events.settings.config_error import ConfigError
from tests.admin.scene import ADMIN, OPERATOR, VIEWER, Scene


async def test_each_role_may_do_its_own_and_what_is_below():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        change = {"key": "stall.factor", "value": 9}
        for token, read, drain, config in (
            ("", 401, 401, 401),
            ("nobody", 401, 401, 401),
            (VIEWER, 200, 403, 403),
            (OPERATOR, 200, 200, 403),
            (ADMIN, 200, 200, 200),
        ):
            assert (await scene.call("fleet", token=token))[0] == read
            assert (await scene.call("workers/w0/drain", "POST", token))[0] == drain
            assert (await scene.call("config", "PUT", token, json=change))[0] == config


async def test_errors_have_openai_shape():
    async with Scene() as scene:
        for path, method, status in (
            ("nothing", "GET", 404),
            ("fleet", "POST", 405),
            ("events?limit=x", "GET", 400),
            ("events?type=engin_died", "GET", 400),
            ("workers/w9/drain", "POST", 404),
        ):
            got, answer = await scene.call(path, method)
            assert got == status, path
            assert set(answer["error"]) == {"message", "type", "param", "code"}
        _, answer = await scene.call("events?type=engin_died")
        assert "engine_died" in answer["error"]["message"]
        got, answer = await scene.call("config", "PUT", data=b"x" * 100_000)
        assert got == 413 and answer["error"]["type"] == "invalid_request_error"


async def test_listening_beyond_loopback_needs_tokens():
    async with Scene() as scene:
        for host in ("0.0.0.0", "10.1.2.3", "example.org", "::"):
            with pytest.raises(ConfigError) as refused:
                AdminServer(scene.replica, ServeConfig(admin_host=host), scene.log)
            assert refused.value.field == "admin_host"


async def test_without_tokens_loopback_callers_are_local_and_web_pages_are_refused():
    async with Scene(admin_tokens={}) as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        status, answer = await scene.call("workers/w0/drain", "POST", token="")
        assert status == 200 and answer["principal"] == "local"
        rebound = {"Host": "evil.example:80"}
        assert (await scene.call("fleet", token="", headers=rebound))[0] == 403
        foreign = {"Origin": "https://evil.example"}
        assert (await scene.call("workers/w0/drain", "POST", "", headers=foreign))[0] == 403


def test_principals_are_named_or_fingerprinted():
    known = Authenticator({"secret-a": "operator:olga", "secret-b": "viewer"})
    assert known.principal("Bearer secret-a", "x") == Principal("olga", "operator")
    fingerprint = known.principal("bearer secret-b", "x")
    assert fingerprint.role == "viewer" and fingerprint.name.startswith("viewer-")
    assert "secret" not in fingerprint.name
    for wrong in ("", "Basic secret-a", "Bearer", "Bearer secret-ab", "Bearer secret-"):
        with pytest.raises(Unauthenticated):
            known.principal(wrong, "x")
    with pytest.raises(Forbidden):
        Authenticator({}).principal("", "evil.example")
    assert Authenticator({}).principal("", "[::1]:8001").name == "local"
    assert Authenticator({}).principal("", "127.0.0.1:8001").name == "local"
