"""Each alert has a section in the documentation, to which its `runbook_url` points."""

from __future__ import annotations

import re
from pathlib import Path

import markdown
import pytest
import yaml

from deploy.docs.monitoring import alerts_page, prometheus_rules
from deploy.docs.monitoring.alert_table import ALERTS, SEVERITIES, Alert
from relume.controlplane.cli.relume_command import COMMANDS
from relume.events import vocabulary

ROOT = Path(__file__).resolve().parents[2]
RULES = yaml.safe_load((ROOT / "deploy/prometheus/relume-rules.yaml").read_text())
FIRED = {rule["alert"]: rule for of in RULES["groups"] for rule in of["rules"] if "alert" in rule}
PARTS = ("Meaning", "What users see", "Look at", "Do")
TAGS = {kind.__struct_config__.tag.partition("/")[0] for kind in vocabulary.AnyEvent.__args__}
"""Types of events, as `relume events --type` names them."""


def anchors(path: Path) -> set[str]:
    """The anchors of a page, as the site's generator makes them from its headings."""
    made = markdown.Markdown(extensions=["toc"]).convert(path.read_text(encoding="utf-8"))
    return set(re.findall(r'<h\d id="([^"]+)"', made))


def test_the_rules_are_those_of_the_table() -> None:
    names = [rule["alert"] for of in RULES["groups"] for rule in of["rules"] if "alert" in rule]
    assert names == [alert.name for alert in ALERTS] and len(set(names)) == len(names)
    for alert in ALERTS:
        rule = FIRED[alert.name]
        assert rule["expr"] == alert.expr and rule.get("for", "") == alert.lasting
        assert rule["labels"] == {"severity": alert.severity} and alert.severity in SEVERITIES
        assert rule["annotations"]["summary"] == alert.summary
        assert rule["annotations"]["description"] == alert.meaning


def test_each_alert_links_to_its_section() -> None:
    """Both in the repository, where the link is a path, and on the site."""
    page = ROOT / prometheus_rules.ALERTS_PAGE
    known = anchors(page)
    for name, rule in FIRED.items():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / path == page and anchor == name.lower() and anchor in known, name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_section_says_what_to_look_at_and_what_to_do(alert: Alert) -> None:
    text = alerts_page.page().partition(f"\n## {alert.name}\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.+?)\.\*\* \S", text, re.MULTILINE) == [*PARTS]
    assert alert.expr in text
    commands = re.findall(r"`relume ([a-z-]+)", alert.look)
    assert commands and set(commands) <= COMMANDS.keys(), "a command shows more of each"
    types = re.findall(r"--type ([a-z_,]+)", text)
    assert {tag for names in types for tag in names.split(",")} <= TAGS


def test_the_links_of_sections_resolve() -> None:
    page = ROOT / prometheus_rules.ALERTS_PAGE
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    assert links
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), path
        assert not anchor or anchor in anchors(target), (path, anchor)


def test_the_command_of_the_head_makes_every_link_an_address() -> None:
    text = (ROOT / "deploy/prometheus/relume-rules.yaml").read_text()
    command = re.search(r"sed -i 's#(.+?)#(.+?)#' relume-rules.yaml", text)
    assert command is not None
    body = text.partition("\ngroups:")[2].replace(command[1], command[2])
    urls = re.findall(r"runbook_url: (\S+)", body)
    base = command[2].removeprefix("runbook_url: ")
    assert len(urls) == len(ALERTS) and all(url.startswith(base) for url in urls)
