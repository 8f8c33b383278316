"""Record what an SDK sends, as a fixture: PYTHON_WITH_THE_SDK SDK DISTRIBUTION, from the repository's root.

    .venv/bin/python plugins/astuner_flywheel/tests/programs/record_traces.py venv/bin/python openllmetry \
        opentelemetry-instrumentation-openai

writes tests/recorded/SDK-VERSION.jsonl: each OTLP request as OTLP's JSON, a line.
"""

import base64
import gzip
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

HERE = Path(__file__).parent
QUESTIONS = ["2 + 3?", "10 + 4?"]
MESSAGES = {"/v1/traces": ExportTraceServiceRequest, "/v1/logs": ExportLogsServiceRequest}


def scripted(body):
    """A model that calls the tool for a sum, and repeats what it says."""
    last = body["messages"][-1]
    text = last["content"] if isinstance(last["content"], str) else last["content"][0]["text"]
    said = {"role": "assistant", "content": f"The sum is {text}."}
    numbers = re.findall(r"\d+", text)
    if last["role"] == "user":
        call = {"name": "add", "arguments": json.dumps({"a": int(numbers[0]), "b": int(numbers[1])})}
        said = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{text[0]}", "type": "function", "function": call}],
        }
    reason = "tool_calls" if "tool_calls" in said else "stop"
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    name = f"chatcmpl-{len(body['messages'])}"
    whole = {"id": name, "object": "chat.completion", "created": 1, "model": "scripted-1", "usage": usage}
    return {**whole, "choices": [{"index": 0, "finish_reason": reason, "message": said}]}


def with_hexadecimal_ids(value):
    if isinstance(value, list):
        return [with_hexadecimal_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    ids = {"traceId", "spanId", "parentSpanId"}
    return {k: base64.b64decode(v).hex() if k in ids else with_hexadecimal_ids(v) for k, v in value.items()}


def main(python, sdk, distribution):
    rows = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            kind = next((of for path, of in MESSAGES.items() if self.path.endswith(path)), None)
            if self.path.endswith("/chat/completions"):
                answer = json.dumps(scripted(json.loads(body))).encode()
            elif kind is not None:
                rows.append(with_hexadecimal_ids(MessageToDict(kind.FromString(body))))
                answer = b""
            else:
                answer = b'{"successes": [], "errors": []}'
            self.send_response(200 if kind or b"choices" in answer else 207)
            self.send_header("Content-Type", "application/x-protobuf" if kind else "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    told = [python, str(HERE / "traced_client.py"), sdk, f"{url}/v1", url, *QUESTIONS]
    subprocess.run(told, check=True, timeout=120)
    server.shutdown()
    asked = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    version = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    path = HERE.parent / "recorded" / f"{sdk}-{version}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main(*sys.argv[1:])
