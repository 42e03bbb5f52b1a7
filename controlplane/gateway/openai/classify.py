"""The resume guarantee of a request (`Guarantee`), from its fields alone: how it survives a cut.

A request `needs` features of an engine to be continued (penalties, a seeded generator, a
grammar, log probabilities, parsers, several choices); the self-test of the engines shows whether
they have these (`relume.policies.recovery.resume_mode.grounded`), and `fallback` is the guarantee without them.

A field that the table of its API (`request_fields`) does not have may hold unknown state, so it counts
as `state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from relume.controlplane.gateway.openai.request_fields import (
    CHOICES,
    LOGPROBS,
    OPENAI,
    PARSERS,
    SEARCH,
    SEEDED,
    STATE,
    STRUCTURED,
    Effect,
    always_state,
)
from relume.events.vocabulary.enums import Guarantee
from relume.policies.recovery.resume_mode import UNCOMPARED


class Classification(NamedTuple):
    """`reason`: why the guarantee is not better; empty for `exact`."""

    verdict: Guarantee
    reason: str = ""
    needs: tuple[str, ...] = ()
    fallback: Guarantee = Guarantee.NONE


def classify(body: Mapping[str, Any], fields: Mapping[str, Effect] = OPENAI) -> Classification:
    """Judge a decoded body, whose `fields` are those of its API.

    `body` has `prompt` and `messages` in the form of `body.Prompts`: a number of
    prompts under "prompts" and a flag "multimodal"; both may be absent.
    """
    needs: dict[str, str] = {}  # feature: the field that needs it
    stateful = "multimodal input" if body.get("multimodal") else ""
    if body.get("prompts", 1) != 1:
        needs[CHOICES] = "several prompts"
    if tools := _tools(body):
        needs[PARSERS] = tools
        if tools == "tool_choice":  # forced by a grammar
            needs[STRUCTURED] = tools
    for name, value in body.items():
        if value is None or name in ("prompts", "multimodal"):
            continue
        effect = fields.get(name, always_state)(value)
        if effect == SEARCH:
            return Classification(Guarantee.RESTART, f"{name}={value!r:.20}")
        if effect == STATE:
            stateful = stateful or (name if name in fields else f"unknown field {name!r:.40}")
        elif effect:
            needs.setdefault(effect, name)
    if body.get("echo") and LOGPROBS in needs:
        stateful = stateful or "log probabilities of the prompt"
    return _judged(body, needs, stateful)


def _judged(body: Mapping[str, Any], needs: dict[str, str], stateful: str) -> Classification:
    temperature, seed = body.get("temperature"), body.get("seed")
    deterministic = temperature == 0 or seed is not None
    if deterministic and temperature != 0:
        needs[SEEDED] = "seeded sampling"
    # What has several outputs, or is shown by a parser, is not compared in a replay.
    again = Guarantee.REPLAY if deterministic and not UNCOMPARED & set(needs) else Guarantee.RESTART
    sampled = "temperature not set" if temperature is None else "unseeded sampling"
    if stateful:
        if again == Guarantee.RESTART:
            beside = needs.get(CHOICES) or needs.get(PARSERS) or sampled
            return Classification(Guarantee.RESTART, f"{beside} with {stateful}")
        return Classification(Guarantee.REPLAY, stateful)
    if deterministic:
        return Classification(Guarantee.EXACT, "", tuple(needs), again if needs else Guarantee.NONE)
    return Classification(
        Guarantee.SAMPLED, sampled, tuple(needs), Guarantee.RESTART if needs else Guarantee.NONE
    )


def _tools(body: Mapping[str, Any]) -> str:
    """Why tool parsing may run, or empty."""
    choice = body.get("tool_choice")
    if choice == "none":
        return ""
    if choice not in (None, "auto"):
        return "tool_choice"
    if body.get("tools"):
        return "tools"
    return "functions" if body.get("functions") or body.get("function_call") else ""
