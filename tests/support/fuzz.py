"""Seeded damage to files, and the promise of every reader: a result or a sentence, in time and in memory."""

from __future__ import annotations

import io
import json
import re
import resource
import signal
import struct
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from sigcam.core.errors import SigcamError

Damage = Callable[[bytes, Random], bytes]

SECONDS = 10  # of CPU time that one file may take
MEMORY = 2 * 10**9  # bytes that reading one file may take
RESERVED = 3 * MEMORY  # bytes that it may ask for, used or not, so that a test cannot fill the machine
LONGEST = 10_000  # characters of a sentence
DEEP = 100_000
STATM = Path("/proc/self/statm")
HOSTILE_NUMBERS = (
    *("-1", "0", "1e999", "nan", "-inf", "NaN", "Infinity", "2147483648", "4294967296", "99999999999"),
    *("18446744073709551616", "1" * 19, "1" * 5000, "0.5", "1e308", "-0", "0x10", "٣", "²", "1_0", "+1", ""),
)
HOSTILE_TEXTS = (
    *("\0", "../../etc/passwd", "/etc/passwd", "\ufeff", "\x85", "\u2028", "\x1b[2J", "\ud800", "\U0010ffff"),
    *('"', "'", ",", ",,,,", "\t", "\r", "\v", " ", "=", "%s", "{}", "n" * 300, "x" * 100_000, "/" * 5000),
    *(".", "..", "~", "con", "*", "a\\b", "é", "é", "<!--", "]]>", "&x;", "&#0;", "[" * DEEP, "{" * DEEP),
)
HOSTILE_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        10**9,
        10**19,
        10**400,
        -(10**30),
        0.5,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "\0",
        "\ud800",
        "../..",
        "0",
        "é" * 300,
        [],
        {},
        [[]],
        [None],
        [1e9] * 3,
        [1, "x", None],
        [2**40],
    ),
    *({"": None}, {"x": {"y": [1]}}, [-1, -1, -1], [3, 10**6, 10**6], ["a"] * 10_000, "@deep", "@open"),
)


