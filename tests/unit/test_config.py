"""Where a configured value comes from, and what the error says about a wrong value."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from relight.config import Config, load_config
from relight.errors import ConfigError


def refusal(
    overrides: dict[str, Any] | None = None, environ: dict[str, str] | None = None, url: str | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(url, overrides or {}, environ or {})
    return str(caught.value)


def test_defaults():
    config = load_config(None, {}, {})
    assert config == Config()
    assert msgspec.to_builtins(config) == {
        "store": "sqlite:///relight.db",
        "db_schema": "relight",
        "migrate": True,
        "leases": "store",
        "drive": True,
        "modules": (),
        "orchestrator_id": None,
        "recovery": {
            "enabled": True,
            "auto_resume": True,
            "stale_timeout_seconds": 0.0,
            "max_resume_age_seconds": 0.0,
            "lease_ttl_seconds": 30.0,
            "check_interval_seconds": 30.0,
            "max_startup_recovery": 100,
            "max_claims_per_check": 100,
            "max_attempts": 10,
            "version_mismatch": "warn",
        },
        "checkpoint": {"every": 1000},
        "payload": {"blob_threshold": 65_536, "max_bytes": 16_777_216},
        "park_after_seconds": 1.0,
        "cancel_grace_seconds": 30.0,
        "shutdown_grace_seconds": 10.0,
        "max_concurrent_runs": 1000,
        "max_threads": 64,
    }


def test_every_key_by_environment_by_nested_and_by_flat_keyword_gives_the_same():
    environ = {
        "RELIGHT_STORE": "memory:",
        "RELIGHT_DB_SCHEMA": "shop",
        "RELIGHT_MIGRATE": "false",
        "RELIGHT_LEASES": "etcd://host",
        "RELIGHT_DRIVE": "false",
        "RELIGHT_MODULES": "shop.flows, shop.more",
        "RELIGHT_ORCHESTRATOR_ID": "host-1",
        "RELIGHT_RECOVERY_ENABLED": "false",
        "RELIGHT_RECOVERY_AUTO_RESUME": "false",
        "RELIGHT_RECOVERY_STALE_TIMEOUT": "1m",
        "RELIGHT_RECOVERY_MAX_RESUME_AGE": "1d",
        "RELIGHT_RECOVERY_LEASE_TTL": "9s",
        "RELIGHT_RECOVERY_CHECK_INTERVAL": "4s",
        "RELIGHT_RECOVERY_MAX_STARTUP_RECOVERY": "7",
        "RELIGHT_RECOVERY_MAX_CLAIMS_PER_CHECK": "8",
        "RELIGHT_RECOVERY_MAX_ATTEMPTS": "3",
        "RELIGHT_RECOVERY_VERSION_MISMATCH": "rerun",
        "RELIGHT_CHECKPOINT_EVERY": "10",
        "RELIGHT_PAYLOAD_BLOB_THRESHOLD": "100",
        "RELIGHT_PAYLOAD_MAX_BYTES": "1000",
        "RELIGHT_PARK_AFTER": "2",
        "RELIGHT_CANCEL_GRACE": "1m",
        "RELIGHT_SHUTDOWN_GRACE": "0s",
        "RELIGHT_MAX_CONCURRENT_RUNS": "5",
        "RELIGHT_MAX_THREADS": "2",
    }
    top: dict[str, Any] = {
        "store": "memory:",
        "db_schema": "shop",
        "migrate": False,
        "leases": "etcd://host",
        "drive": False,
        "modules": ["shop.flows", "shop.more"],
        "orchestrator_id": "host-1",
        "park_after": 2,
        "cancel_grace": timedelta(minutes=1),
        "shutdown_grace": 0,
        "max_concurrent_runs": 5,
        "max_threads": 2,
    }
    nested: dict[str, dict[str, Any]] = {
        "recovery": {
            "enabled": False,
            "auto_resume": False,
            "stale_timeout": "1m",
            "max_resume_age": timedelta(days=1),
            "lease_ttl": 9,
            "check_interval": "4s",
            "max_startup_recovery": 7,
            "max_claims_per_check": 8,
            "max_attempts": 3,
            "version_mismatch": "rerun",
        },
        "checkpoint": {"every": 10},
        "payload": {"blob_threshold": 100, "max_bytes": 1000},
    }
    flat = {f"{section}_{name}": value for section, values in nested.items() for name, value in values.items()}

    by_environ = load_config(None, {}, environ)
    assert by_environ == load_config(None, {**top, **nested}, {}) == load_config(None, {**top, **flat}, {})

    default = msgspec.to_builtins(Config())
    for field, value in msgspec.to_builtins(by_environ).items():
        assert value != default[field], f"{field} was not set by this test: it proves nothing about it"


def test_a_keyword_beats_the_environment_which_beats_the_default():
    environ = {"RELIGHT_STORE": "env.db", "RELIGHT_RECOVERY_MAX_ATTEMPTS": "3", "RELIGHT_PARK_AFTER": "5s"}
    config = load_config("app.db", {"recovery": {"enabled": False}, "park_after": "9s"}, environ)
    assert config.store == "app.db"
    assert config.park_after_seconds == 9
    assert config.recovery.enabled is False
    assert config.recovery.max_attempts == 3, "a nested keyword replaces its own key, not the whole section"
    assert config.checkpoint.every == 1000
    assert load_config(None, {}, environ).store == "env.db"


def test_other_environment_variables_are_ignored():
    environ = {
        "PATH": "/bin",
        "RELIGHTING": "1",
        "relight_store": "lower case is not ours",
        "RELIGHT_TEST_CRASH_AT": "3",
        "RELIGHT_SERVICE_HOST": "10.0.0.1",
        "RELIGHT_SERVICE_PORT_HTTP": "7070",
        "RELIGHT_PORT": "tcp://10.0.0.1:7070",
        "RELIGHT_PORT_7070_TCP_ADDR": "10.0.0.1",
        "RELIGHT_UI_SERVICE_HOST": "10.0.0.2",
    }
    assert load_config(None, {}, environ) == Config()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("0", False), (" false ", False)])
def test_flags_in_the_environment(text, value):
    assert load_config(None, {}, {"RELIGHT_RECOVERY_ENABLED": text}).recovery.enabled is value


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"recovry": {}}, ["recovry: unknown key", "did you mean 'recovery'?"]),
        ({"recovery": {"max_atempts": 3}}, ["recovery.max_atempts", "did you mean 'recovery.max_attempts'?"]),
        ({"recovery_max_atempts": 3}, ["recovery_max_atempts", "did you mean 'recovery_max_attempts'?"]),
        ({"recovery": {3: 4}}, ["recovery.3: unknown key", "recovery.enabled"]),
        ({"park_after_seconds": 3}, ["park_after_seconds", "did you mean 'park_after'?"]),
        ({"xyzzy": 3}, ["xyzzy: unknown key", "expected one of", "checkpoint_every", "store"]),
        ({"recovery": None}, ["recovery: None", "expected a dict", "recovery.max_attempts"]),
        ({"recovery": {"enabled": 1}}, ["recovery.enabled: 1 ", "expected true or false"]),
        ({"recovery": {"enabled": "false"}}, ["recovery.enabled: 'false'", "expected true or false"]),
        ({"recovery_version_mismatch": "explode"}, ["'explode'", '"warn", "rerun" or "fail"']),
        ({"checkpoint_every": 0}, ["checkpoint.every: 0 ", "at least 1"]),
        ({"checkpoint": {"every": "10"}}, ["checkpoint.every: '10'", "a whole number"]),
        ({"max_threads": True}, ["max_threads: True", "a whole number"]),
        ({"max_threads": 2.5}, ["max_threads: 2.5", "a whole number"]),
        ({"payload_max_bytes": -1}, ["payload.max_bytes: -1", "bytes"]),
        ({"park_after": "3 bananas"}, ["park_after: '3 bananas'", '"30s"']),
        ({"cancel_grace": float("nan")}, ["cancel_grace: nan", '"30s"']),
        ({"shutdown_grace": None}, ["shutdown_grace: None", '"30s"']),
        ({"modules": "shop.flows"}, ["modules: 'shop.flows'", "a list of module names"]),
        ({"modules": [1]}, ["modules: [1]", "a list of module names"]),
        ({"orchestrator_id": ""}, ["orchestrator_id: ''", "not empty"]),
        ({"store": 5}, ["store: 5", "sqlite:///path"]),
        ({"store": ""}, ["store: ''", "sqlite:///path"]),
        ({"recovery": {"max_attempts": 3}, "recovery_max_attempts": 4}, ["recovery.max_attempts", "twice"]),
    ],
)
def test_a_wrong_keyword_is_refused(overrides, said):
    message = refusal(overrides)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RELIGHT_RECOVRY_ENABLED": "no"}, ["did you mean 'RELIGHT_RECOVERY_ENABLED'?"]),
        ({"RELIGHT_RECOVERY": "{}"}, ["RELIGHT_RECOVERY: unknown environment variable"]),
        ({"RELIGHT_RECOVERY_ENABLED": "maybe"}, ["RELIGHT_RECOVERY_ENABLED", "'maybe'", "true or false"]),
        ({"RELIGHT_CHECKPOINT_EVERY": "ten"}, ["RELIGHT_CHECKPOINT_EVERY", "'ten'", "a whole number"]),
        ({"RELIGHT_CHECKPOINT_EVERY": ""}, ["RELIGHT_CHECKPOINT_EVERY", "''", "a whole number"]),
        ({"RELIGHT_PARK_AFTER": "3 bananas"}, ["park_after", "RELIGHT_PARK_AFTER", "'3 bananas'", '"30s"']),
        ({"RELIGHT_STORE": ""}, ["RELIGHT_STORE", "''", "sqlite:///path"]),
    ],
)
def test_a_wrong_variable_is_refused(environ, said):
    message = refusal(environ=environ)
    for part in said:
        assert part in message


def test_the_store_is_given_once():
    assert "store: given twice" in refusal({"store": "b.db"}, url="a.db")


def test_an_unknown_keys_value_is_not_shown():
    assert "hunter2" not in refusal({"stroe": "postgresql://app:hunter2@db/app"})
    assert "hunter2" not in refusal(environ={"RELIGHT_STROE": "postgresql://app:hunter2@db/app"})


def test_config_does_not_change():
    config = load_config(None, {"modules": ["a"]}, {})
    with pytest.raises(AttributeError):
        config.store = "other.db"  # type: ignore[misc]  # this is the mistake under test
    with pytest.raises(AttributeError):
        config.recovery.enabled = False  # type: ignore[misc]  # this is the mistake under test
    assert isinstance(config.modules, tuple)
    hash(config)
