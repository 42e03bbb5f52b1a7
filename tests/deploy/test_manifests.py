"""Manifests, units and alerts say only what the programs understand."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from deploy.docs.monitoring.recorded_series import (  # noqa: E402
    QUANTILES,
    RECORDED,
    WORKER_HEALTH,
    quantile_series,
)
from relume.controlplane import serve_settings  # noqa: E402
from relume.controlplane.gateway.http import routes  # noqa: E402
from relume.controlplane.telemetry.metric_table import TABLE  # noqa: E402
from relume.controlplane.telemetry.state_families import COUNTED_HOW  # noqa: E402
from relume.engine_shim.agent import agent_config  # noqa: E402
from relume.engine_shim.agent.host_daemon.checkpoint_options import checkpoints_of  # noqa: E402
from relume.engine_shim.checkpoints import curve_keys  # noqa: E402
from relume.events.etcd.config import parse_url  # noqa: E402
from relume.events.vocabulary.enums import EnginePhase, HealthState, RequestOutcome  # noqa: E402

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
# As the pod would have them; the secret's files are put into place by the test.
FIELDS = {"POD_NAME": "relume-x-0", "POD_IP": "10.1.2.3", "NODE_NAME": "node-7"}
URL = "https://relume:secret@etcd-0.etcd:2379,etcd-1.etcd:2379/relume/v1?ca=/etc/relume/ca.crt"


def documents():
    for path in sorted((DEPLOY / "k8s").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def container(name: str) -> dict:
    found = [
        item
        for _, document in documents()
        if document["kind"] == "StatefulSet"
        for item in document["spec"]["template"]["spec"]["containers"]
        if item["name"] == name
    ]
    assert len(found) == 1
    return found[0]


def arguments(item: dict) -> list[str]:
    """The container's arguments as Kubernetes would expand them."""
    return [re.sub(r"\$\((\w+)\)", lambda m: FIELDS[m[1]], text) for text in item["args"]]


def environment(item: dict, secrets: Path) -> dict[str, str]:
    values = {}
    for variable in item["env"]:
        value = variable.get("value", FIELDS.get(variable["name"], URL))
        values[variable["name"]] = value.replace("/etc/relume", str(secrets))
    return values


def serve_flags(argv: list[str]) -> dict[str, str]:
    """`--flag=value` and `--flag value` by field; an unknown flag fails."""
    words = [part for text in argv for part in text.split("=", 1)]
    assert len(words) % 2 == 0, words
    flags = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        field = flag.removeprefix("--").replace("-", "_")
        assert flag.startswith("--") and field in serve_settings.SETTINGS, flag
        flags[field] = value
    return flags


def test_the_control_plane_accepts_its_manifest(tmp_path):
    (tmp_path / "api-keys").write_text("key")
    (tmp_path / "admin-tokens").write_text("token=admin:operator,other=viewer:prometheus\n")
    item = container("serve")
    assert item["command"] == ["relume", "serve"]
    config = serve_settings.load(serve_flags(arguments(item)), environment(item, tmp_path))
    assert serve_settings.etcd_config(config).endpoints == ("etcd-0.etcd:2379", "etcd-1.etcd:2379")
    ports = {port["name"]: port["containerPort"] for port in item["ports"]}
    assert ports == {"openai": config.port, "admin": config.admin_port}
    assert config.name == FIELDS["POD_NAME"]


def test_services_set_no_variables_of_pods():
    """One is named `relume`: its RELUME_PORT would be taken for the setting."""
    pods = [d["spec"]["template"]["spec"] for _, d in documents() if d["kind"] == "StatefulSet"]
    assert [pod["enableServiceLinks"] for pod in pods] == [False, False]


def test_the_agent_accepts_its_manifest(tmp_path):
    item = container("agent")
    assert item["command"] == ["relume", "worker"]
    config = agent_config.parse(arguments(item), environment(item, tmp_path))
    assert config.worker == FIELDS["POD_NAME"]
    assert config.engine_host == FIELDS["POD_IP"]
    assert config.log_config().endpoints == ("etcd-0.etcd:2379", "etcd-1.etcd:2379")
    assert f"127.0.0.1:{config.status_port}/health" in item["livenessProbe"]["exec"]["command"][2]
    assert f"127.0.0.1:{config.status_port}/ready" in item["readinessProbe"]["exec"]["command"][2]
    workers = [d for name, d in documents() if (name, d["kind"]) == ("worker.yaml", "StatefulSet")]
    assert workers[0]["spec"]["minReadySeconds"] >= item["readinessProbe"]["periodSeconds"]


def patched(document: dict, patches: list[dict]) -> dict:
    """The document after the JSON patches that name its kind; `add` alone is used."""
    for entry in patches:
        if entry["target"]["kind"] != document["kind"]:
            continue
        for step in yaml.safe_load(entry["patch"]):
            assert step["op"] == "add"
            place = document
            *parts, last = step["path"].strip("/").split("/")
            for part in parts:
                place = place[int(part)] if isinstance(place, list) else place[part]
            place.insert(len(place) if last == "-" else int(last), step["value"])
    return document


