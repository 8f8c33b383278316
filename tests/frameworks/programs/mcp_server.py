"""An MCP server over stdio: a plain tool, and one whose schema has a reference, a union and an array of constants."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from mcp.server.fastmcp import FastMCP
from pydantic import BaseModel

server = FastMCP("numbers", log_level="ERROR")


class Unit(str, Enum):
    METRE = "m"
    MILE = "mi"


class Length(BaseModel):
    value: float | None = None
    unit: Unit = Unit.METRE


@server.tool()
def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


@server.tool()
def add_lengths(lengths: list[Length | Literal["none"]]) -> str:
    """Add up lengths."""
    return ", ".join(item if isinstance(item, str) else f"{item.value} {item.unit.value}" for item in lengths)


if __name__ == "__main__":
    server.run("stdio")
