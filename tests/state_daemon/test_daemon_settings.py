"""Settings of the state daemon: one precedence, refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relume.engine_shim.checkpoints.daemon import config
from relume.engine_shim.checkpoints.daemon.__main__ import keep_to
from relume.events.settings.config_error import ConfigError

NEEDED = {"host": "w0", "socket": "/tmp/s", "budget_bytes": 1 << 20}


def written(path: Path, **settings: Any) -> str:
    path.write_text(json.dumps({**NEEDED, **settings}))
    return str(path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path / "daemon.json", ttl_s=20, cold_after_s=3, abandoned_s=9)
    environ = {"RELUME_STATE_TTL_S": "30", "RELUME_STATE_COLD_AFTER_S": "4", "RELUME_HOST": "x"}
    found = config.load({"ttl_s": "40"}, environ, path)
    assert (found.ttl_s, found.cold_after_s, found.abandoned_s) == (40.0, 4.0, 9.0)
    assert (found.host, found.max_blocks) == ("w0", 1 << 20)


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"ttls": 1}, "config", "did you mean ttl_s"),
        ({"ttl_s": -1}, "ttl_s", "at least 0 s"),
        ({"budget_bytes": 0}, "budget_bytes", "--budget-fraction"),
        ({"budget_fraction": 1}, "budget_fraction", "a number"),
        ({"file_directory": "/tmp"}, "file_directory", "--file-budget-bytes"),
        ({"socket": ""}, "socket", "--socket"),
        ({"remote": {"host": "h", "port": 1, "curve_secret": 7}}, "remote", "host, port"),
    ],
)
def test_errors_name_the_setting_and_the_remedy(
    tmp_path: Path, settings: dict[str, Any], field: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load({}, {}, written(tmp_path / "daemon.json", **settings))
    assert refused.value.field == field and says in str(refused.value)


def test_keys_of_other_hosts_are_not_shown(tmp_path: Path) -> None:
    remote = {"host": "h", "port": "none", "curve_secret": "hush"}
    with pytest.raises(ConfigError) as refused:
        config.load({}, {}, written(tmp_path / "daemon.json", remote=remote))
    assert "hush" not in str(refused.value)


def test_where_others_connect_comes_from_the_file(tmp_path: Path) -> None:
    remote = {"host": "10.0.0.1", "port": 7, "private_networks": ["10.0.0.0/8"]}
    found = config.load({}, {}, written(tmp_path / "daemon.json", remote=remote)).remote
    assert found is not None
    assert (found.port, found.private_networks) == (7, ("10.0.0.0/8",))


class Store:
    share = 1.0

    def keep_to(self, share: float) -> None:
        self.share = share


class Holding:
    def __init__(self) -> None:
        self.store = Store()


def test_settings_that_cannot_be_read_again_change_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "daemon.json", budget_share=0.5)
    service: Any = Holding()
    keep_to(service, lambda: config.load({}, {}, path))
    assert service.store.share == 0.5
    (tmp_path / "daemon.json").write_text("{")
    keep_to(service, lambda: config.load({}, {}, path))
    assert service.store.share == 0.5
