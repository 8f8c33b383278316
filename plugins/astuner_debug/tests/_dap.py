"""As much of an editor's debugger as a test needs: the Debug Adapter Protocol over a socket."""

from __future__ import annotations

import json
import socket
from typing import Any


class Editor:
    """Attached to a process that waits for a debugger."""

    def __init__(self, port: int, *, seconds: float = 60.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=seconds)
        self._lines = self._socket.makefile("rb")
        self._sent = 0
        self._unread: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Connect as VS Code does, without breakpoints of its own."""
        self.ask("initialize", adapterID="test", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
        self._send("attach", {"justMyCode": True})
        self.event("initialized")
        self.ask("configurationDone")

    def where(self) -> tuple[int, dict[str, Any]]:
        """The thread that has stopped next, and its innermost frame."""
        thread: int = self.event("stopped")["threadId"]
        frame: dict[str, Any] = self.ask("stackTrace", threadId=thread)["stackFrames"][0]
        return thread, frame

    def value(self, expression: str, frame: dict[str, Any]) -> str:
        found: str = self.ask("evaluate", expression=expression, frameId=frame["id"], context="repl")["result"]
        return found

    def go_on(self, thread: int) -> None:
        self.ask("continue", threadId=thread)

    def leave(self) -> None:
        """Detach; the process goes on."""
        self.ask("disconnect", terminateDebuggee=False)
        self._lines.close()
        self._socket.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """A request's answer."""
        number = self._send(command, arguments)
        answer = self._next(lambda m: m["type"] == "response" and m["request_seq"] == number)
        assert answer["success"], answer
        body: dict[str, Any] = answer.get("body", {})
        return body

    def event(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = self._next(lambda m: m["type"] == "event" and m["event"] == name).get("body", {})
        return body

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        self._sent += 1
        message = {"type": "request", "seq": self._sent, "command": command, "arguments": arguments}
        data = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        return self._sent

    def _next(self, wanted: Any) -> dict[str, Any]:
        for i, message in enumerate(self._unread):
            if wanted(message):
                return self._unread.pop(i)
        while True:
            message = self._read()
            if wanted(message):
                return message
            self._unread.append(message)

    def _read(self) -> dict[str, Any]:
        length = 0
        while line := self._lines.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the debugger has closed the connection"
        message: dict[str, Any] = json.loads(self._lines.read(length))
        return message
