"""The child's side of a measurement: call one function, print what it returns as the last line.

Every measurement has a process of its own, so that no engine inherits the imports, threads, caches or garbage of another.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main(target: str, arguments: str) -> None:
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(json.dumps(result), flush=True)
    os._exit(
        0
    )  # how an engine's threads behave while the interpreter winds down (duroxide's may abort) is not measured


if __name__ == "__main__":
    main(*sys.argv[1:])
