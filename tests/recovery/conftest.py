"""The world of tests/flows serves here as well."""

from tests.flows.conftest import registry, world  # noqa: F401
