"""The world of tests/flows serves here as well."""

from tests.flows.conftest import postgres_server, registry, world  # noqa: F401
