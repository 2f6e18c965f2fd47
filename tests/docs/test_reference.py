"""The reference pages list exactly what the code has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import typer

import relight
from relight import config, errors
from relight.cli.explain import _as_dict as explain_as_dict
from relight.cli.main import app
from relight.cli.recovery import as_dict
from relight.durations import parse_duration
from relight.metrics import Metrics
from relight.model.decisions import Action
from relight.model.run import Hold, Status
from relight.recovery.explain import Explanation
from relight.recovery.plan import Planned
from relight.testing.crashpoints import Mode
from tests.docs import package_map

DOCS = Path(__file__).resolve().parents[2] / "docs"


def first_column(page: str, heading: str | None = None) -> list[str]:
    """The names in code style in the first column of a page's tables, or of the tables under one heading."""
    text = (DOCS / page).read_text()
    if heading is not None:
        text = re.split(r"^###? ", text.partition(f"## {heading}\n")[2], flags=re.MULTILINE)[0]
    cells = re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


# ---- configuration


def configuration_rows() -> dict[str, tuple[str, str]]:
    rows = re.findall(
        r"^\| `([a-z_.]+)` \| `(\w+)` \| (.+?) \|", (DOCS / "reference/configuration.md").read_text(), re.MULTILINE
    )
    return {key: (variable, default) for key, variable, default in rows}


def test_configuration_lists_every_key_with_its_variable():
    assert {key: variable for key, (variable, _) in configuration_rows().items()} == {
        key.dotted: key.variable for key in config._KEYS
    }


def test_configuration_gives_the_defaults():
    made = config.load_config(None, {}, {})
    for key in config._KEYS:
        value = getattr(getattr(made, key.section) if key.section else made, key.field)
        written = configuration_rows()[key.dotted][1]
        if value in (None, ()):
            assert '"' not in written, key.dotted
        elif isinstance(value, bool):
            assert written == str(value).lower(), key.dotted
        elif key.is_duration:
            assert parse_duration(written.strip('`"'), key.dotted) == value, key.dotted
        else:
            assert written.strip('`"') == str(value), key.dotted


# ---- errors


def error_classes() -> dict[str, type[BaseException]]:
    return {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


def test_errors_lists_every_error():
    assert set(first_column("reference/errors.md")) == set(error_classes())


def test_errors_says_which_cannot_be_imported_from_relight():
    sentence = re.search(r"^(.+) are in `relight.errors`", (DOCS / "reference/errors.md").read_text(), re.MULTILINE)
    assert sentence is not None
    hidden = {name for name in error_classes() if not hasattr(relight, name)}
    assert set(re.findall(r"`(\w+)`", sentence[1])) == hidden


# ---- the API and the command line


def test_api_names_everything_public():
    page = (DOCS / "reference/api.md").read_text()
    missing = [name for name in relight.__all__ if not re.search(rf"`{name}`", page)]
    assert not missing


def test_api_names_the_methods():
    page = (DOCS / "reference/api.md").read_text()
    handle = {name for name in vars(relight.Handle) if not name.startswith("_")}
    engine = {name for name in vars(relight.Relight) if not name.startswith("_")}
    engine -= {"services", "orchestrator", "row", "post"}  # for handles and tests
    missing = [name for name in handle | engine if not re.search(rf"`{name}[`(]", page)]
    assert not missing


def options_of(command: Any) -> set[str]:
    named = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    return named - {"--help"}


def options_on_the_page(heading: str) -> set[str]:
    return {written.split()[0] for written in first_column("reference/cli.md", heading)}


def test_cli_lists_the_commands_and_their_options():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined] # a group, as typer makes it
    page = (DOCS / "reference/cli.md").read_text()
    assert {
        name.removeprefix("relight ") for name in first_column("reference/cli.md") if name.startswith("relight ")
    } == set(commands)
    for name, command in commands.items():
        assert f"\n## {name}\n" in page
        assert options_on_the_page(name) == options_of(command), name
        for inner, subcommand in getattr(command, "commands", {}).items():
            assert f"\n### {name} {inner}\n" in page
            assert options_on_the_page(f"{name} {inner}") == options_of(subcommand), inner


def fields_on_the_page(beginning: str) -> list[str]:
    """The names after this beginning in a row of the command line's page, without the text in brackets."""
    listed = re.search(rf"\| {beginning}: (`run`.+) \|", (DOCS / "reference/cli.md").read_text())
    assert listed is not None
    return re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", listed[1]))