def damage_bytes(data: bytes, random: Random) -> bytes:
    """Flip, cut, extend, repeat, remove, swap or overwrite bytes, one to four times."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
        near = min(b, a + random.choice((1, 2, 4, 8, 16, 64)))
        match random.randrange(11):
            case 0 | 1:
                at = min(a, len(data) - 1)
                data = (
                    data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
                    if data
                    else data
                )
            case 2:
                data = data[:a] + random.randbytes(near - a) + data[near:]
            case 3:
                data = data[:a]
            case 4:
                data += random.choice((b"\0" * 5000, random.randbytes(300), data[a:b], b"\xff" * 64))
            case 5:
                data = data[:b] + data[a:b] + data[b:]
            case 6:
                data = data[:a] + data[near:]
            case 7:
                data = data[:a] + b"\0" * random.choice((1, 4, 100)) + data[a:]
            case 8 | 9:
                number = random.choice(
                    (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
                )
                form = random.choice([f for f in "BHIQ" if number < 256 ** struct.calcsize(f)])
                packed = struct.pack(random.choice("<>") + form, number)
                data = data[:a] + packed + data[a + len(packed) :]
            case _:
                data = _replace_number(data, random)
    return data


def damage_text(data: bytes, random: Random) -> bytes:
    """Damage numbers, fields, lines and the encoding of a text file; at times its bytes."""
    if random.random() < 0.2:
        return damage_bytes(data, random)
    for _ in range(random.choice((1, 1, 2, 4))):
        lines = data.split(b"\n")
        i, j = random.randrange(len(lines)), random.randrange(len(lines))
        hostile = random.choice(HOSTILE_TEXTS).encode("utf-8", "surrogatepass")
        match random.randrange(12):
            case 0 | 1 | 2:
                data = _replace_number(data, random)
            case 3:
                lines[i], lines[j] = lines[j], lines[i]
                data = b"\n".join(lines)
            case 4:
                data = b"\n".join([*lines[:i], lines[j], *lines[i:]])
            case 5:
                data = b"\n".join(lines[:i] + lines[i + 1 :])
            case 6:
                at = random.randrange(len(data) + 1)
                data = data[:at] + hostile + data[at:]
            case 7:
                fields = re.split(rb"([,\s<>])", lines[i])
                fields[random.randrange(len(fields))] = hostile
                data = b"\n".join([*lines[:i], b"".join(fields), *lines[i + 1 :]])
            case 8:
                fields = lines[i].split(b",")
                random.shuffle(fields)
                data = b"\n".join([*lines[:i], b",".join(fields), *lines[i + 1 :]])
            case 9:
                data = data.replace(
                    b"\n", random.choice((b"\r\n", b"\r", b"\n\n", b"\x0b", b"\xe2\x80\xa8", b" "))
                )
            case 10:
                text = data.decode("utf-8", "replace")
                encoding = random.choice(("utf-16", "utf-8-sig", "latin-1", "utf-32", "utf-7", "cp037"))
                data = text.encode(encoding, "replace")
            case _:
                data = data * random.choice((0, 2, 50))
    return data


def damage_json(data: bytes, random: Random) -> bytes:
    """Replace, remove, rename or add parts of a JSON value; at times damage its text."""
    if random.random() < 0.25:
        return damage_text(data, random)
    value = json.loads(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        value = _damage_value(value, random)
    text = json.dumps(value).encode()
    text = text.replace(b'"@deep"', b"[" * DEEP + b"]" * DEEP)
    return text.replace(b'"@open"', b"[" * DEEP)


def _damage_value(value: Any, random: Random) -> Any:
    """Return a copy with one part changed, at any depth."""
    hostile = random.choice(HOSTILE_VALUES)
    if not isinstance(value, dict | list) or not value or random.random() < 0.04:
        return hostile
    keys: Sequence[Any] = list(value) if isinstance(value, dict) else range(len(value))
    key = random.choice(keys)
    copy: Any = value.copy()
    if isinstance(value[key], dict | list) and random.random() < 0.6:
        copy[key] = _damage_value(value[key], random)
        return copy
    match random.randrange(4):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, dict):
            copy[random.choice(("", "x", str(key).upper(), "__class__", "\0"))] = copy.pop(key)
        case 1:
            copy.insert(key, hostile)
        case _:
            copy[key] = hostile
    return copy


def damage_safetensors(data: bytes, random: Random) -> bytes:
    """Damage the bytes, the header, or a JSON text among the metadata, and pack it again."""
    if random.random() < 0.3:
        return damage_bytes(data, random)
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    known: dict[str, dict[str, str]] = json.loads(header)
    texts = [key for key, text in known["__metadata__"].items() if text[:1] in "[{"]
    if random.random() < 0.7:
        key = random.choice(texts)
        text = damage_json(known["__metadata__"][key].encode(), random)
        known["__metadata__"][key] = text.decode("utf-8", "replace")
        header = json.dumps(known).encode()
    else:
        header = damage_json(header, random)
    size = len(header) if random.random() < 0.95 else random.choice((0, 2**31, 2**40, 2**63, 2**64 - 1))
    return struct.pack("<Q", size) + header + body


def damage_npy(data: bytes, random: Random) -> bytes:
    """Damage the bytes, or type and shape in the header of an array."""
    if random.random() < 0.5 or data[:6] != b"\x93NUMPY":
        return damage_bytes(data, random)
    length = int.from_bytes(data[8:10], "little")
    header, body = data[10 : 10 + length].decode(), data[10 + length :]
    types = ("<f8", "|O", "<M8[ns]", "|S0", "<U9999999", "|V99999999", "<c16", "|b1", ">i8", "<f2", "zz", "")
    shapes = (
        "()",
        "(0,)",
        "(10**12,)",
        "(-1, 4)",
        "(1000000000000,)",
        "(4294967296, 4294967296)",
        "(1.5, 2)",
    )
    shapes += (
        "(99999999999999999999,)",
        f"({'1, ' * 70})",
        "(3, 200000000)",
        "None",
        "[2, 3]",
        "(True, True)",
    )
    match random.randrange(4):
        case 0:
            header = re.sub("'descr': '[^']*'", f"'descr': {random.choice(types)!r}", header)
        case 1:
            header = re.sub(r"'shape': \([^)]*\)", f"'shape': {random.choice(shapes)}", header)
        case 2:
            header = header.replace("False", random.choice(("True", "None", "2", "'x'")))
        case _:
            header = damage_text(header.encode(), random).decode("latin-1", "replace")[:60_000]
    written = header.encode("latin-1", "replace")
    return data[:8] + struct.pack("<H", len(written)) + written + body


def damage_zip(inner: Damage) -> Damage:
    """Damage the archive's bytes, or those of a member, packed again with the right checksum."""

    def damage(data: bytes, random: Random) -> bytes:
        if random.random() < 0.3 or not zipfile.is_zipfile(io.BytesIO(data)):
            return damage_bytes(data, random)
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
            names = old.namelist()
            chosen, deed = random.choice(names), random.randrange(8)
            for name in names:
                content = old.read(name)
                if name == chosen and deed == 0:
                    continue
                if name == chosen and deed == 1:
                    new.writestr(random.choice((f"../{name}", "/x", name.upper(), "x" * 300)), content)
                    continue
                new.writestr(name, inner(content, random) if name == chosen and deed > 1 else content)
        return out.getvalue()

    return damage


