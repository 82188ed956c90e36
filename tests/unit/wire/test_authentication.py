from __future__ import annotations

import hashlib
import hmac

import pytest

from mingle.errors import ConfigurationError
from mingle.wire import authentication
from mingle.wire.authentication import NONCE_BYTES, FrameKeys, JobKey, new_nonce

SECRET = b"correct horse battery staple"
JOB = "resnet"


def hkdf(salt: bytes, key_material: bytes, info: bytes) -> bytes:
    """The first 32 bytes of HKDF-SHA256, written after RFC 5869, section 2."""
    extracted = hmac.new(salt, key_material, hashlib.sha256).digest()
    return hmac.new(extracted, info + bytes([1]), hashlib.sha256).digest()


def test_job_key_is_hkdf_of_the_stretched_secret_and_the_job() -> None:
    rfc_5869_a1 = bytes.fromhex("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf")
    assert hkdf(bytes(range(0x0D)), b"\x0b" * 22, bytes(range(0xF0, 0xFA))) == rfc_5869_a1
    salt = b"mingle secret v1"
    stretched = hashlib.scrypt(SECRET, salt=salt, n=16_384, r=8, p=1, maxmem=64 * 1024 * 1024, dklen=32)
    key = hkdf(b"mingle job key v1", stretched, "задача".encode())
    expected = hmac.new(key, b"\0\0\0\x08datagram\0\0\0\x05bytes", hashlib.sha256).digest()
    assert JobKey(SECRET, "задача").mac(b"datagram", b"bytes") == expected


def test_a_secret_is_stretched_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a moment, and one secret may serve many jobs: those of a network that somebody else invents, too."""
    stretched: list[bytes] = []
    remembered: dict[bytes, bytes] = {}

    def scrypt(secret: bytes, **_: object) -> bytes:
        stretched.append(secret)
        return hashlib.sha256(secret).digest()

    monkeypatch.setattr(authentication, "_derived", remembered)
    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    for number in range(10):
        JobKey(b"one", f"job {number}")
        JobKey(b"other", JOB)
    assert stretched == [b"one", b"other"]
    for number in range(100):
        JobKey(f"secret number {number}".encode(), JOB)
    assert len(remembered) == authentication._REMEMBERED_SECRETS
    assert not any(b"secret" in name for name in remembered)


@pytest.mark.parametrize("error", [AttributeError("no scrypt"), ValueError("disabled for FIPS")])
def test_without_scrypt_a_secret_is_an_error_that_does_not_show_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scrypt(_secret: bytes, **_: object) -> bytes:
        raise error

    monkeypatch.setattr(authentication, "_derived", {})
    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    with pytest.raises(ConfigurationError, match="scrypt") as raised:
        JobKey(SECRET, JOB)
    assert SECRET.decode() not in str(raised.value)


@pytest.mark.parametrize(
    ("secret", "job", "purpose", "data"),
    [
        pytest.param(b"another", JOB, b"purpose", b"data", id="secret"),
        pytest.param(SECRET, "resnet2", b"purpose", b"data", id="job"),
        pytest.param(SECRET, JOB, b"purposed", b"ata", id="where the purpose ends"),
        pytest.param(SECRET, JOB, b"purpose", b"date", id="data"),
    ],
)
def test_verify_refuses_when_anything_differs(secret: bytes, job: str, purpose: bytes, data: bytes) -> None:
    tag = JobKey(SECRET, JOB).mac(b"purpose", b"data")
    assert JobKey(SECRET, JOB).verify(b"purpose", b"data", tag)
    assert not JobKey(SECRET, JOB).verify(b"purpose", b"data", tag[:-1])
    assert not JobKey(secret, job).verify(purpose, data, tag)


def test_keys_do_not_show_themselves() -> None:
    key = JobKey(SECRET, JOB)
    assert (f"{key}", f"{FrameKeys(key, b'', host=True)}") == ("JobKey(…)", "FrameKeys(…)")


def test_nonces_are_fresh() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}


def test_a_frame_is_taken_once_in_its_place_and_direction_on_its_connection() -> None:
    def keys(*, host: bool, transcript: bytes = b"transcript") -> FrameKeys:
        return FrameKeys(JobKey(SECRET, JOB), transcript, host=host)

    member, host = keys(host=False), keys(host=True)
    first, second, third = (member.seal(body) for body in (b"one", b"two", b"two"))
    assert not keys(host=False).check(b"one", first), "the other direction"
    assert not keys(host=True, transcript=b"another").check(b"one", first), "another connection"
    assert not keys(host=True).check(b"two", second), "out of order"
    assert host.check(b"one", first)
    assert host.check(b"two", second)
    assert not host.check(b"two", second), "twice"
    assert not host.check(b"two", third), "what was refused has its place as well"