def test_the_json_of_plan_and_explain_is_what_the_page_says():
    planned = Planned(
        run_id="r",
        flow="f",
        status=Status.RUNNING,
        owner=None,
        action=Action.LEAVE,
        reason="",
        verdict=Action.RESUME,
        verdict_reason="",
    )
    assert fields_on_the_page("a list of objects") == list(as_dict(planned))
    explained = Explanation(
        run_id="r",
        sentence="",
        status=Status.RUNNING,
        flow="f",
        owner=None,
        owner_alive=False,
        owner_trouble="",
        last_heartbeat=None,
        lease_expires_at=None,
        epoch=1,
        generation=1,
        input="{}",
        created_at=0.0,
        updated_at=0.0,
        last_entry=0,
        last_operation="",
        waits_for=[],
        unread=[],
        steps=[],
        plan=planned,
        events=[],
    )
    assert fields_on_the_page("an object") == list(explain_as_dict(explained))


def test_api_lists_the_fields_of_plans_and_explanations():
    names = first_column("reference/api.md")
    for struct in (Planned, Explanation):
        assert set(struct.__struct_fields__) <= set(names), struct
    assert "stuck" in names
    page = (DOCS / "reference/api.md").read_text()
    assert all(f"`{action.value}`" in page for action in Action)


# ---- metrics


def test_metrics_lists_every_metric_with_its_type():
    rows = re.findall(r"^\| `(relight_\w+)` \| (\w+)", (DOCS / "reference/metrics.md").read_text(), re.MULTILINE)
    counted = {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in Metrics().registry.collect()
    }
    assert dict(rows) == counted


# ---- concepts, testing


def test_concepts_has_every_status_and_hold():
    assert set(first_column("concepts.md", "Statuses")) == {status.value for status in Status} | {
        hold.value for hold in Hold
    }


def test_testing_has_every_mode_of_crashing():
    assert set(first_column("how-to/testing.md", "At every crash point")) == set(get_args(Mode)) - {"count"}


# ---- the glossary


def test_the_glossary_is_in_order_and_has_the_words_of_the_model():
    words = re.findall(r"^\| ([a-z][a-z, ]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)
    for needed in ("flow", "run", "step", "checkpoint", "epoch", "claim", "recover", "park", "hold"):
        assert needed in words


def test_payload_structs_are_what_the_json_of_the_command_line_says():
    """The page lists the fields of `relight runs --json`. Every fact of a row is among them, under one name or another."""
    from relight.cli.runs import describe
    from relight.model.run import Run

    row = Run(id="r", root_id="r", flow="f", status=Status.PENDING, created_at=0.0, updated_at=0.0)
    listed = re.search(r"a list of objects: (`id`.+) \|", (DOCS / "reference/cli.md").read_text())
    assert listed is not None
    assert re.findall(r"`(\w+)`", listed[1]) == list(describe(row))
    names = {
        "root_id": "root",
        "parent_id": "parent",
        "input_blob": "input",
        "output_blob": "output",
        "flow_hash": "flow",
        "newer": "reason",
    }
    assert {names.get(field, field) for field in msgspec.structs.asdict(row)} <= set(describe(row))


# ---- the architecture


def test_the_architecture_names_only_files_that_exist():
    page = (DOCS / "ARCHITECTURE.md").read_text()
    root = DOCS.parent
    missing = []
    for name in sorted(set(re.findall(r"`([\w/.]+\.(?:py|sql|toml))`", page))):
        places = [root / name, root / "src" / "relight" / name, *(root / "src" / "relight").rglob(Path(name).name)]
        if not any(place.is_file() and str(place).endswith(name) for place in places):
            missing.append(name)
    assert not missing


def test_the_map_of_the_packages_is_that_of_the_code():
    page = package_map.PAGE.read_text()
    assert package_map.with_map(page) == page, "run `make map`"


def test_a_package_says_in_which_order_its_files_are_to_be_read():
    packages = ("execution", "flow", "model", "orchestrator", "ownership", "ports", "record", "recovery", "run")
    for name in packages:
        folder = package_map.SOURCE / name
        text = (folder / "__init__.py").read_text()
        assert not {file.stem for file in folder.glob("*.py") if file.stem not in text} - {"__init__"}, name
