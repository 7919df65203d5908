"""Accepted URLs of webhooks, and public addresses."""

import pytest

from api.schemas.webhook_url import Target, is_public, parse_url


@pytest.mark.parametrize(
    ("url", "target", "authority"),
    [
        ("http://example.org", Target(False, "example.org", 80, "/"), "example.org"),
        ("HTTPS://Example.ORG/A?b=C#d", Target(True, "example.org", 443, "/A?b=C"), "example.org"),
        ("https://example.org:80/", Target(True, "example.org", 80, "/"), "example.org:80"),
        ("http://example.org:/x", Target(False, "example.org", 80, "/x"), "example.org"),
        ("http://my_host.:8080?q", Target(False, "my_host.", 8080, "/?q"), "my_host.:8080"),
        ("http://192.0.2.1/", Target(False, "192.0.2.1", 80, "/"), "192.0.2.1"),
        ("http://[2001:DB8::1]:81/", Target(False, "2001:db8::1", 81, "/"), "[2001:db8::1]:81"),
    ],
)
def test_the_parts_of_a_url(url: str, target: Target, authority: str) -> None:
    assert parse_url(url) == target
    assert target.authority == authority


@pytest.mark.parametrize(
    "url",
    [
        "", "/hook", "example.org", "//example.org/", "ftp://example.org/", "file:///etc/passwd",
        "javascript:alert(1)", "gopher://example.org/", "http:example.org", "http://", "http:///x", "http://:80/",
        "http://example.org:0/", "http://example.org:65536/", "http://example.org:x/", "http://example.org:1:2/",
        "http://user@example.org/", "http://user:password@example.org/", "http://example.org\\@127.0.0.1/",
        "http://127.0.0.1#@example.org/\n", "http://example.org/a b", "http://example.org/\r\nX: y",
        "http://example.org/\x00", "http://ex\u00e4mple.org/", "http://example.org/\u2028", " http://example.org/",
        "http://-a/", "http://a..b/", f"http://{'a' * 64}.org/", f"http://{'a.' * 127}org/",
        "http://[::1/", "http://[::1]x/", "http://x[::1]/", "http://[fe80::1%25eth0]/", "http://[v1.x]/",
        "http://[127.0.0.1]/", "http://::1/", "http://exam%70le.org/", "http://a,b/", "http://*/",
        "http://2130706433/", "http://0x7f.1/", "http://127.1/", "http://0177.0.0.1/", "http://0/", "http://127.0.0.1./",
    ],
)  # fmt: skip
def test_ambiguous_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must"):
        parse_url(url)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1", "100.100.100.200", "0.0.0.0", "0.1.2.3", "255.255.255.255", "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "192.88.99.1",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00::1", "fec0::1", "ff02::1", "ff0e::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::8.8.8.8",
        "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "2002:7f00:1::", "2002:808:808::1",
        "2001:0:808:808::1", "2001:db8::1", "3fff::1", "100::1", "5f00::1", "localhost",
        "localhost.", "a.localhost",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.0.1", "100.128.0.1", "2606:4700::1111",
        "2a00:1450:4001::1", "::ffff:8.8.8.8", "example.org", "localhost.example.org", "notlocalhost",
    ],
)  # fmt: skip
def test_public_addresses(address: str) -> None:
    assert is_public(address)
