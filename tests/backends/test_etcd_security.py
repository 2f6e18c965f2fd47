"""TLS, client certificates, users and roles of a real etcd: which clients it accepts, and what the others are told."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.backends.etcd import EtcdLeases, parse_etcd_url
from relight.errors import LeasesUnavailableError
from relight.model.lease import Acquired, Orphaned, Process
from tests.backends.test_etcd_leases import ask, orphans_of
from tests.cli.shop import relight
from tests.servers.etcd import EtcdServer, etcd_or_skip

pytestmark = pytest.mark.xdist_group("etcd-security")  # all these tests share certificates and a server

TTL = 6.0
KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """Signs certificates. All are in one folder, each as NAME.pem and NAME.key."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.file, self._key = self._files(name)
        _openssl("req", "-x509", *KEY, "-days", "2", "-subj", f"/CN={name}", "-out", self.file, "-keyout", self._key)

    def _files(self, name: str) -> tuple[Path, Path]:
        return self._folder / f"{name}.pem", self._folder / f"{name}.key"

    def sign(self, name: str, for_: str) -> tuple[Path, Path]:
        """A certificate and its key. `for_` says which host or user may use it: IP:127.0.0.1, DNS:host."""
        certificate, key = self._files(name)
        request, extension = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extension.write_text(f"subjectAltName={for_}\n")
        _openssl("req", *KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-days", "2", "-CA", self.file, "-CAkey", self._key),
            *("-CAcreateserial", "-extfile", extension, "-out", certificate),
        )
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("openssl"):
        pytest.skip("certificates are made with openssl")
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "authority")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "stranger")


