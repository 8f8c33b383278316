"""Record what a real Phoenix exports, as fixtures: in an environment with arize-phoenix, from the repository's root.

    PHOENIX_WORKING_DIR=/tmp/phoenix phoenix serve &   # on 127.0.0.1:6006
    python plugins/astuner_flywheel/tests/programs/record_phoenix.py http://127.0.0.1:6006

sends the recorded spans of OpenInference there, annotates one, and writes recorded/phoenix*-VERSION.*.
"""

import base64
import importlib.metadata
import json
import sys
import time
import urllib.request
from pathlib import Path

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from phoenix.client import Client

RECORDED = Path(__file__).parent.parent / "recorded"
IDS = {"traceId", "spanId", "parentSpanId"}


def with_base64_ids(value):
    if isinstance(value, list):
        return [with_base64_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        k: base64.b64encode(bytes.fromhex(v)).decode() if k in IDS else with_base64_ids(v) for k, v in value.items()
    }


def main(url):
    (sent,) = RECORDED.glob("openinference-*.jsonl")
    for line in sent.read_text().splitlines():
        body = ParseDict(with_base64_ids(json.loads(line)), ExportTraceServiceRequest()).SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/traces", body, headers)).close()
    time.sleep(5)  # it stores them in the background
    client, version = Client(base_url=url), importlib.metadata.version("arize-phoenix")
    frame = client.spans.get_spans_dataframe(project_identifier="default")
    frame.to_json(RECORDED / f"phoenix_frame-{version}.jsonl", orient="records", lines=True)
    frame.to_csv(RECORDED / f"phoenix_frame-{version}.csv")
    span_id = frame[frame["span_kind"] == "LLM"]["context.span_id"].iloc[0]
    client.spans.add_span_annotation(
        span_id=span_id, annotation_name="user", annotator_kind="HUMAN", label="thumbs-up", score=1, sync=True
    )
    api = f"{url}/v1/projects/default"
    for name, path in (("phoenix", "spans?limit=100"), ("phoenix_annotations", f"span_annotations?span_ids={span_id}")):
        with urllib.request.urlopen(f"{api}/{path}") as answer:
            (RECORDED / f"{name}-{version}.json").write_bytes(answer.read())


if __name__ == "__main__":
    main(*sys.argv[1:])
