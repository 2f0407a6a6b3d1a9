"""Read the files of a run and write changed ones with valid checksums, which an attacker can compute too."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

from mezzo.journal.compact import MAGIC


def copy_run(run: Path, workspace: Path) -> Path:
    """Copy a run to the `run` folder of the workspace, in place of what is there."""
    shutil.rmtree(workspace / "run", ignore_errors=True)
    shutil.copytree(run, workspace / "run")
    return workspace / "run"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_journal(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a journal with valid checksums."""
    out, crc = [], 0
    for line in lines:
        text = json.dumps({key: value for key, value in line.items() if key != "crc"}, separators=(",", ":")).encode()
        crc = zlib.crc32(text, crc)
        out.append(b'%s,"crc":"%08x"}\n' % (text[:-1], crc))
    path.write_bytes(b"".join(out))


def read_compact_header(path: Path) -> dict[str, Any]:
    """The header of a compact journal as stored."""
    body = path.read_bytes()[len(MAGIC) + 4 :]
    return json.loads(zlib.decompress(body[8 : 8 + int.from_bytes(body[:8], "little")]))


def replace_compact_header(
    path: Path, header: Any, coefs: bytes | None = None, keeps: bytes | None = None, counts: bytes | None = None
) -> bytes:
    """The bytes of a compact journal with another header (and other sections) and a valid checksum."""
    data = path.read_bytes()[len(MAGIC) + 4 :]
    sections = []
    while data:
        length = int.from_bytes(data[:8], "little")
        sections.append(data[8 : 8 + length])
        data = data[8 + length :]
    sections[0] = zlib.compress(json.dumps(header).encode())
    sections[1] = counts or sections[1]
    sections[3:] = [coefs or sections[3], keeps or sections[4]]
    body = b"".join(len(section).to_bytes(8, "little") + section for section in sections)
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def eval_command(folder: Path, data: str) -> list[str]:
    """The command that evaluates a model folder."""
    return ["eval", "--model", str(folder), "--task", "sst-2", "--data", data, "--threads", "1", "--device", "cpu"]
