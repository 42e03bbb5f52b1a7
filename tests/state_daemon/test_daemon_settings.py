"""Settings of the state daemon: refusals that say what to do."""

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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ttls": 1}, "ttls"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"budget_bytes": 0}, "budget_bytes"),
        ({"budget_share": 2}, "budget_share"),
        ({"remote": {"host": "h", "port": 1, "curve_secret": 7}}, "remote.curve_secret"),
    ],
)
def test_errors_name_the_setting_and_the_remedy(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        config.load(written(tmp_path / "daemon.json", **settings))
    assert says in refused.value.problem and "restart the agent" in refused.value.remedy


def test_keys_of_other_hosts_are_not_shown(tmp_path: Path) -> None:
    remote = {"host": "h", "port": "none", "curve_secret": "hush"}
    with pytest.raises(ConfigError) as refused:
        config.load(written(tmp_path / "daemon.json", remote=remote))
    assert "hush" not in str(refused.value)


def test_where_others_connect_comes_from_the_file(tmp_path: Path) -> None:
    remote = {"host": "10.0.0.1", "port": 7, "private_networks": ["10.0.0.0/8"]}
    found = config.load(written(tmp_path / "daemon.json", remote=remote)).remote
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
    keep_to(service, lambda: config.load(path))
    assert service.store.share == 0.5
    (tmp_path / "daemon.json").write_text("{")
    keep_to(service, lambda: config.load(path))
    assert service.store.share == 0.5