def test_the_checkpoint_component_fits_its_manifests_and_its_keys(tmp_path):
    text = (DEPLOY / "k8s/checkpoints/kustomization.yaml").read_text()
    patches = yaml.safe_load(text)["patches"]
    found = {(d["kind"], d["metadata"]["name"]): d for _, d in documents() if "metadata" in d}
    targets = {(p["target"]["kind"], p["target"]["name"]) for p in patches}
    assert targets <= set(found)
    worker = patched(found["StatefulSet", "relume-worker"], patches)["spec"]["template"]["spec"]
    (item,) = worker["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in item["volumeMounts"]}
    assert {"checkpoint-keys", "cold"} <= set(mounts) <= {"state", *(
        volume["name"] for volume in worker["volumes"]
    )}  # fmt: skip
    pods = {f"relume-x-{n}": f"relume-x-{n}.relume-worker:7100" for n in range(2)}
    curve_keys.write_keys(tmp_path / "keys", pods)
    places = {mounts["checkpoint-keys"]: tmp_path / "keys", mounts["cold"]: tmp_path}
    argv = arguments(item)
    for inside, outside in places.items():
        argv = [text.replace(inside, str(outside)) for text in argv]
    config = agent_config.parse(argv, environment(item, tmp_path))
    checkpoints = checkpoints_of(config)
    assert checkpoints.address == f"tcp://{pods[FIELDS['POD_NAME']]}"
    assert checkpoints.address in checkpoints.links["curve_servers"]
    port = checkpoints.daemon["remote"]["port"]
    policy = patched(found["NetworkPolicy", "relume-worker"], patches)
    assert {"port": port} in [
        p for rule in policy["spec"]["ingress"] for p in rule.get("ports", ())
    ]
    cold = next(v for v in worker["volumes"] if v["name"] == "cold")["emptyDir"]["sizeLimit"]
    assert config.checkpoint_file_mb < int(cold.removesuffix("Gi")) << 10


def test_what_is_kept_lies_on_the_mounted_disk():
    for name in ("serve", "agent"):
        item = container(name)
        mounts = {mount["name"]: mount["mountPath"] for mount in item["volumeMounts"]}
        kept = [text for text in item["args"] if text.startswith(("--run-dir=", "--spool-dir="))]
        assert kept and all(text.split("=")[1].startswith(mounts["state"]) for text in kept)


def test_the_example_secret_has_every_key_that_is_used():
    secret = next(d for name, d in documents() if name == "secret.example.yaml")
    assert {"etcd", "api-keys", "admin-tokens"} <= set(secret["stringData"])
    parse_url("http://" + secret["stringData"]["etcd"])
    kustomization = next(d for name, d in documents() if name == "kustomization.yaml")
    assert "secret.example.yaml" not in kustomization["resources"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_start_what_exists(path):
    text = path.read_text()
    command = shlex.split(re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1].replace("%i", "w0"))
    assert command[0] == "/opt/relume/bin/relume"
    for variable in re.findall(r"\bRELUME_\w+", text):
        settings = (
            serve_settings.SETTINGS
            if "control" in path.name
            else agent_config.AgentConfig.__struct_fields__
        )
        name = {"RELUME_ETCD_ENDPOINTS": "etcd"}.get(variable, variable[len("RELUME_") :].lower())
        assert name in settings, variable
    if command[1] == "serve":
        serve_flags(command[2:])
    else:
        assert command[1] == "worker"
        given = command[2 : command.index("--")]
        agent_config.parse([*given, "--model", "/m"], {})


def exported_metrics() -> set[str]:
    """Names the control plane's /metrics can have."""
    return {name for metric in TABLE.values() for name in metric.exported}


SERIES = r"(?<![\w:])(?:\w+:)?relume_\w+(?::\w+)?"
"""A metric in an expression, or a recorded series."""
RECORDED_LABELS = {
    series.name: set(series.name.partition(":")[0].split("_")) for series in RECORDED
}


def test_alerts_ask_for_metrics_that_exist():
    known = exported_metrics() | RECORDED_LABELS.keys()
    used = set()
    for rule in alert_rules():
        used |= set(re.findall(SERIES, rule["expr"]))
        assert rule["annotations"]["summary"] and rule["labels"]["severity"]
    assert used and used <= known, used - known


FROM_PROMETHEUS = {"instance", "job", "le"}
"""Labels that it adds, or that buckets of a histogram have."""
VALUES = {
    ("relume_requests_total", "outcome"): set(RequestOutcome),
    ("relume_worker_health", "state"): set(HealthState),
    ("relume_worker_engine_state", "state"): set(EnginePhase),
    ("relume_prompts_counted_total", "how"): set(COUNTED_HOW),
    (WORKER_HEALTH, "state"): set(HealthState),
    (quantile_series("longest_gap_seconds"), "quantile"): {str(one) for one in QUANTILES},
}


def alert_rules() -> list[dict]:
    """All of them."""
    groups = yaml.safe_load((DEPLOY / "prometheus/relume-rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_an_alert_names_labels_and_values_that_its_metrics_have(rule: dict):
    labels = {name: set(metric.labels) for metric in TABLE.values() for name in metric.exported}
    labels |= RECORDED_LABELS
    expr, summary = rule["expr"], rule["annotations"]["summary"]
    for metric, selected in re.findall(rf"({SERIES})\{{([^}}]*)\}}", expr):
        for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', selected):
            assert label in labels[metric] | FROM_PROMETHEUS, (metric, label)
            if label not in FROM_PROMETHEUS:
                assert set(value.split("|")) <= VALUES[metric, label], (metric, value)
    known = set().union(FROM_PROMETHEUS, *(labels[m] for m in re.findall(SERIES, expr)))
    grouped = {
        name
        for names in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expr)
        for name in re.split(r"\s*,\s*", names.strip())
    }
    assert grouped <= known, grouped - known
    has_sum = re.search(r"\b(?:sum|max|min|count|avg)\b", expr)
    given = grouped if has_sum else known  # what a result's series has
    assert set(re.findall(r"\$labels\.(\w+)", summary)) <= given


def test_both_distributions_have_one_version():
    """relume-chaos asks for the relume of its own version."""
    ours, chaos = (
        tomllib.loads((DEPLOY.parent / path).read_text())["project"]
        for path in ("pyproject.toml", "chaos/pyproject.toml")
    )
    assert chaos["version"] == ours["version"]
    assert chaos["dependencies"] == [f"relume[chaos]=={ours['version']}"]


# --- how long a replica has to stop

LEAVES_S = 5
"""Time a replica has to end what is left after its drain: streams, the last events, its lease."""


def pod_of(name: str) -> dict:
    """The pod that has this container."""
    pods = (d["spec"]["template"]["spec"] for _, d in documents() if d["kind"] == "StatefulSet")
    (found,) = [p for p in pods if any(item["name"] == name for item in p["containers"])]
    return found


def drain_of(flags: dict[str, str]) -> serve_settings.ServeConfig:
    given = {name: value for name, value in flags.items() if name.startswith("drain")}
    return serve_settings.load(given, {})


def test_a_pod_is_not_killed_before_its_drain_is_over():
    item, pod = container("serve"), pod_of("serve")
    config = drain_of(serve_flags(arguments(item)))
    assert pod["terminationGracePeriodSeconds"] == config.drain_s + LEAVES_S
    assert "lifecycle" not in item, "a preStop hook takes its time from the same period"


def agent_stop_s() -> float:
    """Time an agent has from SIGTERM to its end: the requests, the engine, and what is left."""
    config = agent_config.AgentConfig(worker="w0", run_dir="run", model="m")
    return config.drain_s + config.stop_timeout_s + LEAVES_S


def test_a_worker_is_not_killed_before_its_requests_have_left():
    item, pod = container("agent"), pod_of("agent")
    assert not [a for a in arguments(item) if "drain" in a or "timeout" in a], "the defaults hold"
    assert pod["terminationGracePeriodSeconds"] >= agent_stop_s()
    assert "lifecycle" not in item, "a preStop hook takes its time from the same period"
    (unit,) = [path for path in UNITS if path.name.startswith("relume-worker")]
    (wait_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
    assert int(wait_s) >= agent_stop_s()


def test_a_worker_is_started_when_it_is_ready():
    """As a pod is, so one worker after the other can be restarted."""
    item = container("agent")
    (port,) = [a.partition("=")[2] for a in arguments(item) if a.startswith("--status-port=")]
    assert f":{port}/ready" in item["readinessProbe"]["exec"]["command"][-1]
    (stateful,) = [
        d for _, d in documents()
        if d["kind"] == "StatefulSet" and d["metadata"]["name"] == "relume-worker"
    ]  # fmt: skip
    assert stateful["spec"]["minReadySeconds"] > 0


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_waits_until_a_process_is_ready(path):
    """It may take long: a model loads, a log is read, a lease lapses."""
    settings = re.findall(r"^(Type|TimeoutStartSec|NotifyAccess)=(.+)$", path.read_text(), re.M)
    assert settings == [("Type", "notify"), ("TimeoutStartSec", "infinity")]


def test_a_pod_accepts_connections_until_its_probe_has_failed():
    item = container("serve")
    config = drain_of(serve_flags(arguments(item)))
    probe = item["readinessProbe"]
    assert probe["httpGet"]["path"] == routes.READY and routes.READY in routes.OPEN
    noticed_s = probe["periodSeconds"] * probe["failureThreshold"] + probe.get("timeoutSeconds", 1)
    assert noticed_s < config.drain_announce_s < config.drain_s


def test_systemd_does_not_kill_a_replica_before_its_drain_is_over():
    (unit,) = [path for path in UNITS if path.name.startswith("relume-control")]
    lines = dict(
        line.split("=", 1) for line in unit.read_text().splitlines() if re.match(r"\w+=", line)
    )
    config = serve_settings.load({}, {})
    assert "drain" not in lines["ExecStart"], "the default holds"
    assert int(lines["TimeoutStopSec"]) == config.drain_s + LEAVES_S
    assert lines["KillMode"] == "mixed", "else its helper processes end before the drain"
