"""Exceptions as data: on replay they have the same class and the same message, whatever arguments their constructors take."""

from __future__ import annotations

import builtins
import enum
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relight.errors import PayloadError, RunFailedError, StepError, StepTimeoutError
from relight.flow import error_records
from relight.flow.error_records import MAX_TEXT_CHARS, rebuild_error, record_error
from relight.model.journal import GROUP, ErrorRecord


class HaltError(BaseException):
    """Not an Exception."""


class DeclinedError(ValueError):
    def __init__(self, order: str, *, code: int) -> None:
        super().__init__(f"order {order} was declined")
        self.order = order
        self.code = code


class RenamingError(Exception):
    """Its constructor would accept its own `args`, and make another message of them."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")


class CountingError(Exception):
    """Its message is the same for all arguments, and its constructor changes them."""

    def __init__(self, count: int) -> None:
        super().__init__(count + 1)

    def __str__(self) -> str:
        return "counted"


class HoldingError(Exception):
    """Has an attribute that is not data. Its constructor makes it anew."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lock = object()
        self.name = name


class SpeakingError(Exception):
    def __init__(self, response: object) -> None:
        self.response = response

    def __str__(self) -> str:
        return f"status {self.response.status}"  # type: ignore[attr-defined] # a stand-in for a real response


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not today")


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class BrokenError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(5, "broken", path)


class Group(ExceptionGroup):
    pass


class Response:
    status = 503


class Outer:
    class InnerError(KeyError):
        pass


class Text(str):
    __slots__ = ()


class Level(enum.IntEnum):
    HIGH = 3


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


def caught_from(function: Any, *args: Any) -> BaseException:
    try:
        function(*args)
    except BaseException as caught:
        return caught
    raise AssertionError("it raised nothing")


def replayed(exc: BaseException) -> BaseException:
    """Through the journal's JSON, as after a crash."""
    record = record_error(exc)
    return rebuild_error(msgspec.json.decode(msgspec.json.encode(record), type=ErrorRecord))


@pytest.mark.parametrize(
    "make",
    [
        ValueError,
        lambda: ValueError("bad"),
        lambda: ValueError("bad", 7, None, ["x"]),
        lambda: KeyError("missing"),
        lambda: StopIteration(5),
        lambda: FileNotFoundError(2, "No such file", "/x"),
        lambda: OSError("plain"),
        lambda: ImportError("no module", name="nope", path="/nope"),
        lambda: DeclinedError("o-1", code=51),
        lambda: RenamingError("bread"),
        lambda: CountingError(1),
        lambda: HoldingError("h"),
        lambda: SlottedError(4),
        lambda: BrokenError("/dev/x"),
        lambda: Outer.InnerError("k"),
        lambda: StepTimeoutError("too slow", type_name="x"),
        lambda: RunFailedError("failed", run_id="r1"),
        lambda: PayloadError("no"),
        lambda: caught_from(json.loads, "{"),
        lambda: caught_from(int, "x"),
        lambda: caught_from(subprocess.run, ["no-such-program"]),
        lambda: subprocess.CalledProcessError(2, ["ls", "-l"]),
        lambda: caught_from(getattr, object(), "x"),
        lambda: caught_from(lambda: 1 / 0),
    ],
)
def test_a_replayed_exception_is_the_recorded_one(make: Any):
    exc = raised(make())
    back = replayed(exc)
    assert type(back) is type(exc)
    assert str(back) == str(exc)
    assert back.args == exc.args
    for name, value in vars(exc).items():
        if name != "lock":
            assert getattr(back, name) == value


def test_what_built_in_classes_keep_beside_their_arguments_comes_back():
    error = replayed(raised(FileNotFoundError(2, "No such file", "/x")))
    assert isinstance(error, FileNotFoundError)
    assert (error.errno, error.filename) == (2, "/x")
    missing = replayed(raised(ImportError("no module", name="nope")))
    assert isinstance(missing, ImportError)
    assert missing.name == "nope"
    slotted = replayed(SlottedError(4))
    assert isinstance(slotted, SlottedError)
    assert slotted.code == 4
    holding = replayed(HoldingError("h"))
    assert isinstance(holding, HoldingError)
    assert holding.lock is not None


