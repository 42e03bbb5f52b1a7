"""Configuration: precedence, typed errors, and what is refused as unsafe."""

from __future__ import annotations

import argparse
import json

import pytest

from relume.controlplane.gateway.config import GatewayConfig, is_loopback
from relume.controlplane.replica.serve import _gateway_config, _replica_config
from relume.controlplane.serve_settings import (
    SETTINGS,
    ServeConfig,
    etcd_config,
    load,
    masked,
)
from relume.events.settings.config_error import ConfigError
from relume.events.settings.flags import add_flags
from relume.policies.migration.migration_settings import LIMITS, MigrationConfig, settings_of


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = tmp_path / "relume.yaml"
    file.write_text("port: 1001\nadmin_port: 1002\nname: filed\nlease_ttl_s: 7\n")
    environ = {"RELUME_PORT": "2001", "RELUME_ADMIN_PORT": "2002"}
    config = load({"port": "3001", "name": None}, environ, str(file))
    assert (config.port, config.admin_port, config.name) == (3001, 2002, "filed")
    assert (config.lease_ttl_s, config.host) == (7, "127.0.0.1")
    assert load({}, {"RELUME_CONFIG": str(file)}).name == "filed"


def test_limits_of_gateway_and_log_come_by_flag_environment_or_file(tmp_path):
    file = tmp_path / "relume.yaml"
    file.write_text("gateway_limits: {max_clients: 7, header_timeout_s: 0.5}\n")
    found = _gateway_config(load({}, {}, str(file)))
    assert (found.max_clients, found.header_timeout_s) == (7, 0.5)
    assert found.max_attempts == GatewayConfig().max_attempts
    environ = {"RELUME_GATEWAY_LIMITS": "max_clients=8", "RELUME_ETCD_LIMITS": "linger_ms=2.5"}
    config = load({}, environ, str(file))
    assert _gateway_config(config).max_clients == 8
    assert etcd_config(config).linger_ms == 2.5
    flags = {"gateway_limits": "max_clients=9", "etcd_limits": "silence_ms=900"}
    config = load(flags, environ, str(file))
    assert _gateway_config(config).max_clients == 9
    assert type(_gateway_config(config).max_clients) is int
    assert (etcd_config(config).silence_ms, etcd_config(config).linger_ms) == (900, 5.0)


def test_lists_mappings_json_and_secret_files(tmp_path):
    secret = tmp_path / "keys"
    secret.write_text("key-one\nkey-two\n")
    environ = {
        "RELUME_ETCD_ENDPOINTS": "a:1, b:2",
        "RELUME_ADMIN_TOKENS": json.dumps({"t,1": "admin"}),
        "RELUME_API_KEYS": f"@{secret}",
    }
    config = load({}, environ)
    assert config.etcd == ("a:1", "b:2")
    assert config.admin_tokens == {"t,1": "admin"}
    assert config.api_keys == ("key-one", "key-two")
    secret.write_text('{"t 1": "operator:olga"}\n')
    assert load({"admin_tokens": f"@{secret}"}, {}).admin_tokens == {"t 1": "operator:olga"}
    assert load({"admin_tokens": "x=viewer,y=admin:ada"}, {}).admin_tokens == {
        "x": "viewer",
        "y": "admin:ada",
    }


