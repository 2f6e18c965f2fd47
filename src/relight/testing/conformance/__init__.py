"""What every backend must do: suites of tests, for Relight's own backends and for yours.

Define three fixtures and collect the suites; pytest, pytest-asyncio and hypothesis must be installed:

    from relight.testing import conformance

    @pytest.fixture
    async def store(clock): ...         # an open, empty store that reads the time from `clock`

    @pytest.fixture
    async def other(store, clock): ...  # a second object on the same data, as another process would open it

    @pytest.fixture
    def corrupt(store): ...             # async (root_id, sequence): damage that entry's or checkpoint's stored bytes

    class TestCommits(conformance.CommitSuite): ...
    class TestJournals(conformance.JournalSuite): ...
    class TestRuns(conformance.RunSuite): ...
    class TestInboxes(conformance.InboxSuite): ...
    class TestWakings(conformance.WakingSuite): ...
    class TestContents(conformance.ContentSuite): ...
    class TestGenerations(conformance.GenerationSuite): ...
    class TestOwnership(conformance.OwnershipSuite): ...
    class TestReopening(conformance.ReopenSuite): ...
    class TestSharing(conformance.SharingSuite): ...
    class TestTexts(conformance.TextSuite): ...

Lease managers have their own suite, with its own fixtures (see `conformance.leases`):

    class TestLeases(conformance.LeaseSuite): ...

`events` are the hypothesis strategies behind the property test: random journals of every kind of event.
"""

from relight.testing.conformance.build import FixedClock, Suite
from relight.testing.conformance.commits import CommitSuite
from relight.testing.conformance.contents import ContentSuite
from relight.testing.conformance.generations import GenerationSuite
from relight.testing.conformance.inboxes import InboxSuite
from relight.testing.conformance.journals import JournalSuite
from relight.testing.conformance.leases import LeaseSuite
from relight.testing.conformance.ownership import OwnershipSuite
from relight.testing.conformance.reopening import ReopenSuite
from relight.testing.conformance.runs import RunSuite
from relight.testing.conformance.sharing import SharingSuite
from relight.testing.conformance.texts import TextSuite
from relight.testing.conformance.wakings import WakingSuite

__all__ = [
    "CommitSuite",
    "ContentSuite",
    "FixedClock",
    "GenerationSuite",
    "InboxSuite",
    "JournalSuite",
    "LeaseSuite",
    "OwnershipSuite",
    "ReopenSuite",
    "RunSuite",
    "SharingSuite",
    "Suite",
    "TextSuite",
    "WakingSuite",
]
