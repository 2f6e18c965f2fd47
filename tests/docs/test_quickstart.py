"""The quickstart is followed from top to bottom in one folder: its program runs twice, is changed as the page says, killed, and
started again. `test_snippets` runs the same blocks, but each once, and kills nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.docs.test_snippets import ROOT, blocks

PAGE = ROOT / "docs" / "quickstart.md"
RECEIPT = "receipt for {}: 1250 cents"
SHIPPED = ["tea is on its way", "cup is on its way"]

SHIP = '    return f"{item} is'  # what the step called ship does
# Instead of the page's ten seconds: until the process is killed. The started-again process has no such variable.
PAUSE = 'print("ship", flush=True); time.sleep(float(os.environ.get("PAUSE", "0")))'


@pytest.fixture
def start(tmp_path):
    def start_program(program: str, **environ: str) -> subprocess.Popen[str]:
        (tmp_path / "shop.py").write_text(program)
        return subprocess.Popen(
            [sys.executable, "shop.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_program


def finish(process: subprocess.Popen[str]) -> tuple[list[str], str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    return out.splitlines(), err


def test_the_page_can_be_followed_in_its_order(start):
    steps_and_flows, run_it = [code for kind, _, code in blocks(PAGE) if kind == "python"][:2]
    program = "\n".join([*steps_and_flows, *run_it]) + "\n"

    # Run it
    first, _ = finish(start(program))
    assert first == [RECEIPT.format("order-42"), *SHIPPED]
    assert finish(start(program))[0] == first

    # Kill it
    change = re.search(r"change `(order-\d+)` to `(order-\d+)`. Put .* into `ship`", PAGE.read_text())
    assert change is not None
    changed = program.replace(change[1], change[2]).replace(SHIP, f"    {PAUSE}\n{SHIP}")
    changed = "import os, time\n" + changed
    assert changed.count(PAUSE) == changed.count(change[2]) == 1
    killed = start(changed, PAUSE="3600")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "ship\n"
    killed.kill()
    killed.communicate()

    again, log = finish(start(changed))
    assert again == ["ship", "ship", RECEIPT.format(change[2]), *SHIPPED]
    shown = re.search(r"^\[OWNER_DEAD\] (.+)$", PAGE.read_text(), re.MULTILINE)
    assert shown is not None
    if sys.platform == "linux":  # elsewhere the lease has to lapse first
        assert re.sub(r"\S+#\w+|\d+", "*", shown[1]) in re.sub(r"\S+#\w+|\d+", "*", log)
