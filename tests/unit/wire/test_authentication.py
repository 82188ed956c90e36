from __future__ import annotations

import copy
import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingle.errors import ConfigurationError
from mingle.wire import authentication
from mingle.wire.authentication import (
    DATAGRAM_MAC_BYTES,
    FRAME_MAC_BYTES,
    NONCE_BYTES,
    FrameKeys,
    JobKey,
    join_fields,
    new_nonce,
)

SECRET = b"correct horse battery staple"
JOB = "resnet"


def hkdf(salt: bytes, key_material: bytes, info: bytes) -> bytes:
    """The first 32 bytes of HKDF-SHA256, written after RFC 5869, section 2."""
    extracted = hmac.new(salt, key_material, hashlib.sha256).digest()
    return hmac.new(extracted, info + bytes([1]), hashlib.sha256).digest()


def test_our_reading_of_hkdf_gives_the_vector_of_rfc_5869_appendix_a1() -> None:
    expected = bytes.fromhex("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf")
    assert hkdf(bytes(range(0x0D)), b"\x0b" * 22, bytes(range(0xF0, 0xFA))) == expected


def test_job_key_is_hkdf_of_the_stretched_secret_and_the_job() -> None:
    salt = b"mingle secret v1"
    stretched = hashlib.scrypt(SECRET, salt=salt, n=16_384, r=8, p=1, maxmem=64 * 1024 * 1024, dklen=32)
    key = hkdf(b"mingle job key v1", stretched, "задача".encode())
    message = b"\0\0\0\x08datagram\0\0\0\x05bytes"
    expected = hmac.new(key, message, hashlib.sha256).digest()
    assert JobKey(SECRET, "задача").mac(b"datagram", b"bytes") == expected


def test_a_secret_is_stretched_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a moment, and one secret may serve many jobs: those of a network that somebody else invents, too."""
    stretched: list[bytes] = []

    def scrypt(secret: bytes, **_: object) -> bytes:
        stretched.append(secret)
        return hashlib.sha256(secret).digest()

    monkeypatch.setattr(authentication, "_derived", {})
    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    for number in range(10):
        JobKey(b"one", f"job {number}")
        JobKey(b"other", JOB)
    assert stretched == [b"one", b"other"]
    for number in range(100):
        JobKey(f"secret number {number}".encode(), JOB)
    assert len(authentication._derived) == authentication._REMEMBERED_SECRETS
    assert not any(b"secret" in name for name in authentication._derived)


@pytest.mark.parametrize("error", [AttributeError("no scrypt"), ValueError("disabled for FIPS")])
def test_without_scrypt_a_secret_is_an_error_that_says_so(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def scrypt(_secret: bytes, **_: object) -> bytes:
        raise error

    monkeypatch.setattr(authentication, "_derived", {})
    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    with pytest.raises(ConfigurationError, match="scrypt") as raised:
        JobKey(SECRET, JOB)
    assert SECRET.decode() not in str(raised.value)


def test_mac_is_as_long_as_the_datagram_format_says() -> None:
    assert len(JobKey(SECRET, JOB).mac(b"datagram", b"")) == DATAGRAM_MAC_BYTES


def test_verify_takes_the_mac_of_the_same_key_purpose_and_data() -> None:
    tag = JobKey(SECRET, JOB).mac(b"purpose", b"data")
    assert JobKey(SECRET, JOB).verify(b"purpose", b"data", tag)


@pytest.mark.parametrize(
    ("secret", "job", "purpose", "data"),
    [
        pytest.param(b"another", JOB, b"purpose", b"data", id="secret"),
        pytest.param(SECRET, "resnet2", b"purpose", b"data", id="job"),
        pytest.param(SECRET, JOB, b"purposed", b"ata", id="purpose"),
        pytest.param(SECRET, JOB, b"purpose", b"date", id="data"),
    ],
)
def test_verify_refuses_when_anything_differs(secret: bytes, job: str, purpose: bytes, data: bytes) -> None:
    tag = JobKey(SECRET, JOB).mac(b"purpose", b"data")
    assert not JobKey(secret, job).verify(purpose, data, tag)


@pytest.mark.parametrize("tag", [b"", bytes(31), bytes(32), bytes(33)])
def test_verify_refuses_tags_of_any_length(tag: bytes) -> None:
    assert not JobKey(SECRET, JOB).verify(b"purpose", b"data", tag)


def test_a_shortened_tag_is_no_tag() -> None:
    key = JobKey(SECRET, JOB)
    assert not key.verify(b"purpose", b"data", key.mac(b"purpose", b"data")[:-1])


@pytest.mark.parametrize("keep", [repr, str, "{}".format])
def test_keys_do_not_show_themselves(keep: object) -> None:
    assert callable(keep)
    key = JobKey(SECRET, JOB)
    for shown in (keep(key), keep(FrameKeys(key, b"", host=True))):
        assert shown.endswith("(…)")


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(st.binary(max_size=8), max_size=5), st.lists(st.binary(max_size=8), max_size=5))
def test_joined_fields_are_equal_only_for_equal_lists(first: list[bytes], second: list[bytes]) -> None:
    assert (join_fields(first) == join_fields(second)) == (first == second)


def test_fields_do_not_run_into_each_other() -> None:
    lists = ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""])
    assert len({join_fields(fields) for fields in lists}) == len(lists)


def test_nonces_are_fresh() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}


def frame_keys() -> tuple[FrameKeys, FrameKeys]:
    key = JobKey(SECRET, JOB)
    return FrameKeys(key, b"transcript", host=False), FrameKeys(key, b"transcript", host=True)


def test_frames_are_taken_in_the_order_in_which_they_were_sealed() -> None:
    member, host = frame_keys()
    for body in (b"one", b"two", b"two"):
        tag = member.seal(body)
        assert len(tag) == FRAME_MAC_BYTES
        assert host.check(body, tag)


def test_a_frame_counts_once() -> None:
    member, host = frame_keys()
    tag = member.seal(b"one")
    assert host.check(b"one", tag)
    assert not host.check(b"one", tag)


def test_a_frame_out_of_order_is_refused() -> None:
    member, host = frame_keys()
    member.seal(b"one")
    assert not host.check(b"two", member.seal(b"two"))


def test_a_frame_is_no_frame_of_the_other_direction() -> None:
    member, _ = frame_keys()
    tag = copy.copy(member).seal(b"one")
    assert not member.check(b"one", tag)


def test_a_frame_of_another_connection_is_refused() -> None:
    member, _ = frame_keys()
    other = FrameKeys(JobKey(SECRET, JOB), b"another transcript", host=True)
    assert not other.check(b"one", member.seal(b"one"))