def damage_png(data: bytes, random: Random) -> bytes:
    """Damage the bytes, or a chunk of a PNG file with its checksum made right again."""
    if random.random() < 0.4 or data[:4] != b"\x89PNG":
        return damage_bytes(data, random)
    chunks, at = list[tuple[bytes, bytes]](), 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += length + 12
    i = random.randrange(len(chunks))
    kind, content = chunks[i]
    match random.randrange(4):
        case 0:
            chunks.insert(random.randrange(len(chunks)), chunks[i])
        case 1:
            chunks[i] = (
                random.choice((b"IHDR", b"PLTE", b"tRNS", b"acTL", b"fdAT", b"eXIf", b"iCCP")),
                content,
            )
        case _:
            chunks[i] = kind, damage_bytes(content, random)
    packed = (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return data[:8] + b"".join(packed)


def _replace_number(data: bytes, random: Random) -> bytes:
    """Replace one of the numbers that are written out in the data."""
    places = [match.span() for match in re.finditer(rb"-?\d+", data)]
    if not places:
        return data
    a, b = random.choice(places)
    return data[:a] + random.choice(HOSTILE_NUMBERS).encode() + data[b:]


class TooSlow(BaseException):
    """Reading took too long; nothing but the test may catch it."""


class TooLarge(BaseException):
    """Reading took too much memory; nothing but the test may catch it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Run the block with a limit on its processor time, and on the memory it takes beyond what is in use."""

    def stop(number: int, frame: Any) -> None:
        raise TooSlow

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    reserved, used = (int(n) * resource.getpagesize() for n in STATM.read_text().split()[:2])
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (reserved + RESERVED, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    Path("/proc/self/clear_refs").write_text("5")  # begin to measure the peak again
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)
        peak = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
        if peak - used > MEMORY:
            raise TooLarge(f"{(peak - used) >> 20} MB")


def failures(
    files: Sequence[Path], read: Callable[[], object], damage: Damage, count: int, seed: str
) -> dict[str, list[str]]:
    """Damage one of the files at a time and read; return what was neither a result nor a sentence: by its
    kind and place, the first message and the numbers of the cases."""
    found, originals = dict[str, list[str]](), {path: path.read_bytes() for path in files}
    read()  # as written, they are read
    for number in range(count):
        random = Random(f"{seed} {number}")
        path = random.choice(files)
        path.write_bytes(damage(originals[path], random))
        if failure := _failure(read):
            found.setdefault(failure[0], [failure[1]]).append(str(number))
        path.write_bytes(originals[path])
    read()  # nothing that a damaged file left behind is in the way
    return found


def _failure(read: Callable[[], object]) -> tuple[str, str] | None:
    """Return kind and message of a failure; None if reading ends with a result or a sentence."""
    try:
        with bounded():
            read()
    except SigcamError as error:
        message = str(error)
        if "\n" in message or "\r" in message:
            return f"several lines {_place(error)}", repr(message)[:200]
        if len(message) > LONGEST:
            return f"a long sentence {_place(error)}", message[:200]
    except (Exception, TooSlow, TooLarge) as error:
        return f"{type(error).__name__} {_place(error)}", repr(error)[:200]
    return None


def _place(error: BaseException) -> str:
    """Return the last place in sigcam that the error went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/sigcam/" in f.filename]
    return f"in {Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
