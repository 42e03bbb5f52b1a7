"""The commands against a live admin server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys

import pytest

from relume.controlplane.cli import fleet_commands
from relume.controlplane.cli.relume_command import COMMANDS, main
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from tests.admin.scene import ADMIN, Scene


async def test_everything_that_lists_prints_json(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.serve_request("req-1")
        code, out, _ = await relume(scene, "workers", "--json")
        (worker,) = json.loads(out)["workers"]
        assert code == 0 and (worker["agent_pid"], worker["engine_pid"]) == (4000, 5000)
        for command, key in (
            ("status", "workers"), ("requests", "requests"), ("leader", "leader"),
        ):  # fmt: skip
            code, out, _ = await relume(scene, command, "--json")
            assert code == 0 and json.loads(out)[key]
        code, out, _ = await relume(scene, "config", "get", "--json")
        assert code == 0 and json.loads(out)["settings"]
        code, out, _ = await relume(scene, "events", "--json", "--since", "1")
        kinds = [json.loads(line)["event"]["type"] for line in out.splitlines()]
        assert code == 0 and "route_decided" in kinds and "tick" not in kinds
        code, out, _ = await relume(scene, "requests", "req-1")
        assert code == 0 and json.loads(out)["request"]["state"] == "completed"


async def test_tables_are_for_people(relume):
    async with Scene() as scene:
        writer = await scene.worker("w0")
        await scene.serve_request("req-1")
        writer.append(v.EngineDied("w0", 1, "killed"))
        await scene.until(lambda: scene.replica.fleet.workers["w0"].deaths)
        _, out, _ = await relume(scene, "status")
        assert "died: killed" in out and "NO: no worker" in out and "leader" in out
        _, out, _ = await relume(scene, "requests")
        assert "req-1" in out and "completed" in out and "12 ms" in out
        _, out, _ = await relume(scene, "events", "--request", "req-1")
        assert out.count("\n") == 3 and "basis=(" in out


async def test_workers_shows_where_the_weights_of_engines_came_from(relume):
    async with Scene() as scene:
        writer = await scene.worker("w0")
        _, out, _ = await relume(scene, "workers")
        assert "WEIGHTS" not in out, "no worker leaves them in a pool"
        writer.append(
            v.WeightsLoading(worker="w0", incarnation=1, bytes=4 << 30, read_bytes=1 << 30)
        )
        await scene.until(lambda: scene.replica.fleet.workers["w0"].loaded)
        _, out, _ = await relume(scene, "workers")
        assert "loading: 1024 of 4096 MiB read (25 %)" in out
        loaded = v.WeightsLoaded(
            worker="w0", incarnation=1, ranks=1, bytes=3 << 30, read_bytes=1 << 30, took_ms=1200
        )
        late = v.WeightsLoading(worker="w0", incarnation=1, bytes=4 << 30, read_bytes=2 << 30)
        writer.append(loaded, late)
        await scene.until(lambda: scene.replica.fleet.workers["w0"].loaded.took_ms > 0)
        _, out, _ = await relume(scene, "workers")
        assert "WEIGHTS" in out and "3072 MiB in 1200 ms, 1024 MiB read" in out


async def test_requests_are_narrowed_and_come_in_pages(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        for name in ("a-1", "b-2", "a-3"):
            await scene.serve_request(name)
        _, out, _ = await relume(scene, "requests", "--limit", "2")
        assert "a-1 " not in out and "mine-b-2" in out
        assert out.endswith("older ones: relume requests --before b-2\n")
        _, out, _ = await relume(scene, "requests", "--before", "b-2")
        assert "mine-a-1" in out and "b-2" not in out and "older" not in out
        _, out, _ = await relume(scene, "requests", "--search", "a-", "--model", "other")
        assert out == "no such request\n"
        code, _, error = await relume(scene, "requests", "--before", "gone")
        assert code == 4 and "no request 'gone'" in error


def test_the_version_names_the_feature_level(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"relume \S+, feature level \d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_their_options(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "relume" in script and "--before" in script and "disable-restart" in script
    if shell == "bash":
        query = "COMP_WORDS=(relume inc); COMP_CWORD=1; _shtab_relume; echo ${COMPREPLY[*]}"
        done = subprocess.run(["bash", "-c", f"{script}\n{query}"], capture_output=True, text=True)
        assert done.stdout.strip() == "incidents", done.stderr


@pytest.mark.parametrize(
    ("disable", "enable"), [("disable-restart", "enable-restart"), ("hold", "release")]
)
async def test_restart_is_disabled_and_enabled_also_by_the_former_names(relume, disable, enable):
    async with Scene() as scene:
        await scene.worker("w0")
        code, out, _ = await relume(scene, disable, "w0")
        assert code == 0 and "decided at revision" in out
        assert scene.replica.fleet.workers["w0"].held
        code, _, _ = await relume(scene, enable, "w0")
        assert code == 0 and not scene.replica.fleet.workers["w0"].held


async def restart(relume, scene, outcome: str, *more: str):
    """`relume restart w0`, with what its agent answers."""
    writer = scene.worker_writers["w0"]
    restarting = asyncio.create_task(relume(scene, "restart", "w0", *more))
    await scene.until(
        lambda: any(
            p.effect.kind == "restart" for p in scene.replica.fleet.pending_effects.values()
        )
    )
    (pending,) = scene.replica.fleet.pending_effects.values()
    writer.append(v.EffectApplied(pending.decision, pending.index, outcome))
    return await restarting


async def test_restart_says_what_the_agent_answered_and_how_to_enable_it(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        code, out, _ = await restart(relume, scene, "applied")
        assert code == 0 and "decided at revision" in out and "not answered" not in out
        code, out, _ = await restart(relume, scene, "applied", "--json")
        assert code == 0 and json.loads(out)["outcome"] == "applied"
        await relume(scene, "disable-restart", "w0")
        scene.replica.fleet.pending_effects.clear()
        code, out, err = await restart(relume, scene, "refused: the worker is held")
        assert code == 4 and not out and err.count("\n") == 1
        assert "agent of w0 refused" in err and "`relume enable-restart w0`" in err


async def test_restart_says_when_the_agent_does_not_answer(relume, monkeypatch):
    monkeypatch.setattr(fleet_commands, "ANSWER_S", 0.3)
    async with Scene() as scene:
        await scene.worker("w0")
        code, out, _ = await relume(scene, "restart", "w0")
        assert code == 0 and "w0: its agent has not answered yet" in out


async def test_who_is_not_quarantined_cannot_be_trusted(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        code, _, err = await relume(scene, "trust", "w0")
        assert code == 4 and "w0 is not quarantined, it is healthy" in err


async def test_a_change_is_printed_with_its_revision(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        code, out, _ = await relume(scene, "drain", "w0")
        assert code == 0 and "decided at revision" in out
        assert scene.replica.fleet.workers["w0"].draining
        code, out, _ = await relume(scene, "drain", "w0", "--wait", "20")
        assert code == 0 and "w0 is empty" in out
        code, _, err = await relume(scene, "drain", "w7")
        assert code == 4 and "no worker 'w7'" in err and err.count("\n") == 1
        code, out, _ = await relume(scene, "config", "set", "stall.factor", "9")
        assert code == 0 and scene.replica.fleet.config["stall.factor"] == "9"
        code, _, err = await relume(scene, "config", "set", "stall.factr", "9")
        assert code == 4 and "stall.factor" in err


async def test_drain_waits_for_what_is_left_and_no_longer_than_told(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        scheduler = scene.replica.scheduler
        scheduler.arrived(
            Arrival(
                request="req-1",
                model="tiny",
                route="completions",
                stream=True,
                prompt_tokens=5,
                max_tokens=16,
                verdict="exact",
            )
        )
        assert scheduler.assign("req-1", "arrival", 0) is not None
        code, out, _ = await relume(scene, "drain", "w0", "--force", "--wait", "0.2")
        assert code == 1 and "1 requests run there" in out and "not empty after 0.2 s" in out
        waiting = asyncio.create_task(relume(scene, "drain", "w0", "--wait", "30"))
        scheduler.ended("req-1", "completed", 200, 7, "length")
        code, out, _ = await waiting
        assert code == 0 and out.endswith("w0 is empty\n")


async def test_a_drain_of_the_last_open_worker_is_refused_unless_it_is_forced(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        code, _, err = await relume(scene, "drain", "w0")
        assert code == 4 and err.count("\n") == 1
        assert "0 of model tiny would be open" in err and "--force" in err
        assert not scene.replica.fleet.workers["w0"].draining
        code, out, _ = await relume(scene, "drain", "w0", "--force")
        assert code == 0 and "decided at revision" in out
        assert scene.replica.fleet.workers["w0"].draining


async def test_workers_say_why_one_drains_and_until_when(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        given = ("--reason", "new driver", "--deadline", "60")
        code, _, _ = await relume(scene, "drain", "w0", *given)
        assert code == 0
        _, out, _ = await relume(scene, "workers")
        assert "drained by ada: new driver; deadline in " in out and "drained by" in out
        _, out, _ = await relume(scene, "events", "--type", "admin_commanded")
        assert "reason=new driver deadline_ticks=300" in out
        _, out, _ = await relume(scene, "workers", "--json")
        (w0, w1) = json.loads(out)["workers"]
        assert 200 < w0["drain_ticks_left"] <= 300 and w1["drain_ticks_left"] == -1
        assert (w0["drain_reason"], w0["drained_by"], w1["drained_by"]) == ("new driver", "ada", "")
        await relume(scene, "undrain", "w0")
        _, out, _ = await relume(scene, "workers")
        assert "new driver" not in out


async def told_until(writer, heard: asyncio.Future):
    """Let the engine die, again and again, until a follower that has begun hears of it."""
    async with asyncio.timeout(20):
        while not heard.done():
            writer.append(v.EngineDied("w0", 1, "killed"))
            await asyncio.wait({heard}, timeout=0.2)
    return heard.result()


async def test_follow_prints_what_happens(relume):
    async with Scene() as scene:
        writer = await scene.worker("w0")
        argv = [
            sys.executable,
            "-m",
            "relume.controlplane.cli.relume_command",
            "events",
            "--follow",
            "--json",
        ]
        argv += ["--type", "engine_died", "--admin", scene.admin.url]
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "RELUME_ADMIN_TOKEN": ADMIN},
        )
        try:
            line = await told_until(writer, asyncio.create_task(child.stdout.readline()))
            assert json.loads(line)["event"]["reason"] == "killed"
            child.send_signal(2)
            async with asyncio.timeout(5):
                assert await child.wait() == 130
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


async def test_a_wrong_token_says_what_to_set(relume, monkeypatch):
    async with Scene() as scene:
        monkeypatch.setenv("RELUME_ADMIN_TOKEN", "wrong")
        code, _, err = await relume(scene, "status")
        assert code == 4 and "RELUME_ADMIN_TOKEN" in err


async def test_the_fleet_file_leads_to_the_replica_that_lives(relume, monkeypatch, tmp_path):
    monkeypatch.delenv("RELUME_ADMIN_TOKEN")
    async with Scene() as scene:
        run = tmp_path / "run"
        run.mkdir()
        dead = "http://127.0.0.1:1"
        (run / "fleet.json").write_text(
            json.dumps({"admins": [dead, scene.admin.url], "admin_token": ADMIN})
        )
        code, out, _ = await relume(None, "leader", "--json", "--state-dir", str(tmp_path))
        assert code == 0 and json.loads(out)["leader"] == "r0"
        code, _, err = await relume(
            None, "leader", "--state-dir", str(tmp_path), "--admin", scene.admin.url + "/"
        )
        assert code == 0, err
        (run / "fleet.json").write_text(json.dumps({"admins": [dead], "admin_token": ADMIN}))
        code, _, _ = await relume(
            None, "leader", "--state-dir", str(tmp_path), "--admin", scene.admin.url
        )
        assert code == 4  # the file's token is not sent to an address it does not name


async def test_nothing_running_is_one_line_with_the_remedy(relume, tmp_path):
    code, _, err = await relume(None, "status", "--state-dir", str(tmp_path))
    assert code == 3 and "relume up" in err and err.count("\n") == 1
    code, _, err = await relume(None, "status", "--admin", "http://127.0.0.1:1")
    assert code == 3 and "--admin" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("worker", "demo")])
def test_every_command_explains_itself_with_examples(command, capsys):
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0 and "examples:" in out and f"relume {command}" in out


def test_help_is_fast_and_imports_no_server():
    code = "import sys; from relume.controlplane.cli.relume_command import main\n"
    code += "try: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({m.split('.')[0] for m in sys.modules} & {'aiohttp','grpc','msgspec'}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert out.stdout.rstrip().endswith("[]"), out.stdout[-200:] + out.stderr


@pytest.mark.full
async def test_follow_continues_at_the_remaining_replica(relume, tmp_path, monkeypatch):
    from relume.controlplane.cli.admin_client import AdminClient

    async with Scene(name="r1", lead=False) as first:
        writer = await first.worker("w0")
        async with Scene(first.log, name="r2", lead=False) as second:
            client = AdminClient([second.admin.url, first.admin.url], ADMIN)
            following = client.follow("events", type="engine_died,engine_started")
            step = asyncio.create_task(asyncio.to_thread(next, following))
            assert (await told_until(writer, step))["event"]["type"] == "engine_died"
        writer.append(v.EngineStarted("w0", 2, 5001, 2))
        async with asyncio.timeout(20):
            kind = "engine_died"
            while kind == "engine_died":  # more than one may have been told above
                kind = (await asyncio.to_thread(next, following))["event"]["type"]
        assert kind == "engine_started"


def test_a_taken_port_is_one_line_with_the_remedy(monkeypatch, capsys):
    def taken(config):
        raise OSError(98, "Address already in use")

    monkeypatch.setattr("relume.controlplane.replica.serve.main", taken)
    monkeypatch.setattr("relume.controlplane.telemetry.logs.setup_logging", lambda *a: None)
    assert main(["serve"]) == 2
    err = capsys.readouterr().err
    assert "--admin-port" in err and err.count("\n") == 1
    assert main(["serve", "--host", "0.0.0.0"]) == 2
    assert "api_keys" in capsys.readouterr().err


def test_up_hands_the_routing_policy_to_its_replicas() -> None:
    from relume.controlplane.local import up

    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    told = up.options_of(parser.parse_args(["--policy", "jsq", "--no-checkpoints"]))
    assert dict(zip(told.replica_args[::2], told.replica_args[1::2], strict=True)) == {
        "--policy": "jsq", "--migration-moves": "drain"
    }  # fmt: skip
    assert told.checkpoint_mb == 0
    usual = up.options_of(parser.parse_args([]))
    assert usual.replica_args[:2] == ("--policy", "predicted_ttft")


async def test_degradation_says_why_each_level_was_decided(relume):
    async with Scene(lead=False) as scene:
        code, out, _ = await relume(scene, "degradation")
        assert code == 0 and "off: set --degradation" in out
        await scene.worker("w0")
        async with scene.log.writer("fleet") as leader:
            leader.append(
                v.ConfigChanged("degradation.mode", "on"),
                v.LeaderElected("r0", scene.replica.boot),
                v.DegradationDecided(
                    model="tiny", level=2, was=0, since=0, due_ticks=3, share=600, workers=1,
                    wanted=2, sequences=9, requests_per_ks=2000, tokens_per_s=400,
                    usable_per_ks=1800, demand_per_ks=3000, prompt_tokens=100, output_tokens=100,
                ),
                v.DegradationDecided(model="tiny", level=1, was=2, since=9, due_ticks=5),
            )  # fmt: skip
            await scene.until(lambda: "fleet" in scene.replica.fleet.streams)
            code, out, _ = await relume(scene, "degradation")
            assert code == 0 and "tiny: degradation level 2" in out
            assert "3.00 requests/s arrive" in out and "60 % are served" in out
            assert "tiny: degradation level 1" in out and "is not known, for 5 ticks" in out
            code, out, _ = await relume(scene, "degradation", "--json", "--limit", "1")
            found = json.loads(out)
            assert [d["level"] for d in found["decisions"]] == [1]
            assert [m["level"] for m in found["models"]] == [1]
            code, out, _ = await relume(scene, "degradation", "--model", "other")
            assert code == 0 and "degradation level" not in out
