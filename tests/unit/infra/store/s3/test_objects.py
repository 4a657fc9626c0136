"""Objects of a bucket behind a connection that fails."""

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf.testing.fault_proxy import FaultProxy

from flows.commands.doctor import tried
from infra import env
from infra.errors import (
    ConfigError,
    FencedError,
    StoreDeniedError,
    StoreError,
    StoreUnreachableError,
)
from infra.store.s3 import objects as objects_module
from infra.store.s3.objects import Found, Objects, S3Address
from infra.store.stage_log import Holder
from infra.store.storage import open_storage


@pytest.fixture
def objects(uri: str) -> Objects:
    return Objects(S3Address.parse(uri))


ASK: dict[str, Callable[[Objects], Any]] = {
    "GET": lambda objects: objects.get("a"),
    "PUT": lambda objects: objects.put("a", b"x"),
}


@pytest.mark.parametrize("method", ASK)
@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        (403, StoreDeniedError, "403 AccessDenied; let these credentials"),
        (500, StoreUnreachableError, "500 InternalError .*run again when it answers"),
        (503, StoreUnreachableError, "answers 503"),
        ("cut request", StoreUnreachableError, "does not answer .*AWS_ENDPOINT_URL"),
        (418, StoreError, "answers 418 .*names a service of S3"),
    ],
)
def test_answers_are_told_apart(
    objects: Objects, proxy: FaultProxy, method: str, action: Any, error: type, words: str
) -> None:
    proxy.fail(action, method, times=9)
    with pytest.raises(error, match=words) as raised:
        ASK[method](objects)
    assert type(raised.value) is error
    assert str(raised.value).startswith(f"{objects.place('a')}: ")
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, OSError), "as a disk that fails, it is no absence"
    proxy.heal()
    assert objects.get("a") is None


def test_only_an_absent_key_is_absent(objects: Objects, proxy: FaultProxy) -> None:
    assert objects.get("a") is None
    proxy.fail(404, "GET")
    objects.put("a", b"x")
    assert objects.get("a") is None, "whoever has credentials may say so"
    assert objects.get("a") == b"x"
    elsewhere = Objects(S3Address("no-such-bucket", ""))
    with pytest.raises(ConfigError, match=r"s3://no-such-bucket/a: .*NoSuchBucket; create"):
        elsewhere.get("a")
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        elsewhere.listed("")


