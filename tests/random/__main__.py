"""`python -m tests.random SEED [--mode killed]`: one program again, or `--count` of them from that seed on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.random.generate import generate
from tests.random.shrink import shrink
from tests.random.trial import MODES, Found, Trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="how often each; races and kills differ")
    parser.add_argument("--show", action="store_true", help="print the program")
    parser.add_argument("--shrink", action="store_true", help="print the smallest program that fails as well")
    parser.add_argument("--copies", type=int, default=1, help="of each program at once; races differ")
    parser.add_argument("--seconds", type=float, default=120.0, help="for shrinking")
    parser.add_argument("--file", help="a program to try instead of the seed's")
    parser.add_argument("--plant", default="")
    parser.add_argument("--patience", type=float, default=10.0)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.count)
    if options.show:
        for seed in seeds:
            print(msgspec.json.format(msgspec.json.encode(generate(seed)), indent=1).decode())
    modes = list(MODES) if options.mode == "all" else [options.mode]
    with Trials(plant=options.plant, patience=options.patience) as trials:
        begun = time.monotonic()
        for at in range(0, len(seeds), options.batch):
            programs = [generate(seed) for seed in seeds[at : at + options.batch]] * options.copies
            if options.file:
                programs = [msgspec.json.decode(Path(options.file).read_bytes())] * options.copies
            for mode in modes:
                failed = [found for turn in range(options.times) for found in trials.run(programs, mode, turn)]
                for found in failed[:5]:
                    print(found.text(), flush=True)
                if failed and options.shrink:
                    report(trials, next(one for one in programs if one["seed"] == failed[0].seed), mode, options)
        seconds = time.monotonic() - begun
        print(f"{trials.programs} executions, {trials.lives} lives, {trials.kills} kills, {seconds:.1f}s")


def report(trials: Trials, program: dict[str, Any], mode: str, options: argparse.Namespace) -> None:
    """Shrink the program, and print what is left of it."""
    last: list[Found] = []

    def fails(smaller: dict[str, Any]) -> bool:
        for turn in range(max(options.times, 4)):
            found = trials.run([smaller] * max(options.copies, 8), mode, turn)
            if found:
                last[:] = found
                return True
        return False

    small = shrink(program, fails, options.seconds)
    if not last:
        print("  it does not fail again by itself")
        return
    print(msgspec.json.format(msgspec.json.encode(small), indent=1).decode())
    print(*last[0].problems, sep="\n")
    Path(f"/tmp/random_{program['seed']}.json").write_bytes(msgspec.json.encode(small))


if __name__ == "__main__":
    main()
