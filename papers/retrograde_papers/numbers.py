"""Measured numbers: their JSON, and the files of them that come with these packages."""

import json
from dataclasses import asdict
from importlib import resources
from typing import Any

__all__ = ["read_shipped", "to_json"]


def to_json(numbers: Any) -> str:
    """The fields of a dataclass as JSON."""
    return json.dumps(asdict(numbers), indent=1, ensure_ascii=False) + "\n"


def read_shipped(package: str, name: str) -> str:
    """The text of ``name.json`` among the data of a package."""
    return (resources.files(package) / "data" / f"{name}.json").read_text(encoding="utf-8")
