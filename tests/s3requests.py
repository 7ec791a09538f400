"""Requests of S3's protocol, told apart: which operation, in boto3's words, on which key. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from tests.httpwire import Head


@dataclass
class Request:
    """One request, and what became of it. *headers*: names in lower case; *query*: keys without value have ""."""

    number: int
    at_s: float
    operation: str
    method: str
    path: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    fault: str | None = None
    body_bytes: int = 0
    upstream_status: int | None = None  # None: the store never saw it whole, or did not answer
    status: int | None = None  # what the client was told; None: nothing
    done: bool = False

    @property
    def access_key(self) -> str:
        """Who signed it."""
        return self.headers.get("authorization", "").partition("Credential=")[2].split("/")[0]


def request_of(head: Head, number: int, at_s: float) -> Request:
    """What a head asks for. *number*: from 1, in order of arrival; *at_s*: when, monotonic."""
    method, target, _ = head.first.split(" ", 2)
    path, _, query_text = target.partition("?")
    bucket, _, key = unquote(path).removeprefix("/").partition("/")
    query = dict(parse_qsl(query_text, keep_blank_values=True))
    headers = {name.lower(): value for name, value in head.headers}
    operation = operation_of(method, key, query, headers)
    return Request(number, at_s, operation, method, path, bucket, key, query, headers)


def operation_of(method: str, key: str, query: dict[str, str], headers: dict[str, str]) -> str:
    """The request in boto3's words: put_object, upload_part, list_objects_v2 ..."""
    if not key:
        return _bucket_operation(method, query)
    copies = "x-amz-copy-source" in headers
    part = "uploadId" in query
    names = {
        ("PUT", False): "copy_object" if copies else "put_object",
        ("PUT", True): "upload_part_copy" if copies else "upload_part",
        ("POST", False): "create_multipart_upload",
        ("POST", True): "complete_multipart_upload",
        ("GET", False): "get_object",
        ("GET", True): "list_parts",
        ("HEAD", False): "head_object",
        ("DELETE", False): "delete_object",
        ("DELETE", True): "abort_multipart_upload",
    }
    return names.get((method, part), f"other_{method.lower()}")


def _bucket_operation(method: str, query: dict[str, str]) -> str:
    if method == "GET":
        for name, operation in (
            ("uploads", "list_multipart_uploads"),
            ("list-type", "list_objects_v2"),
            ("location", "get_bucket_location"),
        ):
            if name in query:
                return operation
        return "list_objects"
    names = {"PUT": "create_bucket", "HEAD": "head_bucket", "DELETE": "delete_bucket"}
    return names.get(method, "delete_objects" if "delete" in query else f"other_{method.lower()}")
