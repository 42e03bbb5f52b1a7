"""`make demo`: one of two demos on real processes, by default of a killed engine.

Each starts a fleet of real vLLM workers, prints a table, and repeats every decision of the log. The
last line is one JSON object; exit 1 if anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from msgspec import structs

from relume.chaos import health_demo, kill_demo
from relume.controlplane.local.local_fleet import FleetFailed, FleetOptions


def main() -> int:
    """Entry of `python -m relume.chaos.demo`."""
    defaults = FleetOptions()
    parser = argparse.ArgumentParser(prog="relume demo", description=__doc__)
    parser.add_argument("--workers", type=int, default=3, help="engines to start")
    parser.add_argument(
        "--streams", type=int, default=24, help="number of streams, at least 8 per worker"
    )
    parser.add_argument("--tokens", type=int, default=192, help="tokens per stream")
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--state-dir", default=".relume/demo")
    parser.add_argument(
        "--health",
        action="store_true",
        help="show instead how engines are found that are wrong, fail or stand still; three workers, 2 minutes",
    )
    args = parser.parse_args()
    options = FleetOptions(
        workers=args.workers,
        model=args.model,
        state_dir=args.state_dir,
        port=0,
        admin_port=0,
        tokenizer=True,
    )
    if not Path(options.model).exists():
        print(f"no model at {options.model}: run `make env`", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    try:
        fields, good = _health(options) if args.health else _kill(options, args)
    except FleetFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything is stopped", file=sys.stderr)
        return 130
    print(json.dumps(fields), flush=True)
    return 0 if good else 1


def _kill(options: FleetOptions, args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    result = asyncio.run(kill_demo.demo(options, args.streams, args.tokens))
    return structs.asdict(result), kill_demo.passed(result)


def _health(options: FleetOptions) -> tuple[dict[str, Any], bool]:
    result = asyncio.run(health_demo.demo(options))
    return structs.asdict(result), health_demo.passed(result)


def _interrupt() -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