@pytest.mark.parametrize(
    ("flags", "field", "says"),
    [
        ({"port": "http"}, "port", "a whole number, 1 to 65535"),
        ({"port": "70000"}, "port", "1 to 65535"),
        ({"name": "a b"}, "name", "1 to 32 characters of A-Z a-z"),
        ({"policy": "leastload"}, "policy", "least_load"),
        ({"log_level": "loud"}, "log_level", "warning"),
        ({"migration_moves": "some"}, "migration_moves", "drain"),
        ({"migration_limits": "gap=1"}, "migration_limits", "gap 2 to"),
        ({"migration_limits": "haste=1"}, "migration_limits", "cool_ticks"),
        ({"migration_limits": "gap=many"}, "migration_limits", "whole numbers"),
        ({"gateway_limits": "max_client=1"}, "gateway_limits", "max_clients 1 to 1000000"),
        ({"gateway_limits": "max_clients=0"}, "gateway_limits", "out of bounds"),
        ({"gateway_limits": "max_clients=1.5"}, "gateway_limits", "out of bounds"),
        ({"etcd_limits": "keepalive_ms=100"}, "etcd_limits", "keepalive_ms 5000 to"),
        ({"prefix": "/x/"}, "prefix", "begins with /"),
        ({"stall_floor_ms": "9000"}, "stall_floor_ms", "lower --stall-floor-ms"),
        ({"tick_ms": "9000"}, "tick_ms", "lease_ttl_s"),
        ({"tick_ms": "999"}, "tick_ms", "8 ticks shorter than lease_ttl_s = 8"),
        ({"lease_ttl_s": "9"}, "tick_ms", "8 ticks shorter than lease_ttl_s = 9"),
        ({"admin_port": "8000"}, "admin_port", "choose another"),
        ({"admin_tokens": "t=root"}, "admin_tokens", "viewer"),
        ({"admin_tokens": "t"}, "admin_tokens", "KEY=VALUE"),
        ({"api_keys": "@/nowhere/keys"}, "api_keys", "readable"),
    ],
)
def test_errors_name_field_value_and_remedy(flags, field, says):
    with pytest.raises(ConfigError) as refused:
        load(flags, {})
    error = refused.value
    assert error.field == field and error.remedy and says in str(error)
    assert "\n" not in str(error)


def test_secrets_are_not_shown():
    with pytest.raises(ConfigError) as refused:
        load({}, {"RELUME_API_KEYS": '["hush", 3'})
    assert "hush" not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        load({"admin_tokens": '{"hush": 3}'}, {})
    assert "hush" not in str(refused.value)
    shown = masked(ServeConfig(api_keys=("hush",), admin_tokens={"hush": "admin"}))
    assert "hush" not in str(shown)


def test_a_misspelt_key_of_the_file_is_an_error(tmp_path):
    file = tmp_path / "relume.json"
    file.write_text('{"admin_prot": 1}')
    with pytest.raises(ConfigError, match="did you mean admin_port"):
        load({}, {}, str(file))
    for text in ("[1]", "{", ""):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load({}, {}, str(file))
    with pytest.raises(ConfigError, match="readable"):
        load({}, {}, str(tmp_path / "none.yaml"))


def test_listening_beyond_loopback_needs_credentials():
    for flags in ({"host": "0.0.0.0"}, {"admin_host": "::"}):
        with pytest.raises(ConfigError, match="without credentials"):
            load(flags, {})
    load({"host": "0.0.0.0", "api_keys": "k"}, {})
    load({"admin_host": "0.0.0.0", "admin_tokens": "t=admin"}, {})
    load({"admin_host": "0.0.0.0", "admin_port": "0"}, {})


def test_loopback_is_judged_by_address():
    for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "", "127.0.0.1.nip.io"):
        assert not is_loopback(host)


def test_help_has_every_setting_with_variable_and_default():
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, ServeConfig)
    text = " ".join(parser.format_help().split())
    for field in SETTINGS:
        assert f"--{field.replace('_', '-')}" in text
    assert "RELUME_ETCD_ENDPOINTS; default 127.0.0.1:2379" in text
    assert "RELUME_LEASE_TTL_S; default 8" in text


def test_etcd_is_set_by_endpoints_or_by_one_url():
    config = etcd_config(ServeConfig(etcd=("a:1", "b:2"), lease_ttl_s=5, spool_dir="/s"))
    assert config.endpoints == ("a:1", "b:2") and config.lease_ttl_s == 5
    assert config.spool_dir == "/s/r0"
    by_url = etcd_config(ServeConfig(etcd=("https://u:p@a:1?ca=/ca.pem",)))
    assert by_url.tls.ca == "/ca.pem" and by_url.user == "u"
    with pytest.raises(ConfigError):
        etcd_config(ServeConfig(etcd=("ftp://u:secret@a:1",)))


def test_migration_settings_reach_what_a_replica_records():
    asked = {"migration_moves": "all", "migration_limits": "gap=6,pause_ms=900"}
    told = dict(settings_of(_replica_config(load(asked, {})).migration))
    assert told["migration.moves"] == "all" and told["migration.gap"] == "6"
    assert told["migration.pause_ms"] == "900" and told["migration.ticks"] == "5"
    assert _replica_config(load({}, {})).migration == MigrationConfig()
    parser = argparse.ArgumentParser()
    add_flags(parser, ServeConfig)
    text = parser.format_help()
    assert "--migration-moves" in text and all(name in text for name in LIMITS)
