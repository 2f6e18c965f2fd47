"""The world of tests/flows serves here as well."""

from tests.backends.conftest import postgres_server  # noqa: F401
from tests.flows.conftest import registry, world  # noqa: F401