@pytest.fixture(scope="module")
def guarded(
    authority: Authority, stranger: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """An etcd that accepts clients with a certificate of the authority."""
    authority.sign("client", "DNS:client")
    stranger.sign("foreign", "DNS:client")
    with EtcdServer(
        tmp_path_factory.mktemp("etcd"),
        etcd_or_skip(),
        certificate=authority.sign("server", "IP:127.0.0.1"),
        options=("--client-cert-auth", "--trusted-ca-file", str(authority.file)),
    ) as server:
        yield server


@pytest.fixture
async def opened():
    """Opens managers by their URL."""
    managers: list[EtcdLeases] = []

    async def opened(url: str, owner: str = "a#1") -> EtcdLeases:
        leases = EtcdLeases(**parse_etcd_url(url))
        managers.append(leases)
        await leases.open(owner, Process(), TTL)
        await leases.heartbeat()
        return leases

    yield opened
    await asyncio.gather(*(leases.close() for leases in managers))


async def test_a_client_certificate_serves_everything(guarded, opened, folder):
    url = f"etcd://{guarded.endpoint}/?ca={folder}/authority.pem&cert={folder}/client.pem&key={folder}/client.key"
    mine, other = await opened(url), await opened(url, "b#1")
    watch = mine.watch_orphans()
    assert await other.acquire_lease(["r1"]) == {"r1": Acquired()}
    await other.release_all()
    assert await orphans_of(watch, "b#1") == Orphaned("b#1", ("r1",))
    assert await mine.heartbeat() is False


@pytest.mark.parametrize(
    ("query", "advice"),
    [
        ("?ca={0}/authority.pem", "it requires a client certificate; give as cert= and key="),
        ("?ca={0}/authority.pem&cert={0}/foreign.pem&key={0}/foreign.key", "does not accept {0}/foreign.pem"),
        (
            "?ca={0}/stranger.pem&cert={0}/client.pem&key={0}/client.key",
            "not signed by {0}/stranger.pem; give the file of the authority that signed it as ca=",
        ),
        ("?cert={0}/client.pem&key={0}/client.key", "not signed by any authority that this system trusts"),
        ("?ca={0}/authority.pem&cert={0}/client.pem&key={0}/foreign.key", "must be PEM, and the key that of the cert"),
        ("?ca={0}/server.ext", "must be PEM"),
        ("?ca={0}/nowhere.pem", "cannot read etcd's TLS file {0}/nowhere.pem: No such file"),
        ("", "if it speaks TLS, add ?tls=true to the URL, or ?ca=FILE"),
    ],
)
async def test_a_client_that_etcd_refuses_is_told_what_to_do(guarded, opened, folder, query, advice):
    with pytest.raises(LeasesUnavailableError) as refused:
        await opened(f"etcd://{guarded.endpoint}/{query.format(folder)}")
    assert advice.format(folder) in str(refused.value)


async def test_a_certificate_for_another_host(authority, folder, opened, tmp_path):
    certificate = authority.sign("elsewhere", "DNS:elsewhere.example.org")
    with (
        EtcdServer(tmp_path / "etcd", etcd_or_skip(), certificate=certificate) as server,
        pytest.raises(LeasesUnavailableError, match="its certificate was issued for other hosts"),
    ):
        await opened(f"etcd://{server.endpoint}/?ca={authority.file}")


async def test_a_renewed_certificate_is_read_without_a_restart(guarded, opened, folder):
    """The file has another authority's certificate until the right one replaces it."""
    for end in ("pem", "key"):
        shutil.copy(folder / f"foreign.{end}", folder / f"renewed.{end}")
    url = f"etcd://{guarded.endpoint}/?ca={folder}/authority.pem&cert={folder}/renewed.pem&key={folder}/renewed.key"
    leases = EtcdLeases(**parse_etcd_url(url))
    with pytest.raises(LeasesUnavailableError):
        await leases.open("a#1", Process(), TTL)
    for end in ("pem", "key"):
        shutil.copy(folder / f"client.{end}", folder / f"renewed.{end}")
    await leases.open("a#1", Process(), TTL)
    assert await leases.heartbeat() is True
    await leases.close()


# ------------------------------------------------------------------------------------------------------ users and roles --


@pytest.fixture(scope="module")
def users(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd with the users root and `shop`. The role of `shop` is for one prefix. The tokens contain their data."""
    key, public = folder / "token.key", folder / "token.pub"
    _openssl("genrsa", "-out", key, "2048")
    _openssl("rsa", "-in", key, "-pubout", "-out", public)
    token = f"jwt,priv-key={key},pub-key={public},sign-method=RS256,ttl=10m"
    with EtcdServer(tmp_path_factory.mktemp("etcd"), etcd_or_skip(), options=("--auth-token", token)) as server:
        ask(server, "auth/user/add", name="root", password="root")
        ask(server, "auth/role/add", name="root")
        ask(server, "auth/user/grant", user="root", role="root")
        ask(server, "auth/user/add", name="shop", password="s3cret/@")
        ask(server, "auth/role/add", name="shop")
        ask(server, "auth/user/grant", user="shop", role="shop")
        begin, end = (base64.b64encode(one).decode() for one in (b"/shop/", b"/shop0"))
        ask(server, "auth/role/grant", name="shop", perm={"permType": "READWRITE", "key": begin, "range_end": end})
        ask(server, "auth/enable")
        yield server


def ask_as_root(etcd: EtcdServer, path: str, **body: Any) -> None:
    token = ask(etcd, "auth/authenticate", name="root", password="root")["token"]
    request = urllib.request.Request(
        f"http://{etcd.endpoint}/v3/{path}", json.dumps(body).encode(), {"Authorization": token}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


async def test_a_role_for_the_prefix_is_enough(users, opened):
    url = f"etcd://shop:s3cret%2F%40@{users.endpoint}/shop"
    mine, other = await opened(url), await opened(url, "b#1")
    watch = mine.watch_orphans()
    assert await other.acquire_lease(["r1"]) == {"r1": Acquired()}
    assert {session.owner for session in await mine.list_orchestrators()} == {"a#1", "b#1"}
    await other.release_all()
    assert await orphans_of(watch, "b#1") == Orphaned("b#1", ("r1",))


@pytest.mark.parametrize(
    ("login", "prefix", "advice"),
    [
        ("", "shop", "it wants a user: etcd://user:password@host"),
        ("shop:wrong@", "shop", "check both in the URL"),
        ("shop:s3cret%2F%40@", "elsewhere", "role grant-permission ROLE readwrite --prefix=true /elsewhere/"),
    ],
)
async def test_a_user_that_is_refused_is_told_what_to_do(users, opened, login, prefix, advice):
    with pytest.raises(LeasesUnavailableError) as refused:
        await opened(f"etcd://{login}{users.endpoint}/{prefix}")
    assert advice in str(refused.value)
    assert "wrong" not in str(refused.value)
    assert "s3cret" not in str(refused.value)


async def test_a_token_that_has_grown_old_is_renewed(users, opened):
    """etcd refuses tokens that are older than the last change of users and roles."""
    leases = await opened(f"etcd://shop:s3cret%2F%40@{users.endpoint}/shop")
    watch = leases.watch_orphans()
    ask_as_root(users, "auth/role/add", name="another")
    assert [session.owner for session in await leases.list_orchestrators()] == ["a#1"]
    assert await leases.acquire_lease(["r1"]) == {"r1": Acquired()}
    assert await leases.heartbeat() is False
    other = await opened(f"etcd://shop:s3cret%2F%40@{users.endpoint}/shop", "b#1")
    await other.release_all()
    assert await orphans_of(watch, "b#1")


def test_an_orchestrator_that_etcd_refuses_says_so_in_one_line(users, tmp_path):
    done = relight("orchestrator", "--leases", f"etcd://shop:hunter2@{users.endpoint}/shop", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "check both in the URL" in done.stderr
    assert "hunter2" not in done.stderr
