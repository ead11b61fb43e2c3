"""Kinds of files that the commands are given, and the command that each kind is for."""

import json
import re
from typing import Any

from coop_plan.schemas.errors import InvalidInputError

PICKLE_START = b"\x80"
"""First byte of pickles of protocol 2 or later, and of no JSON."""

CHAKRA = re.compile(rb"[\x05-\x7f]\n[\x03-\x7f]\d+\.\d+")
"""Start of a Chakra trace: the length of its metadata, and the version as their first field."""

BUFFERS = re.compile(rb"(?:\xef\xbb\xbf)?[\w ,]*\b(?:lower|start|begin) *,[\w ,]*[\r\n]")
"""Start of a CSV file of buffers: a header with the begin of their lifetimes."""

CHAKRA_FIELDS = {"attr", "dataDeps", "data_deps", "DataDeps", "NodeType", "durationMicros"}
"""Fields of a node in JSON forms of Chakra traces, which PyTorch's own nodes do not have."""

ORIGINAL = "give the JSON file of torch.profiler.ExecutionTraceObserver that it was converted from"

KINDS = {
    "graph": ("a coop-plan graph", "plan it by `coop-plan FILE --budget SIZE`"),
    "plan": ("a coop-plan plan", "it follows GRAPH, as in `coop-plan verify GRAPH PLAN`"),
    "execution trace": (
        "an execution trace of PyTorch",
        "convert it by `coop-plan import TRACE -o model.json`",
    ),
    "Kineto trace": (
        "a Kineto trace, which has times and no tensors",
        "give it beside an execution trace: `coop-plan import TRACE --kineto FILE`",
    ),
    "memory snapshot": (
        "a pickle",
        "convert a memory snapshot by `coop-plan import FILE -o buffers.csv`",
    ),
    "CSV file of buffers": ("a CSV file of buffers", "place them by `coop-plan place FILE`"),
    "Chakra trace": ("a Chakra trace in protobuf", ORIGINAL),
    "Chakra JSON": ("a Chakra trace in JSON", ORIGINAL),
    "archive": ("an archive", "unpack it and give one of its files"),
}
"""By kind its noun, and the remedy."""


def check_kind(data: bytes, source: str, *wanted: str) -> None:
    """Check that a file which cannot be read is of one of the kinds `wanted`, or of no known one.

    Raises:
        InvalidInputError: the file's kind, and what to do.
    """
    kind = _kind(data)
    if kind and kind not in wanted:
        noun, remedy = KINDS[kind]
        first = "an" if wanted[0][0] in "aeiou" else "a"
        raise InvalidInputError(f"{noun}, not {first} {wanted[0]}: {remedy}", source=source)


def _kind(data: bytes) -> str:
    if data.startswith(PICKLE_START):
        return "memory snapshot"
    if data[257:262] == b"ustar" or data.startswith(b"PK\x03\x04"):
        return "archive"
    if CHAKRA.match(data):
        return "Chakra trace"
    if BUFFERS.match(data):
        return "CSV file of buffers"
    try:
        text = data.decode(json.detect_encoding(data)).lstrip()
        document, end = json.JSONDecoder().raw_decode(text)
        rest = text[end:].lstrip()
        if rest:  # one document after another: Chakra's metadata, then its nodes
            document = [document, json.JSONDecoder().raw_decode(rest)[0]]
    except (ValueError, RecursionError):
        return ""
    return _kind_of_json(document)


def _kind_of_json(document: Any) -> str:
    nodes = document.get("nodes") if isinstance(document, dict) else document
    if isinstance(nodes, list) and any(_is_chakra_node(node) for node in nodes[:10]):
        return "Chakra JSON"
    if isinstance(document, list):
        events = [event for event in document[:10] if isinstance(event, dict)]
        return "Kineto trace" if any("ph" in event for event in events) else ""
    if not isinstance(document, dict):
        return ""
    for kind in ("graph", "plan"):
        if str(document.get("schema")).startswith(f"coop-plan/{kind}/"):
            return kind
    if isinstance(document.get("traceEvents"), list):
        return "Kineto trace"
    return "execution trace" if isinstance(document.get("nodes"), list) else ""


def _is_chakra_node(node: Any) -> bool:
    if not isinstance(node, dict):
        return False
    return bool(CHAKRA_FIELDS & node.keys()) or str(node.get("type")).endswith("_NODE")
