"""Redaction removes every secret, and changes nothing else."""

from __future__ import annotations

import time

import pytest

from pipeline.base import redact as module
from pipeline.base.redact import MASK, redact, redact_json, secret_in

SECRETS = [
    ("cannot reach http://anna:pa55word@head:8265/api", "pa55word"),
    ("s3://AKIAIOSFODNN7EXAMPLE:wJalr/XUtnF+EMI@bucket/x", "wJalr/XUtnF+EMI"),
    ("https://ghp_abcdef0123456789@host/x", "ghp_abcdef0123456789"),
    ("GET https://b.s3.amazonaws.com/k?versionId=3&X-Amz-Signature=deadbeef01&X-Amz-Expires=60 failed", "deadbeef01"),
    ("https://acc.blob.core.windows.net/c/b?sv=2022-11-02&sr=b&sig=q1w2e3r4%3D", "q1w2e3r4%3D"),
    ("https://storage.googleapis.com/b/o?GoogleAccessId=me@x.iam&Signature=Zm9vYmFy", "Zm9vYmFy"),
    ("https://example.org/a.parquet?access_token=0a1b2c3d", "0a1b2c3d"),
    ("headers {'Authorization': 'Bearer 6f1c7a5e9b7d4c3e'}", "6f1c7a5e9b7d4c3e"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI/K7MDENG"),
    ("S3FileSystem(key='0123456789abcdef01', secret='fedcba9876543210fe')", "fedcba9876543210fe"),
    ('{"aws_session_token": "IQoJb3JpZ2luX2VjE"}', "IQoJb3JpZ2luX2VjE"),
    ("credentials ASIAIOSFODNN7EXAMPLE expired", "ASIAIOSFODNN7EXAMPLE"),
    ("401 for hf_abcdefghijklmnopqrstuvwx", "hf_abcdefghijklmnopqrstuvwx"),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY----- after", "MIIEow"),
]
HARMLESS = [
    "http://127.0.0.1:8265/api/jobs?limit=3", "s3://bucket/path/crawl-*.warc.gz", "https://example.org/design?page=2",
    "tokens: 12345678, documents 99", "eos token: '<|endoftext|>'", "mail anna@example.org", "file:///data/a@b.txt",
    "10.0.0.1:6379", "http://head:8265 does not answer", "signature of 7 documents", "key: datasets.clean.steps",
    "basic tests pass", "http://head:8265/a and b@c",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_a_secret_is_masked_and_the_rest_stays(text, secret):
    said = redact(text)
    assert secret not in said and MASK in said
    assert redact(said) == said
    assert said.split()[0][:4] == text.split()[0][:4] or text.startswith("-----")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_is_left_alone(text):
    assert redact(text) == text


def test_what_this_process_knows_is_masked_wherever_it_stands(monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("the-clusters-own-token\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-value")
    monkeypatch.setenv("TOKENMILL_STORE", "/data/the-store")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-and-longer")
    said = redact(f"x(s3cr3t-value) the-clusters-own-tokenY {token} /data/the-store false-and-longer")
    assert said == f"x({MASK}) {MASK}Y {token} /data/the-store false-and-longer"


def test_json_is_redacted_in_depth():
    found = redact_json({"a": ["http://u:pw1234@h/x", 3, None, {"http://k:pw5678@h": True}]})
    assert found == {"a": [f"http://{MASK}@h/x", 3, None, {f"http://{MASK}@h": True}]}


@pytest.mark.parametrize(("url", "why"), [
    ("http://anna:pa55@host/x", "password"), ("ftp://token@host/x", "password"),
    ("s3://AKIA:a/b+c@bucket/x", "password"), ("https://b/x?a=1&X-Amz-Signature=0", "signature"),
    ("https://b/x?sig=0", "signature"), ("s3://bucket/x", None), ("https://host:8080/x?page=1&design=2", None),
    ("data/a@b.txt", None), ("http://[bad/x?sig=1", None)])
def test_urls_that_may_not_be_kept(url, why):
    assert (secret_in(url) is None) if why is None else why in secret_in(url)


@pytest.mark.parametrize("text", ["http://" * 20000, "a://" + "b:" * 50000, "-----BEGIN PRIVATE KEY-----" * 4000,
                                  "token=" * 30000, "?" + "token" * 40000, "bearer " * 30000])
def test_no_text_makes_it_slow(text):
    start = time.thread_time()
    redact(text)
    assert time.thread_time() - start < 5


def test_the_rules_of_urls_are_those_that_secret_in_uses():
    assert all("://" in pattern.pattern for pattern, _ in module._RULES[1:3])
