"""Which store a URL names, which URLs are refused, and that no URL shows its password anywhere."""

from __future__ import annotations

import pytest

from relight import Relight
from relight.backend_choice import make_leases, make_store
from relight.backends.postgres import PostgresStore
from relight.clock import SYSTEM_CLOCK
from relight.config import load_config
from relight.errors import ConfigError
from relight.store_url import StoreUrl, parse_store_url, printable_url

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "kind", "place"),
    [
        ("memory:", "memory", ""),
        ("app.db", "sqlite", "app.db"),
        ("/srv/app.db", "sqlite", "/srv/app.db"),
        ("./memory", "sqlite", "./memory"),
        ("./a:b.db", "sqlite", "./a:b.db"),
        ("./host=h password=x", "sqlite", "./host=h password=x"),
        ("../app.db?mode=ro", "sqlite", "../app.db?mode=ro"),
        ("/srv/app.db?mode=ro", "sqlite", "/srv/app.db?mode=ro"),
        ("data//app.db", "sqlite", "data//app.db"),
        ("//srv/app.db", "sqlite", "//srv/app.db"),
        ("run=3.db", "sqlite", "run=3.db"),
        ("a@b/app.db", "sqlite", "a@b/app.db"),
        ("sqlite:///app.db", "sqlite", "app.db"),
        ("sqlite:////srv/app.db", "sqlite", "/srv/app.db"),
        ("SQLite:///app.db", "sqlite", "app.db"),
        ("sqlite+aiosqlite:///app.db", "sqlite", "app.db"),
        ("sqlite+pysqlite:////srv/app.db", "sqlite", "/srv/app.db"),
        ("postgresql://u:p@h/d?sslmode=require", "postgresql", "postgresql://u:p@h/d?sslmode=require"),
        ("postgres://h/d", "postgresql", "postgres://h/d"),
        ("postgresql+asyncpg://u:p@h/d", "postgresql", "postgresql://u:p@h/d"),
        ("postgresql+psycopg2://h/d", "postgresql", "postgresql://h/d"),
    ],
)
def test_which_store_a_url_names(url: str, kind: str, place: str):
    found = parse_store_url(url)
    assert (found.kind, found.place) == (kind, place)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("memory", "write memory: for a store that forgets"),
        ("postgres", "postgresql://host/database; a file of that name is written ./postgres"),
        ("sqlite", "a file of that name is written ./sqlite"),
        (":memory:", "write memory: for a store that forgets"),
        ("memory:app", "a store that forgets is written memory:"),
        ("memory://", "a store that forgets is written memory:"),
        ("sqlite:app.db", "sqlite:///app.db"),
        ("sqlite:/app.db", "sqlite:///app.db"),
        ("sqlite://app.db", "sqlite:///app.db"),
        ("sqlite://", "write memory: for a store that forgets"),
        ("sqlite:///:memory:", "write memory: for a store that forgets"),
        ("file:app.db", "write the path alone: app.db"),
        ("file:///srv/app.db", "write the path alone: ///srv/app.db"),
        ("postgresql:shop", "two slashes come before the host"),
        ("mysql://db/shop", "there is no store for mysql:"),
        ("a:b.db", "a file whose name has a colon is written ./name"),
        (
            f"host=localhost password={SECRET} dbname=y",
            "a connection is written as a URL: postgresql://user:password@host",
        ),
        (f"Server=h;Database=d;User Id=u;Password={SECRET}", "a connection is written as a URL"),
        (f"options='-c x' password = {SECRET}", "a connection is written as a URL"),
        (f"postgresql:host=h password={SECRET}", "two slashes come before the host"),
        (f"file:host=h password={SECRET}", "expected memory:, the path of a SQLite file"),
        (f"postgresql//u:{SECRET}@h/x", "a colon comes before the two slashes: postgresql://user:password@host"),
        (f"postgresql//h/x?password={SECRET}", "a colon comes before the two slashes"),
        ("sqlite///app.db", "a colon comes before the two slashes"),
        (f"postgresql/u:{SECRET}@h/x", "expected memory:, the path of a SQLite file"),
        (f"//h/x?password={SECRET}", "the scheme is missing"),
        ("sqlite:///app.db?mode=ro", "a sqlite: URL has no options; write sqlite:///path"),
        (f"sqlite:////srv/app.db?key={SECRET}", "a sqlite: URL has no options"),
        ("app.db?mode=ro", "a file whose name has a ? is written ./name"),
        (f"postgresql://u:a@{SECRET}@h/d", "@ as %40"),
        (f"postgresql+asyncpg://u@corp:{SECRET}@h/d", "@ as %40"),
    ],
)
def test_what_names_no_store_is_refused_and_makes_no_file(url: str, advice: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="store") as refused, Relight(url):
        pass
    assert advice in str(refused.value)
    assert SECRET not in f"{refused.value} {Relight(url).store_name} {load_config(url, {'leases': url}, {})!r}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("nope=1", "there is no option 'nope'; a url takes connect_timeout, pgbouncer, host, "),
        ("pool_size=5&max_overflow=1", "there is no option 'pool_size', 'max_overflow'; a url takes"),
        ("keepalives=1", "settings of the session: application_name, search_path, "),
        ("SSLMODE=require", "there is no option 'SSLMODE'"),
        ("sslmod=require", "there is no option 'sslmod'"),
        ("connect_timeout=soon", "connect_timeout=soon is no number of seconds"),
        ("target_session_attrs=foo", "target_session_attrs=foo is none of any, primary, standby, "),
        ("port=abc", "port=abc is no port"),
        ("pgbouncer=perhaps", "neither true nor false"),
    ],
)
def test_an_option_that_postgresql_urls_do_not_have(options: str, said: str):
    with pytest.raises(ConfigError) as refused:
        PostgresStore(f"postgresql://u:{SECRET}@h/d?{options}", clock=SYSTEM_CLOCK)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("rest", [f"{SECRET}=x", f"port={SECRET}", f"connect_timeout={SECRET}", f"pgbouncer={SECRET}"])
