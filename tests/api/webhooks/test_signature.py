"""Signatures of Standard Webhooks."""

import base64

import pytest

from api.webhooks.signature import headers
from tokenmill.settings.credentials import parse_secrets


def test_the_example_of_the_reference_libraries() -> None:
    (key,) = parse_secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    message_id, timestamp, body = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    assert headers([key], message_id, timestamp, body) == {
        "webhook-id": message_id,
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_each_key_signs() -> None:
    """A receiver can migrate to the next key without missing a webhook."""
    secrets = [f"whsec_{base64.b64encode(letter * 24).decode()}" for letter in (b"a", b"b")]
    both = headers(parse_secrets(" ".join(secrets)), "msg_1", 1, b"x")["webhook-signature"]
    alone = [headers(parse_secrets(secret), "msg_1", 1, b"x")["webhook-signature"] for secret in secrets]
    assert both.split(" ") == alone
    assert len(set(alone)) == 2


@pytest.mark.parametrize("size", [24, 32, 64])
def test_key_sizes(size: int) -> None:
    assert parse_secrets(f"whsec_{base64.b64encode(b'k' * size).decode()}") == (b"k" * size,)


@pytest.mark.parametrize(
    "secret",
    [
        "x",
        "whsec_",
        base64.b64encode(b"k" * 32).decode(),
        f"whsec_{base64.b64encode(b'k' * 23).decode()}",
        f"whsec_{base64.b64encode(b'k' * 65).decode()}",
        f"whsec_{base64.b64encode(b'k' * 32).decode()[:-1]}",
        f"whsec_{base64.b64encode(b'k' * 32).decode()}!",
        f"WHSEC_{base64.b64encode(b'k' * 32).decode()}",
    ],
)
def test_bad_secrets_are_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="whsec_ and the base64 of 24 to 64 bytes"):
        parse_secrets(secret)
