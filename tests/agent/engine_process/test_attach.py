"""`relume attach`: from the URL of a server to the agent of a plain worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from relume.controlplane.cli import relume_command
from relume.controlplane.cli.admin_client import CliError
from relume.controlplane.local.attach import worker_arguments
from relume.engine_shim.agent.agent_config import parse


class Server:
    """Answers GET /v1/models with `body`, or with 401 if `key` is set and the request lacks it."""

    def __init__(self) -> None:
        self.body: bytes = b""
        self.key = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path == "/v1/models"
                is_allowed = self.headers.get("authorization", "") in ("", f"Bearer {outer.key}")
                has_key = not outer.key or self.headers.get("authorization") is not None
                self.send_response(404 if not is_known else 200 if is_allowed and has_key else 401)
                self.end_headers()
                self.wfile.write(outer.body)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def serves(self, *names: str, adapters: tuple[str, ...] = ()) -> None:
        models = [{"id": name, "parent": None} for name in names]
        models += [{"id": name, "parent": names[0]} for name in adapters]
        self.body = json.dumps({"data": models}).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    made.serves("qwen3")
    thread = threading.Thread(target=made.http.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def test_the_agent_takes_what_it_gets(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELUME_ETCD_ENDPOINTS", raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "fleet.json").write_text(json.dumps({"etcd": ["127.0.0.1:4444"]}))
    state = ["--state-dir", str(tmp_path)]
    found = parse(worker_arguments([server.url + "/v1/", *state, "--lease-ttl-s", "4"]), {})
    assert (found.host_kind, found.backend, found.model) == ("plain", server.url, "qwen3")
    assert found.worker == server.url.removeprefix("http://").replace(":", "-")
    assert Path(found.run_dir) == tmp_path / "attached" / found.worker
    assert (found.etcd, found.lease_ttl_s) == ("127.0.0.1:4444", 4), "of the fleet that runs here"
    given = worker_arguments([server.url, *state, "--etcd=h:1", "--worker", "p0", "--run-dir", "d"])
    found = parse(given, {})
    assert (found.etcd, found.worker, found.run_dir) == ("h:1", "p0", "d")


def test_the_model_is_asked_for_if_there_are_several(server: Server, tmp_path: Path) -> None:
    state = ["--state-dir", str(tmp_path)]
    server.serves("qwen3", adapters=("poems",))
    assert "qwen3" in worker_arguments([server.url, *state])
    server.serves("a", "b")
    with pytest.raises(CliError, match=r"serves a, b; choose one with --model"):
        worker_arguments([server.url, *state])
    assert "b" in worker_arguments([server.url, *state, "--model", "b"])


def test_a_server_with_a_key(server: Server, tmp_path: Path) -> None:
    server.key = "secret"
    (tmp_path / "key").write_text("secret\n")
    with pytest.raises(CliError, match="answers 401; give --backend-key-file"):
        worker_arguments([server.url, "--state-dir", str(tmp_path)])
    key = ["--backend-key-file", str(tmp_path / "key")]
    found = parse(worker_arguments([server.url, "--state-dir", str(tmp_path), *key]), {})
    assert found.backend_key_file == key[1]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": 3}', b'{"data": [3]}', b'{"data": [{}]}'])
def test_what_is_no_openai_server(
    server: Server, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    server.body = body
    assert relume_command.main(["attach", server.url]) == 1
    assert "gives no list of models; is it the base URL?" in capsys.readouterr().err


def test_no_server_and_no_url(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    assert relume_command.main(["attach", "10.0.0.7:8000"]) == 2
    assert "give one like http://" in capsys.readouterr().err
    assert relume_command.main(["attach", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert relume_command.main(["attach", server.url + "/openai"]) == 1
    assert "answers 404; is it the base URL?" in capsys.readouterr().err