def test_a_service_that_is_gone_is_unreachable(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    with pytest.raises(StoreUnreachableError, match=r"127\.0\.0\.1:1 does not answer"):
        Objects(S3Address.parse(uri)).get("a")


@pytest.mark.parametrize("times", [1, 2, 3])
def test_fault_row_28_a_failure_that_passes_is_not_told(
    objects: Objects, proxy: FaultProxy, times: int
) -> None:
    data = bytes(range(256)) * 1000
    proxy.fail(500, "PUT", times=1)
    objects.put("a", data)
    proxy.fail("cut answer", "GET", times=times)
    if times < objects_module.NUM_READS:
        assert objects.get("a") == data
    else:
        with pytest.raises(StoreUnreachableError):
            objects.get("a")
    assert objects.get("a", 100, 300) == data[100:300]


@pytest.mark.parametrize("action", ["lose answer", "cut request", 500, 409])
@pytest.mark.parametrize("is_taken", [False, True])
def test_fault_row_28_unanswered_create_learns_who_owns_the_name(
    objects: Objects, proxy: FaultProxy, action: Any, is_taken: bool
) -> None:
    objects.require_conditions()
    if is_taken:
        assert objects.create("entry", b"another's")
    proxy.fail(action, "PUT", "entry", times=2)  # as often as botocore asks by itself
    assert objects.create("entry", b"mine") is not is_taken
    assert objects.get("entry") == (b"another's" if is_taken else b"mine")


def test_who_never_gets_an_answer_is_told_so(
    objects: Objects, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "CREATE_DEADLINE_S", 0.0)
    objects.require_conditions()
    for method in ("PUT", "GET"):
        proxy.fail("lose answer", method, "entry", times=99)
    with pytest.raises(StoreUnreachableError):
        objects.create("entry", b"mine")


def _claim(uri: str, number: int, start: Any, out: Any) -> None:
    objects = Objects(S3Address.parse(uri))
    objects.require_conditions()
    start.wait(60)
    out.append(objects.create("entry", b"%d" % number))


def test_of_ten_threads_one_creates_a_name(objects: Objects, uri: str) -> None:
    outcomes: list[bool] = []
    start = threading.Barrier(10)
    threads = [
        threading.Thread(target=_claim, args=(uri, number, start, outcomes)) for number in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == [False] * 9 + [True]


def _claim_in_process(uri: str, number: int, start: Any, out: Any) -> None:
    won: list[bool] = []
    _claim(uri, number, start, won)
    out.put(won[0])


def test_one_of_ten_processes_creates_a_name_if_answers_are_lost(
    objects: Objects, uri: str, proxy: FaultProxy
) -> None:
    proxy.fail("lose answer", "PUT", "entry", times=4)
    context = multiprocessing.get_context("fork")
    start, out = context.Barrier(10), context.Queue()
    processes = [
        context.Process(target=_claim_in_process, args=(uri, number, start, out))
        for number in range(10)
    ]
    for process in processes:
        process.start()
    outcomes = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(outcomes) == [False] * 9 + [True]


def test_service_ignoring_conditions_is_refused_before_any_hold(
    objects: Objects, uri: str, proxy: FaultProxy
) -> None:
    proxy.fail("ignore condition", "PUT", times=99)
    with pytest.raises(ConfigError, match=r"^storage: .* ignores If-None-Match.*; need a service"):
        objects.create("entry", b"mine")
    with pytest.raises(ConfigError, match="ignores If-None-Match"):
        open_storage(uri).probe()
    check = tried("store", lambda: open_storage(uri).probe())
    assert (check.status, "ignores If-None-Match" in check.detail) == ("error", True)
    assert objects.listed("") == []
    proxy.heal()
    assert objects.create("entry", b"mine")
    assert open_storage(uri).probe().startswith(f"{uri} at {proxy.address}: of two creates")


@pytest.mark.parametrize("num_shown", [0, 1])
def test_fault_row_28_stale_listing_cannot_hold_a_taken_entry(
    uri: str, monkeypatch: pytest.MonkeyPatch, num_shown: int
) -> None:
    fingerprint, first = "f" * 64, Holder(id="first", process="elsewhere")
    attempts = open_storage(uri).attempts
    for number in range(num_shown + 1):
        attempts.hold(fingerprint, first, number)
    listed = Objects.listed

    def before(self: Objects, prefix: str, after: str = "") -> list[Found]:
        found = listed(self, prefix, after)
        return found[:num_shown] if prefix == f"stages/{fingerprint}/" else found

    monkeypatch.setattr(Objects, "listed", before)
    late = open_storage(uri).attempts
    assert len(late.entries(fingerprint)) == num_shown
    with pytest.raises(FencedError, match=f"entry {num_shown} of .* held by first"):
        late.hold(fingerprint, Holder(id="late", process="here"), num_shown)


def test_missing_credentials_are_told(uri: str, proxy: FaultProxy) -> None:
    program = (
        "import sys; from infra.store.storage import open_storage\n"
        "from infra.errors import StoreDeniedError\n"
        "try: open_storage(sys.argv[1]).lookup('f' * 64)\n"
        "except StoreDeniedError as error: print(error)"
    )
    nothing = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    ended = subprocess.run(
        [sys.executable, "-c", program, uri],
        env=env.child_environment(AWS_EC2_METADATA_DISABLED="true", **nothing),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "credentials; name a profile with AWS_PROFILE" in ended.stdout


@pytest.mark.parametrize(
    "uri",
    [
        "s3://me:hush@bucket/x",
        "s3://bucket/x?secret=hush",
        "s3://bucket/hush@x",
        "s3://bucket/#hush",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"^storage: got an s3:// address with more") as raised:
        open_storage(uri)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3://B/x", "s3://ab/x", "s3://bucket/a/../b", "s3://bucket/a b"]
)
def test_what_is_no_address_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"^storage: got 's3:.*need s3://bucket/prefix"):
        open_storage(uri)


names = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,9}", fullmatch=True)


@given(st.from_regex(r"[a-z0-9][a-z0-9.-]{1,30}[a-z0-9]", fullmatch=True), st.lists(names))
def test_an_address_is_read_back(bucket: str, parts: list[str]) -> None:
    address = S3Address(bucket, "/".join(parts))
    assert S3Address.parse(address.uri) == address
    assert S3Address.parse(f"{address.uri}/") == address


@given(st.text(alphabet="abs3:/@?#. %-_\x00é"))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = S3Address.parse(f"s3://{text}")
    except ConfigError:
        return
    assert address.key("x").startswith(address.prefix)
    assert ".." not in address.key("").split("/")
    assert "@" not in address.uri