def test_an_option_that_may_be_of_a_password_is_not_shown(rest: str):
    with pytest.raises(ConfigError, match="as %3F") as refused:
        PostgresStore(f"postgresql://u:12?{rest}@h/d", clock=SYSTEM_CLOCK)
    assert SECRET not in str(refused.value)


# Every place for a password, and what may be left of the URL.
WITH_SECRETS = [
    (f"postgresql://u:{SECRET}@h:5432/d", "postgresql://h:5432/d"),
    (f"postgresql://u:{SECRET}@h1,h2/d", "postgresql://h1,h2/d"),
    (f"postgresql+asyncpg://u:{SECRET}@h/d", "postgresql+asyncpg://h/d"),
    (f"postgresql://h/d?user=u&password={SECRET}", "postgresql://h/d?user=u&password=…"),
    (f"postgresql://h/d?passfile={SECRET}&sslmode=require", "postgresql://h/d?passfile=…&sslmode=require"),
    (f"postgresql://u:a/{SECRET}@h/d", "postgresql://h/d"),
    (f"postgresql://u:a@{SECRET}@h/d", "postgresql://h/d"),
    (f"postgresql://u:a?{SECRET}@h/d", "postgresql:…"),
    (f"postgresql://u:a#{SECRET}@h/d", "postgresql:…"),
    (f"postgresql:u:{SECRET}@h/d", "postgresql:…"),
    (f"mysql://u:{SECRET}@h/d", "mysql://h/d"),
    (f"u:{SECRET}@h/d", "u:…"),
    (f"etcd://u:{SECRET}@h:2379/p", "etcd://h:2379/p"),
]


@pytest.mark.parametrize(("url", "left"), WITH_SECRETS)
def test_a_url_is_shown_without_its_secrets(url: str, left: str):
    assert printable_url(url) == left
    assert Relight(url).store_name == left
    assert SECRET not in repr(load_config(url, {"leases": url}, {}))


@pytest.mark.parametrize("path", ["app.db", "/srv/a@b/app.db", "./a:b"])
def test_a_path_is_shown_as_it_is(path: str):
    assert printable_url(path) == path


@pytest.mark.parametrize(
    "url",
    [
        *(url for url, _ in WITH_SECRETS),
        f"postgresql://u:{SECRET}@h:port/d",
        f"postgresql://u:{SECRET}@h:99999/d",
        f"postgresql://u:{SECRET}[@h/d",
        f"postgresql://u:{SECRET}\u2100@h/d",
        f"postgresql://u:5432/{SECRET}@h/d",
        f"sqlite://u:{SECRET}@h/d",
        f"file://u:{SECRET}@h/d",
        f"//u:{SECRET}@h/d",
    ],
)
def test_no_error_about_a_url_shows_its_password(url: str):
    said = []
    for make in (
        lambda: make_store(load_config(url, {}, {}), SYSTEM_CLOCK),
        lambda: PostgresStore(url, clock=SYSTEM_CLOCK),
        lambda: make_leases(load_config("memory:", {"leases": url}, {}), object(), given=False),  # type: ignore[arg-type, return-value]
    ):
        try:
            said.append(repr(make()))
        except ConfigError as error:
            said.append(str(error))
            assert error.__cause__ is None
            assert error.__suppress_context__ or error.__context__ is None
    assert len(said) == 3
    assert SECRET not in " ".join(said)


def test_what_is_made_of_a_url_does_not_show_its_password_either():
    store = PostgresStore(f"postgresql://u:{SECRET}@h/d", clock=SYSTEM_CLOCK)
    assert SECRET not in repr(store._target)
    assert SECRET not in repr(parse_store_url(f"postgresql://u:{SECRET}@h/d"))
    assert repr(StoreUrl("memory")) == "memory:"
