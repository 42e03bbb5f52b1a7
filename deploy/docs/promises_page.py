"""docs/testing/promises.md: promise, sentence, validator, mutation, scenarios, from the validators and the library.

The sentences and the scenarios that press a promise hardest stand here; what exists is read from the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deploy.docs.site import CHECKOUT
from relume.chaos.validators import CHECKS

VALIDATORS = "chaos/validators/promises"
MUTATIONS = "tests/validators/test_mutations.py"
LIBRARY = CHECKOUT / "chaos" / "scenario" / "library"


class Promise(NamedTuple):
    """`sentence`: what holds. `scenarios`: of the library, those that press it most."""

    sentence: str
    scenarios: tuple[str, ...]


PROMISES = {
    "I1": Promise(
        "Every accepted request has one terminal event, and it matches what its client saw.",
        ("calm", "gateway-killed", "clients-gone", "workers-refuse", "storm"),
    ),
    "I2": Promise(
        "Its token stream equals the fault-free one, where the engine passed its self-test; "
        "elsewhere the guarantee says less.",
        (
            "engine-killed-in-decode",
            "engine-killed-in-prefill",
            "cascade",
            "worker-cut-one-way",
            "requests-unusual",
            "frames-cut",
        ),
    ),
    "I3": Promise(
        "Delivered token indices are 0, 1, 2 and so on.",
        ("engine-killed-in-decode", "cascade", "frames-lost-or-repeated", "clients-return"),
    ),
    "I4": Promise(
        "At any time, one epoch of a request is live.",
        ("engine-stopped", "worker-cut-from-gateway"),
    ),
    "I5": Promise(
        "A fenced epoch appends nothing, and a stream has no gap.",
        ("agent-stopped", "two-leaders", "worker-cut-from-etcd", "replica-cut-from-etcd"),
    ),
    "I6": Promise("The hash chain holds across archive and etcd.", ("etcd-full", "disk-full")),
    "I7": Promise(
        "Replay gives identical decisions and an identical state hash.",
        ("storm", "links-slow", "worker-slow"),
    ),
    "I8": Promise(
        "Checkpoint bytes never exceed the budget; "
        "a holder is never in the primary's failure domain while another is up.",
        ("budget-shrinks", "domain-lost", "holder-killed"),
    ),
    "I9": Promise(
        "Nothing is sent to an open breaker, at most k requests to a half-open one, "
        "and cross-checks only to idle engines that count. "
        "Replicas that cannot reach a worker exclude it for all only if they are more than half.",
        (
            "wrong-answers",
            "engine-stopped",
            "half-cannot-reach",
            "wrong-weights",
            "wrong-weights-unseen",
            "reports-unreadable",
        ),
    ),
    "I10": Promise(
        "Recovery ends within its bound. Time in which its client is away does not count.",
        (
            "engine-stopped",
            "reload-fails",
            "cpu-limited",
            "holder-stopped",
            "worker-cut-from-holder",
            "wrong-silence",
        ),
    ),
    "I11": Promise(
        "Degradation is monotone in capacity, with hysteresis, and refuses what its level says.",
        ("capacity-staircase", "demand-flaps"),
    ),
    "I12": Promise(
        "After a drain no blocks, leases or streams are left.",
        ("clients-gone", "holder-killed", "disk-full"),
    ),
    "I13": Promise(
        "Every acknowledged append can be read, with the same hash.",
        (
            "etcd-leader-killed",
            "etcd-leader-isolated",
            "etcd-maintained",
            "etcd-away",
            "disk-slow",
            "clock-jumps",
            "spools-torn",
            "spools-corrupt",
            "etcd-clock-fast",
        ),
    ),
    "I14": Promise(
        "No bad block is used, and no token of a corrupt worker follows the verdict on it.",
        (
            "blocks-corrupt",
            "streams-of-blocks-disturbed",
            "engine-killed-in-restore",
            "primary-and-holder-killed",
            "wrong-weights",
            "wrong-weights-unseen",
            "wrong-files",
        ),
    ),
    "I15": Promise(
        "Every effect is applied at most once.", ("leader-killed-at-effect", "agent-killed")
    ),
    "I16": Promise(
        "Every admin change is in the log with its principal; a resent one changes nothing more, and one that "
        "waited for the log changes nothing.",
        ("two-leaders",),
    ),
    "I17": Promise(
        "No living owner is declared lost.",
        (
            "agent-stopped",
            "worker-cut-from-etcd",
            "etcd-away",
            "two-leaders",
            "watches-silent",
            "clocks-differ",
        ),
    ),
    "I18": Promise(
        "Nothing is dispatched to a worker that the decision's basis knows as drained, suspected or lost, "
        "and no request goes back at once to the engine that failed it; "
        "spares wait while others serve, and are promoted within a second.",
        (
            "leader-killed-at-effect",
            "engine-stopped",
            "domain-lost",
            "workers-refuse",
            "trusted-again",
            "unreadable-record",
            "segment-damaged",
            "agents-terminated-in-turn",
            "spare-promoted",
            "spare-dies-while-promoted",
        ),
    ),
    "I19": Promise(
        "An engine stops computing within a bound of its client's end.",
        ("clients-gone",),
    ),
    "I20": Promise(
        "No record, request or client ends a process it does not own, or keeps others' streams waiting beyond a bound.",
        (
            "unreadable-record",
            "segment-damaged",
            "stray-keys",
            "etcd-restored",
            "reports-unreadable",
            "requests-unusual",
            "clients-gone",
            "workers-refuse",
        ),
    ),
    "I21": Promise(
        "What the fold holds is what engines, state daemons, gateways and etcd have, "
        "and its sums and indexes hold.",
        ("storm", "disk-full", "blocks-corrupt", "clients-return"),
    ),
    "I22": Promise(
        "No request fails that a worker could have served within its wait, and no kept stream is refused.",
        (
            "clients-return",
            "workers-refuse",
            "wrong-answers",
            "reload-fails",
            "storm",
            "two-models",
        ),
    ),
    "I23": Promise(
        "No restore is planned from a holder that does not have the blocks.",
        ("engine-killed-in-decode", "holder-killed", "primary-and-holder-killed", "budget-shrinks"),
    ),
    "I24": Promise("Ties rotate: equal workers get equal shares.", ("calm",)),
    "I25": Promise(
        "What a client was told, of any outcome, is what the log says, and what its replica counted.",
        ("clients-return", "clients-gone", "workers-refuse", "requests-unusual", "storm"),
    ),
    "I26": Promise(
        "Time is not lost: a notice tells of a death and none of a death that was none is believed, held blocks "
        "are restored, lost holders are replaced, and tenants take turns, within bounds.",
        ("engine-killed-in-decode", "cascade", "holder-killed", "storm", "notices-absurd"),
    ),
    "I27": Promise(
        "A rolling restart takes one failure domain at a time, leaves workers open, "
        "and gives requests to new engines only after their canaries. "
        "A drain that is not forced leaves the minimum of open workers of its model.",
        ("rolling-restart", "all-drained"),
    ),
}


def validator_of(promise: str) -> str:
    """The module that checks it, by its name."""
    found = sorted((CHECKOUT / VALIDATORS).glob(f"*/{promise.lower()}_*.py"))
    return str(found[0].relative_to(CHECKOUT))


def mutations() -> dict[str, list[str]]:
    """Functions of the mutation test, by promise: `i2` and `i2_cut` are of I2."""
    tree = ast.parse((CHECKOUT / MUTATIONS).read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (name := re.match(r"i(\d+)(_|$)", node.name)):
            found.setdefault(f"I{name[1]}", []).append(node.name)
    return found


def library() -> set[str]:
    return {Path(path).stem for path in LIBRARY.glob("*.yaml")}


def rows() -> Iterator[str]:
    mutated = mutations()
    for name, promise in PROMISES.items():
        changed = ", ".join(f"`{function}`" for function in mutated.get(name, ())) or "-"
        scenarios = ", ".join(f"`{scenario}`" for scenario in promise.scenarios) or "-"
        yield f"| {name} | {promise.sentence} | `{validator_of(name)}` | {changed} | {scenarios} |"


def page() -> str:
    lines = [
        "# Promises",
        "",
        "<!-- Generated by `make docs` from chaos/validators/ and the scenario library; do not edit. -->",
        "",
        f"What must hold, who checks it, and how we know that the check can fail. {len(CHECKS)} promises have a",
        "validator, which judges every run, simulated or live, of every scenario. The last column names the scenarios",
        "that press a promise most.",
        f"A mutation (`{MUTATIONS}`) alters a good run so that this promise is broken and no other.",
        "",
        "| Promise | Sentence | Validator | Mutation | Scenarios |",
        "|---|---|---|---|---|",
        *rows(),
    ]
    return "\n".join(lines) + "\n"