def test_attributes_set_after_construction_come_back():
    exc = ValueError("busy")
    exc.retry_after = 5  # type: ignore[attr-defined] # on purpose
    exc.socket = object()  # type: ignore[attr-defined] # no data: it is left out
    back: Any = replayed(exc)
    assert back.retry_after == 5
    assert not hasattr(back, "socket")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SpeakingError(Response()),
        lambda: caught_from(b"\xff".decode),
        lambda: caught_from(compile, "1 +", "<text>", "eval"),
        lambda: ValueError((1, 2)),
        lambda: ValueError({1, 2}, float("nan")),
        lambda: ValueError("file \udcff"),
        lambda: SilentError("x"),
        lambda: ValueError(Level.HIGH),
        lambda: DeclinedError(Text("o-1"), code=Level.HIGH),
        lambda: KeyError(Text("k")),
    ],
)
def test_arguments_that_are_no_data_cost_neither_class_nor_message(make: Any):
    exc = raised(make())
    back = replayed(exc)
    assert isinstance(back, type(exc))
    assert record_error(back).message == record_error(exc).message
    assert record_error(back).type == record_error(exc).type


def test_a_class_that_is_gone_is_a_step_error_of_the_nearest_base():
    class LocalError(DeclinedError):
        pass

    exc = raised(LocalError("o-1", code=51))
    back = replayed(exc)
    assert isinstance(back, StepError)
    assert isinstance(back, DeclinedError)
    assert type(back).__name__ == "LocalError"
    assert str(back) == "order o-1 was declined"
    assert back.type_name.endswith("LocalError")
    assert vars(back)["code"] == 51
    twice = replayed(back)
    assert isinstance(twice, DeclinedError)
    assert isinstance(twice, StepError)
    assert str(twice) == str(back)

    gone = rebuild_error(ErrorRecord(type="no.such.module:Error", message="lost"))
    assert type(gone) is StepError
    assert str(gone) == "lost"
    assert gone.type_name == "no.such.module:Error"


@pytest.mark.parametrize("base", ["builtins:OSError", "builtins:KeyError", "builtins:UnicodeDecodeError", "x:Y"])
def test_a_stand_in_is_caught_by_what_caught_the_original(base: str):
    record = ErrorRecord(
        type="gone:Gone", message="it is gone", args=[1, 2], attributes={"__bases__": ["gone:Base", base], "code": 7}
    )
    back: Any = rebuild_error(record)
    assert isinstance(back, StepError)
    assert str(back) == "it is gone"
    assert vars(back)["code"] == 7
    if base.startswith("builtins"):
        assert isinstance(back, getattr(builtins, base.partition(":")[2]))


def test_a_class_without_a_constructor_gets_a_stand_in():
    exc = caught_from(pydantic.TypeAdapter(int).validate_python, "x")
    back = replayed(exc)
    assert isinstance(back, ValueError)
    assert str(back) == str(exc)


@pytest.mark.parametrize(
    "name",
    ["os:system", "builtins:print", "builtins:int", "sys:modules", ":", "", "builtins:", "os.path:join.x", "this:x"],
)
def test_only_exception_classes_that_are_there_are_found(name: str):
    back = rebuild_error(ErrorRecord(type=name, message="m"))
    assert type(back) is StepError
    assert "this" not in sys.modules  # nothing was imported


def test_exception_groups_come_back_with_their_members():
    exc = raised(Group("two failed", [DeclinedError("o-1", code=51), ExceptionGroup("inner", [KeyError("k")])]))
    back = replayed(exc)
    assert type(back) is Group
    assert str(back) == str(exc)
    assert isinstance(back.exceptions[0], DeclinedError)
    assert back.exceptions[0].code == 51
    assert back.subgroup(KeyError) is not None
    many = replayed(ExceptionGroup("many", [ValueError(i) for i in range(500)]))
    assert isinstance(many, ExceptionGroup)
    assert len(many.exceptions) == error_records.MAX_GROUP


