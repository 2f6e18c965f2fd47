"""The world of tests/flows is used here as well."""

from tests.flows.conftest import pytest_itemcollected, registry, world  # noqa: F401
from tests.recovery.engines import engines  # noqa: F401