def test_the_traceback_is_text_in_one_note_however_often_it_is_replayed():
    exc = raised(ValueError("bad"))
    exc.add_note("while shipping")
    first = record_error(exc)
    assert "in raised" in first.traceback
    back = replayed(raised(replayed(raised(replayed(exc)))))
    assert back.__notes__[0] == "while shipping"
    assert len(back.__notes__) == 2
    assert back.__notes__[1] == "Traceback of the recorded exception:\n" + first.traceback
    assert "".join(traceback.format_exception(back)).count("in raised") == 1
    assert record_error(back) == first


def test_everything_recorded_is_bounded():
    exc = ValueError("head" + "x" * 1_000_000 + "tail", list(range(100_000)))
    exc.big = "x" * 1_000_000  # type: ignore[attr-defined] # on purpose
    for _ in range(100):
        exc.add_note("n" * 100_000)
    record = record_error(raised(exc))
    assert len(record.message) <= MAX_TEXT_CHARS
    assert len(record.traceback) <= MAX_TEXT_CHARS
    assert "characters left out" in record.message
    assert len(msgspec.json.encode(record)) < 1_000_000
    message = record_error(ValueError("head" + "x" * 1_000_000 + "tail")).message
    assert message.startswith("head")
    assert message.endswith("tail")

    def forever() -> None:
        forever()

    assert len(record_error(caught_from(forever)).traceback) <= MAX_TEXT_CHARS


data = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats() | st.binary() | st.tuples(st.integers()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(
        [
            ValueError,
            KeyError,
            OSError,
            RenamingError,
            DeclinedError,
            SlottedError,
            Outer.InnerError,
            UnicodeDecodeError,
        ]
    ),
    st.lists(data, max_size=4),
    st.dictionaries(st.text(min_size=1), data, max_size=3),
)
@example(ValueError, [], {"__group__": {"": None}})
@example(ValueError, [], {"__bases__": [None]})
def test_recording_and_replaying_never_fail_and_settle(cls: type[BaseException], args: Any, attributes: Any):
    exc = BaseException.__new__(cls) if cls is UnicodeDecodeError else cls.__new__(cls, *args)
    exc.args = tuple(args)
    exc.__dict__.update(attributes)
    record = record_error(raised(exc))
    back = rebuild_error(msgspec.json.decode(msgspec.json.encode(record), type=ErrorRecord))
    assert isinstance(back, cls)
    again = record_error(raised(back))
    assert (again.type, again.message, again.traceback) == (record.type, record.message, record.traceback)


def test_a_script_that_ran_as_main_keeps_its_built_in_bases(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, msgspec\n"
        "from relight.flow.error_records import record_error\n"
        "class Mine(LookupError): pass\n"
        "sys.stdout.buffer.write(msgspec.json.encode(record_error(Mine('x'))))\n"
    )
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, check=True)
    record = msgspec.json.decode(ran.stdout, type=ErrorRecord)
    assert record.type == "__main__:Mine"
    assert isinstance(rebuild_error(record), LookupError)


@pytest.mark.parametrize(
    "name",
    [
        "builtins:SystemExit",
        "builtins:KeyboardInterrupt",
        "builtins:GeneratorExit",
        "builtins:BaseException",
        "builtins:BaseExceptionGroup",
        "asyncio.exceptions:CancelledError",
        "relight.errors:Unwind",
        "relight.errors:RunCancelled",
        f"{__name__}:HaltError",
    ],
)
def test_only_exceptions_are_rebuilt(name: str):
    """A record may come from outside. Any other class, raised in a step or in the engine, would end more than the step."""
    group = {"message": "m", "members": [{"type": name, "message": "m"}]}
    for record in (
        ErrorRecord(name, "m", args=["m"]),
        ErrorRecord("gone:GoneError", "m", attributes={error_records._BASES: [name]}),
        ErrorRecord(name, "m", attributes={GROUP: group}),
        ErrorRecord("builtins:BaseExceptionGroup", "m", attributes={GROUP: group}),
    ):
        rebuilt = rebuild_error(record)
        assert isinstance(rebuilt, Exception), record
        assert isinstance(rebuilt, StepError), record
        assert str(rebuilt) == "m"
