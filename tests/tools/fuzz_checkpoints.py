"""Hostile and damaged files of weights, each loaded in a child process that is watched.

    python tests/tools/fuzz_checkpoints.py --count 1000 --seed 0

The first are made by hand, one for every trick we know; the rest are good files with flipped bits, cut tails and
swapped parts. A file must become a model or a `CheckpointError` of one printable line, by `veca.load` and by the
commands `veca info` and `veca convert`, within seconds and little memory; nothing in it may be executed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzzing import damage, peak_mib, run_script
from safetensors.torch import save as save_tensors
from torch import Tensor

import veca
from veca.checkpoint.released import save_released

MAX_SECONDS = 30
MAX_MIB = 256.0
MAX_MESSAGE = 2000
MODEL, REFUSAL, EITHER = "model", "refusal", "either"
CANARY = "canary"
"""The file that code in a checkpoint would make."""
CONFIG_KEYS = [
    "model_family", "num_query_tokens", "hidden_dim", "num_heads", "num_layers", "mlp_ratio", "patch_size",
    "in_channels", "nested_chunk_size", "nested_budgets", "matryoshka_budgets", "rope_p_zero_freqs",
    "rope_zero_freqs_from", "rope_shift_coords", "rope_rescale_coords", "patch_embed_use_ln",
]  # fmt: skip


@dataclass
class Case:
    """One file: its bytes or how to make it, and what must come of it; whether the commands are tried too."""

    name: str
    make: bytes | Callable[[Path], object]
    expect: str = EITHER
    commands: bool = True


@dataclass
class Report:
    """What came of the files, and everything that should not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[float, str] = (0.0, "")

    def __str__(self) -> str:
        return (
            f"{sum(self.outcomes.values())} files in {self.seconds:.1f} s: {self.outcomes[MODEL]} models, "
            f"{self.outcomes[REFUSAL]} refusals, {len(self.problems)} problems; slowest {self.slowest[0]:.2f} s "
            f"({self.slowest[1]}), most memory {self.largest[0]:.0f} MiB ({self.largest[1]})"
        )


# Good files


def make_model() -> veca.Veca:
    torch.manual_seed(0)
    return veca.create_model("veca_tiny", embed_dim=8, depth=2, num_heads=2, patch_size=2, core_chunk=32)


@functools.cache
def released() -> dict[str, Any]:
    """The contents of a released file."""
    with tempfile.TemporaryDirectory() as folder:
        save_released(make_model(), Path(folder) / "a.pt")
        return dict(torch.load(Path(folder) / "a.pt", weights_only=True))


def saved(contents: object, *, legacy: bool = False) -> bytes:
    stream = io.BytesIO()
    torch.save(contents, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


def ours(description: str | None = None, tensors: dict[str, Tensor] | None = None, key: str = "veca") -> bytes:
    """A safetensors file with a header of our own."""
    model = make_model()
    described = json.dumps({"config": model.config.to_dict(), "provenance": {}}) if description is None else description
    return save_tensors(tensors or dict(model.state_dict()), {key: described})


# Pickles, opcode by opcode


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def call(function: str, *arguments: bytes) -> bytes:
    """A GLOBAL, its arguments and REDUCE."""
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def tensor(
    key: str, count: int, sizes: list[int], strides: list[int], offset: int = 0, storage: str = "FloatStorage"
) -> bytes:
    described = b"(" + text("storage") + f"ctorch\n{storage}\n".encode() + text(key) + text("cpu") + integer(count)
    shape, steps = (b"(" + b"".join(map(integer, numbers)) + b"t" for numbers in (sizes, strides))
    rest = b"\x89" + call("collections OrderedDict")
    return call("torch._utils _rebuild_tensor_v2", described + b"tQ", integer(offset), shape, steps, rest)


def plain(value: object) -> bytes:
    """A value of a configuration."""
    if isinstance(value, tuple | list):
        return b"(" + b"".join(map(plain, value)) + b"t"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return text(value) if isinstance(value, str) else integer(value) if isinstance(value, int) else b"N"


def dictionary(items: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def checkpoint(
    student: dict[str, bytes] | None = None, config: dict[str, bytes] | None = None, extra: bytes = b"N"
) -> bytes:
    """The pickle of a released file, with more in it."""
    contents = released()
    weights = {
        name: tensor(name, t.numel(), list(t.shape), list(t.contiguous().stride()))
        for name, t in contents["student"].items()
    }
    values = {key: plain(value) for key, value in contents["config"].items()}
    student, config = {**weights, **(student or {})}, {**values, **(config or {})}
    return pickled(dictionary({"student": dictionary(student), "config": dictionary(config), "extra": extra}))


def archive(pickle: bytes, more: dict[str, bytes] | None = None, method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of a pickle, the storages of a released file, and more."""
    storages = {f"data/{name}": t.numpy().tobytes() for name, t in released()["student"].items()}
    storages |= {"version": b"3\n"}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two entries of a name
        for name, data in [("data.pkl", pickle), *storages.items(), *(more or {}).items()]:
            file.writestr(f"x/{name}", data)
    return stream.getvalue()


def laughs(kind: str, levels: int = 60) -> bytes:
    """A container of the one before it, twice, so many levels deep."""
    parts = [b"(Nq\0"]
    for level in range(levels):
        put, get = b"q" + bytes([level + 1]), b"h" + bytes([level])
        parts.append(
            {
                "lists": b"]" + put + b"(" + 2 * get + b"e",
                "tuples": 2 * get + b"\x86" + put,
                "dictionaries": b"}" + put + b"(" + text("a") + get + text("b") + get + b"u",
            }[kind]
        )
    return b"".join(parts) + b"t"


def nested(levels: int) -> bytes:
    return b")" + b"\x85" * levels


# What is tried


def cases(count: int, seed: int) -> list[Case]:
    dice = random.Random(seed)
    found = [*good_files(), *tensors(), *configurations(), *pickles(), *archives(), *legacy_files(), *safetensors()]
    good = {case.name: case.make for case in good_files() if isinstance(case.make, bytes)}
    mutations = [mutation(index, good, dice) for index in range(max(0, count - len(found)))]
    return [*found, *mutations]


def good_files() -> Iterator[Case]:
    yield Case("good.pt", saved(released()), MODEL)
    yield Case("good-legacy.pt", saved(released(), legacy=True), MODEL)
    yield Case("good.safetensors", ours(), MODEL)
    config = {key: list(v) if isinstance(v, tuple) else v for key, v in released()["config"].items()}
    yield Case("good-released.safetensors", ours(json.dumps(config), dict(released()["student"]), "config"), MODEL)
    yield Case("good-folder", lambda path: veca.save(make_model(), path), MODEL)


def tensors() -> Iterator[Case]:
    contents = released()
    student, config = contents["student"], contents["config"]

    def with_tensor(name: str, value: object, key: str = "final_norm.weight", expect: str = REFUSAL) -> Case:
        return Case(f"tensor-{name}.pt", saved({"student": {**student, key: value}, "config": config}), expect)

    yield with_tensor("stride-0", torch.zeros(1).expand(8))
    yield with_tensor("stride-0-huge", torch.zeros(1).expand(2**31), "extra")
    everything = {name: torch.zeros(1).expand([4096] * t.dim()) for name, t in student.items()}
    yield Case("tensor-stride-0-all.pt", saved({"student": everything, "config": config}), REFUSAL)
    beside = saved({**contents, "optimizer": torch.zeros(1).expand(2**20, 2**20)})
    yield Case("tensor-stride-0-beside.pt", beside, REFUSAL)
    shared = torch.zeros(2**14)
    views = {f"t{i}": shared[:-1] for i in range(3000)}
    yield Case("tensor-views.pt", saved({"student": {**student, **views}, "config": config}), REFUSAL)
    for name, value in {
        "scalar": torch.tensor(1.0),
        "matrix": torch.zeros(8, 1),
        "dimensions": torch.zeros([1] * 40),
        "integers": torch.zeros(8, dtype=torch.int64),
        "booleans": torch.zeros(8, dtype=torch.bool),
        "complex": torch.zeros(8, dtype=torch.complex64),
        "conjugated": torch.zeros(8, dtype=torch.complex64).conj(),
        "sparse": torch.ones(8).to_sparse(),
        "sparse-rows": torch.eye(8).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8),
        "meta": torch.empty(8, device="meta"),
        "float4": torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "text": "weights",
        "list": [1.0] * 8,
        "none": None,
    }.items():
        yield with_tensor(name, value)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        yield with_tensor(str(dtype), torch.ones(8).to(dtype), expect=MODEL)
    yield with_tensor("parameter", torch.nn.Parameter(torch.ones(8)), expect=MODEL)
    yield with_tensor("nan", torch.full((8,), torch.nan), expect=MODEL)
    yield with_tensor("scalar-projection", torch.tensor(1.0), "output_proj.weight")
    for name, key in {
        "prefixes": "module." * 400_000 + "x",
        "long": "x" * 300_000,
        "blocks": "blocks." + "." * 300_000,
        "escapes": "\x1b[31m\n\r\x07" * 5000,
        "surrogates": "\ud800\udfff" * 50,
        "right-to-left": "\u202egnp.exe" * 50,
    }.items():
        yield with_tensor(f"name-{name}", torch.zeros(1), key)
    yield with_tensor("name-number", torch.zeros(1), 7)  # type: ignore[arg-type]
    yield with_tensor("name-tuple", torch.zeros(1), (1, 2))  # type: ignore[arg-type]
    for name, described in {
        "outside": tensor("0", 4, [4], [1], 1),
        "far": tensor("0", 4, [4], [2**62]),
        "negative-size": tensor("0", 4, [-4], [1]),
        "negative-stride": tensor("0", 4, [4], [-1], 3),
        "negative-offset": tensor("0", 4, [1], [1], -1),
        "huge": tensor("0", 4, [2**62, 2**62], [0, 0]),
        "huge-number": tensor("0", 4, [10**400], [0]),
        "empty-huge": tensor("0", 4, [0, 2**62, 2**62], [1, 1, 1]),
        "storage-larger": tensor("0", 2**40, [4], [1]),
        "storage-huge": tensor("0", 10**400, [4], [1]),
        "storage-negative": tensor("0", -4, [4], [1]),
        "storage-missing": tensor("1", 4, [4], [1]),
        "storage-path": tensor("../data.pkl", 4, [4], [1]),
        "storage-dtype": tensor("0", 4, [4], [1], 0, "qint8"),
        "storage-tensor": tensor("0", 4, [4], [1], 0, "Tensor"),
    }.items():
        data = archive(checkpoint({"final_norm.weight": described}), {"data/0": bytes(16)})
        yield Case(f"tensor-raw-{name}.pt", data, REFUSAL)
    many = b"(" + tensor("0", 4, [4], [1]) * 2000 + b"t"
    yield Case("tensor-raw-many.pt", archive(checkpoint(extra=many), {"data/0": bytes(16)}), MODEL)


def configurations() -> Iterator[Case]:
    contents = released()
    student, config = contents["student"], contents["config"]
    loop: list[object] = []
    loop.append(loop)
    deep: list[object] = []
    for _ in range(60):
        deep = [deep]
    shared: object = "x" * 1000
    for _ in range(40):
        shared = [shared, shared]
    odd: dict[str, object] = {
        "large": 10**400, "negative": -(10**400), "billion": 10**9, "zero": 0, "nan": float("nan"),
        "infinite": float("inf"), "text": "\x1b[31m" + "x" * 300_000, "list": [1] * 20_000, "loop": loop, "deep": deep,
        "shared": shared, "tensor": torch.ones(2), "one": torch.tensor(True), "set": {1, 2}, "bytes": b"low",
        "dtype": torch.float32, "meta": torch.empty(2, device="meta"), "dictionary": {"a": 1}, "false": False,
        "numbers": [10**400] * 1000,
    }  # fmt: skip
    for name, value in odd.items():
        expect = REFUSAL if name in ("large", "negative", "loop", "deep", "shared", "tensor", "meta", "set") else EITHER
        for key in CONFIG_KEYS if name in ("large", "tensor", "text") else ["num_query_tokens"]:
            if (key, name) in (("model_family", "text"), ("model_family", "large"), ("matryoshka_budgets", "text")):
                continue
            changed = {"student": student, "config": {**config, key: value}}
            flag = key in ("rope_shift_coords", "rope_rescale_coords", "patch_embed_use_ln")
            yield Case(f"config-{name}-{key}.pt", saved(changed), EITHER if flag and name == "text" else expect)
        changed = {"student": student, "config": {**config, "unrelated": value}}
        yield Case(f"config-{name}-unrelated.pt", saved(changed))
        yield Case(f"config-{name}-step.pt", saved({**contents, "global_step": value}), MODEL)
    for name, wrong in {"number": 3, "list": [1], "none": None, "tensor": torch.ones(2), "empty": {}}.items():
        yield Case(f"config-is-{name}.pt", saved({"student": student, "config": wrong}), REFUSAL)
        yield Case(f"student-is-{name}.pt", saved({"student": wrong, "config": config}), REFUSAL)
        yield Case(f"contents-{name}.pt", saved(wrong), REFUSAL)
    for shape in ({"num_layers": 1024}, {"hidden_dim": 65536}, {"num_query_tokens": 256, "nested_budgets": (256,)}):
        changed = {"student": student, "config": {**config, **shape}}
        yield Case(f"config-{next(iter(shape))}.pt", saved(changed), REFUSAL)


def pickles() -> Iterator[Case]:
    for kind in ("lists", "tuples", "dictionaries"):
        yield Case(f"pickle-laughs-{kind}.pt", archive(checkpoint(config={"a": laughs(kind)})), REFUSAL)
        yield Case(f"pickle-laughs-field-{kind}.pt", archive(checkpoint(config={"num_heads": laughs(kind)})), REFUSAL)
        yield Case(f"pickle-laughs-beside-{kind}.pt", archive(checkpoint(extra=laughs(kind))), MODEL)
    yield Case("pickle-laughs-key.pt", archive(checkpoint(extra=b"}" + laughs("tuples") + b"Ns")), MODEL)
    collisions = b"}(" + b"".join(integer(i * (2**61 - 1)) + b"N" for i in range(1, 30_000)) + b"u"
    yield Case("pickle-collisions.pt", archive(checkpoint(extra=collisions)), MODEL)
    double = b"".join(b"q\x01" + call("_codecs encode", b"h\x01", text("hex")) for _ in range(60))
    for name, body in {
        "bytearray-op": b"\x96" + struct.pack("<Q", 2**36) + b"x",
        "bytes": b"\x8e" + struct.pack("<Q", 2**36) + b"x",
        "text": b"\x8d" + struct.pack("<Q", 2**36) + b"x",
        "short-text": b"X\xff\xff\xff\xffx",
        "long": b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x",
        "decimal": b"L" + b"9" * 100_000 + b"L\n",
        "memo-missing": b"j\xff\xff\xff\x7f",
        "frame": b"\x95" + struct.pack("<Q", 2**60) + b"N",
        "tensor": call("torch FloatTensor", integer(2**36)),
        "tensor-class": call("torch Tensor", integer(2**36)),
        "storage": call("torch.storage UntypedStorage", integer(2**40)),
        "arguments": b"(" + b"N" * 100_000 + b"tq\x01" + b"ctorch._utils\n_rebuild_tensor_v2\nh\x01R",
        "identifier": b"(" + text("storage") + b"N" * 100_000 + b"tQ",
        "sparse": call("torch._utils _rebuild_sparse_tensor", b")"),
        "too-many": b"(" + b"N" * 1_000_000 + b"t",
        "marks": b"(" * 100_000,
        "nothing": b"",
        "pops": b"0" * 100,
        "underflow": b"tttt",
        "stop": b"....",
    }.items():
        yield Case(f"pickle-{name}.pt", archive(checkpoint(extra=body)), REFUSAL)
    for name, body in {
        "bytearray": call("__builtin__ bytearray", integer(2**36)),
        "hex": call("_codecs encode", text("a"), text("latin1")) + double,
        "memo": b"Nr\xff\xff\xff\xff",
        "set": b"(](" + b"N" * 50_000 + b"eq\x01" + call("__builtin__ set", b"h\x01") * 10_000 + b"t",
        "size": call("torch Size", b"(" + integer(2**62) * 10 + b"t"),
        "layout": call("torch.serialization _get_layout", text("\x1b[31m" * 50_000)),
        "parameter": call("torch._utils _rebuild_parameter", integer(1), b"\x89", b"N"),
        "deep": nested(50_000),
        "deep-lists": b"]" * 50_000 + b"a" * 49_999,
        "many": b"(" + b"]" * 100_000 + b"t",
    }.items():
        yield Case(f"pickle-{name}.pt", archive(checkpoint(extra=body)), MODEL)
    code = text("open('canary', 'w')")
    for name, body in {
        "eval": call("__builtin__ eval", code),
        "exec": call("builtins exec", code),
        "system": call("os system", text("touch canary")),
        "posix": call("posix system", text("touch canary")),
        "popen": call("subprocess Popen", b"]" + text("touch") + b"a" + text("canary") + b"a"),
        "path": call("pathlib Path", text("canary")),
        "getattr": call("__builtin__ getattr", b"cos\nsystem\n", text("x")),
        "inst": b"(" + code + b"i__builtin__\neval\n",
        "obj": b"(c__builtin__\neval\n" + code + b"o",
        "stack-global": text("builtins") + text("eval") + b"\x93(" + code + b"tR",
        "newobj": b"cpathlib\nPath\n(" + code + b"t\x81",
        "extension": b"\x82\x01",
        "build": call("collections OrderedDict") + b"}" + text("__class__") + b"Nsb" + call("os system", code),
        "hooks": b"ctorch\njit\n",
        "long-name": b"c" + b"x" * 300_000 + b"\n\x1b[31my\n",
    }.items():
        yield Case(f"code-{name}.pt", archive(checkpoint(extra=body)), REFUSAL)
        yield Case(f"code-{name}.pkl", pickled(body), REFUSAL)


def archives() -> Iterator[Case]:
    good = saved(released())
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        bomb = archive(checkpoint(extra=tensor("0", 2**25, [2**25], [1])), {"data/0": bytes(2**27)}, method)
        yield Case(f"zip-compressed-{method}.pt", bomb, REFUSAL)
    yield Case("zip-compressed-pickle.pt", archive(pickled(b"N" * 2**26), method=zipfile.ZIP_DEFLATED), REFUSAL)
    yield Case("zip-empty.pt", b"PK\5\6" + bytes(18), REFUSAL)
    yield Case("zip-big-endian.pt", archive(checkpoint(), {"byteorder": b"big"}), REFUSAL)
    yield Case("zip-same-name.pt", archive(checkpoint(), {"data.pkl": pickled(call("os system", text("x")))}), REFUSAL)
    second = archive(checkpoint(), {"/data.pkl": b"N."}).replace(b"x//data.pkl", b"yyy/data.pkl")
    yield Case("zip-second-pickle.pt", second, REFUSAL)
    yield Case("zip-no-pickle.pt", good.replace(b"data.pkl", b"data.pkk"), REFUSAL)
    yield Case("zip-entry.pt", good.replace(b"/data/1", b"/data/9"), REFUSAL)
    directory = good.rindex(b"PK\1\2")
    for offset, value in ((20, 2**31), (24, 2**31), (42, 2**31), (24, 0), (8, 1), (10, 8), (16, 0)):
        changed = bytearray(good)
        changed[directory + offset : directory + offset + 4] = struct.pack("<I", value)
        yield Case(f"zip-directory-{offset}-{value}.pt", bytes(changed))
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as file:
        for i in range(20_000):
            file.writestr(f"x/{i}", b"")
    yield Case("zip-many.pt", many.getvalue(), REFUSAL)


def legacy_files() -> Iterator[Case]:
    good = saved(released(), legacy=True)
    start = good[: good.index(b"}", good.index(b"little_endian") - 40)]
    system = pickled(b"}" + text("little_endian") + b"\x88s")
    magic, protocol = pickled(integer(0x1950A86A20F9469CFC6C)), pickled(integer(1001))

    def legacy(contents: bytes, keys: bytes = b"]", data: bytes = b"") -> bytes:
        return magic + protocol + system + contents + pickled(keys) + data

    def claiming(count: int) -> bytes:
        return pickled(dictionary({"student": tensor("0", count, [4], [1]).replace(b"tQ", b"NtQ"), "config": b"}"}))

    yield Case("legacy-start.pt", start, REFUSAL)
    yield Case("legacy-claim.pt", legacy(claiming(2**34), b"]" + text("0") + b"a"), REFUSAL)
    yield Case("legacy-claim-huge.pt", legacy(claiming(10**100), b"]" + text("0") + b"a"), REFUSAL)
    yield Case("legacy-unfilled.pt", legacy(claiming(4)), REFUSAL)
    yield Case("legacy-short.pt", legacy(claiming(4), b"]" + text("0") + b"a", bytes(20)), REFUSAL)
    yield Case("legacy-keys.pt", legacy(claiming(4), b"](" + laughs("tuples") + b"e"), REFUSAL)
    yield Case("legacy-bytes.pt", magic + pickled(b"\x8e" + struct.pack("<Q", 2**40)), REFUSAL)
    yield Case("legacy-magic.pt", pickled(integer(1)) * 5, REFUSAL)
    yield Case("legacy-text.pt", b"\x80" + b"not a pickle" * 1000, REFUSAL)


def safetensors() -> Iterator[Case]:
    def raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
        return struct.pack("<Q", len(header) if length is None else length) + header + data

    for length in (0, 2, 2**20, 2**31, 2**63, 2**64 - 1):
        yield Case(f"header-{length}.safetensors", raw(b'{"a":1}', length=length), REFUSAL)
    one = '{"a":{"dtype":"%s","shape":%s,"data_offsets":%s}}'
    for name, values in {
        "claim": ("F32", "[1000000000]", "[0,4]"),
        "beyond": ("F32", "[1000000000]", "[0,4000000000]"),
        "empty": ("F32", "[0,4611686018427387904,4611686018427387904]", "[0,0]"),
        "huge": ("F32", "[4611686018427387904,4611686018427387904]", "[0,4]"),
        "dimensions": ("F32", str([1] * 5000), "[0,4]"),
        "negative": ("F32", "[-1]", "[0,4]"),
        "backwards": ("F32", "[1]", "[4,0]"),
        "kind": ("Q7", "[1]", "[0,4]"),
        "four": ("F4", "[8]", "[0,4]"),
    }.items():
        yield Case(f"one-{name}.safetensors", raw((one % values).encode(), bytes(4)), REFUSAL)
    config = make_model().config.to_dict()

    def described(name: str, text: str, expect: str = REFUSAL, commands: bool = True) -> Case:
        return Case(f"described-{name}.safetensors", ours(text), expect, commands)

    yield described("nothing", "")
    yield described("list", "[1]")
    yield described("broken", '{"config":')
    yield described("open", "[" * 100_000)
    yield described("deep", json.dumps({"config": config})[:-1] + ',"provenance":' + '{"a":' * 300 + "1" + "}" * 301)
    yield described("config-list", '{"config":[]}')
    yield described("provenance-list", json.dumps({"config": config, "provenance": [1]}))
    yield described("provenance-text", json.dumps({"config": config, "provenance": "\x1b[31m"}))
    escapes = {"\x1b[31m\n": "\x1b]0;x\x07" * 1000, "weights": "distilled", "teacher": {"name": "\x1b[2J" * 999}}
    yield described("provenance-escapes", json.dumps({"config": config, "provenance": escapes}), MODEL)
    for name, value in {
        "nested": "(" * 50_000, "number": 7, "loop": "[" * 300 + "]" * 300, "code": "open('canary', 'w')",
        "flag": "{'patch_embed_use_ln': True}", "digits": "9" * 100_000, "minus": "-" * 100_000 + "1",
        "plus": "1" + "+1" * 100_000, "keys": "{'nested_budgets': 10, 'model_family': ['small']}",
    }.items():  # fmt: skip
        provenance = {"official_config": value, "global_step": {"a": 10**30}}
        yield described(f"official-{name}", json.dumps({"config": config, "provenance": provenance}), MODEL)
    for field_name in config:
        for name, literal in {
            "large": "1" + "0" * 400, "float": "1e999", "digits": "9" * 5000, "text": json.dumps("\x1b" * 9999),
            "list": "[" + "8," * 50_000 + "8]", "null": "null", "nan": "NaN", "minus": "-1", "true": "true",
        }.items():  # fmt: skip
            text = json.dumps({"config": {**config, field_name: "@"}}).replace('"@"', literal)
            yield described(f"{field_name}-{name}", text, EITHER if name in ("null", "list") else REFUSAL, False)
    yield described("unknown", json.dumps({"config": {**config, "\x1b" * 100_000: 1}}))
    yield described("depth", json.dumps({"config": {**config, "depth": 1024}}))

    def beside(name: str, text: str, tensors: dict[str, Tensor], expect: str = REFUSAL) -> Case:
        def make(path: Path) -> None:
            path.mkdir()
            (path / "model.safetensors").write_bytes(save_tensors(tensors, {"format": "pt"}))
            (path / "config.json").write_text(text)

        return Case(f"folder-{name}", make, expect)

    weights = {f"veca.{name}": tensor for name, tensor in make_model().state_dict().items()}
    told = json.dumps({"model_type": "veca", **config})
    yield beside("good", told, weights, MODEL)
    yield beside("scalar-head", told, {**weights, "veca.head.weight": torch.tensor(1.0)})
    yield beside("other-head", told, {**weights, "head.weight": torch.tensor(1.0)}, MODEL)  # of pixels: left out
    yield beside("open", "[" * 100_000, weights)
    yield beside("long", " " * (2**24 + 1), weights)
    yield beside("provenance", told[:-1] + ',"provenance":[[]]}', weights, MODEL)


def mutation(index: int, good: dict[str, bytes], dice: random.Random) -> Case:
    """A good file with flipped bits, a cut tail, a hole or a piece of another file; or only its pickle or header."""
    name = dice.choice(list(good))
    data = good[name]
    inner = dice.random() < 0.6
    if inner and name == "good.pt":
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            entries = {entry: file.read(entry) for entry in file.namelist()}
        folder = next(iter(entries)).partition("/")[0]
        pickle = _mutate(entries[f"{folder}/data.pkl"], good, dice)
        storages = {key.partition("/")[2]: value for key, value in entries.items() if "/data/" in key}
        return Case(f"{index}-pickle-{name}", archive(pickle, storages), commands=False)
    if inner and name.endswith(".safetensors"):
        length = struct.unpack("<Q", data[:8])[0]
        header = _mutate(data[8 : 8 + length], good, dice)
        changed = struct.pack("<Q", len(header)) + header + data[8 + length :]
        return Case(f"{index}-header-{name}", changed, commands=False)
    return Case(f"{index}-{name}", _mutate(data, good, dice), commands=False)


def _mutate(data: bytes, good: dict[str, bytes], dice: random.Random) -> bytes:
    position = dice.randrange(len(data))
    way = dice.choice(("flips", "bytes", "noise", "hole", "repeat", "splice", "cut"))
    if way != "bytes":
        return damage(data, way, position, good, dice)
    changed = bytearray(data)
    for _ in range(dice.choice((1, 3, 30))):  # bytes that mean something in a pickle or in JSON
        changed[dice.randrange(len(data))] = dice.choice(b"\0\xff().0QRbtueacX\x85\x86\x87\x8a\x96{}[]9")
    return bytes(changed)


# Watching


def run(count: int, seed: int, folder: Path) -> Report:
    """Write the files into `folder`, load them all in a child process and judge it."""
    started = time.perf_counter()
    manifest = []
    for case in cases(count, seed):
        path = folder / case.name
        assert not path.exists(), case.name
        path.write_bytes(case.make) if isinstance(case.make, bytes) else case.make(path)
        manifest.append([case.name, case.expect, case.commands])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open(folder / "results", "w") as results, open(folder / "errors", "w") as errors:
        code = subprocess.run(command, stdout=results, stderr=errors, env=environment, cwd=folder).returncode
    report = Report()
    lines = (folder / "results").read_text().splitlines()
    for line in lines:
        name, outcome, detail, seconds, mib = json.loads(line)
        report.outcomes[outcome] += 1
        report.slowest = max(report.slowest, (seconds, name))
        report.largest = max(report.largest, (mib, name))
        if outcome not in (MODEL, REFUSAL):
            report.problems.append(f"{name}: {outcome}: {detail[:500]}")
        if mib > MAX_MIB:
            report.problems.append(f"{name}: took {mib:.0f} MiB")
    if code:
        culprit = manifest[len(lines)][0] if len(lines) < len(manifest) else "the end"
        report.problems.append(f"child ended with {code} at {culprit}: {(folder / 'errors').read_text()[-500:]}")
    if (folder / CANARY).exists():
        report.problems.append("code in a file was executed")
    report.seconds = time.perf_counter() - started
    return report


def child(folder: Path, **_: int) -> None:
    """Load every file of the manifest, one line of result each."""
    import typer

    from veca.cli import main as cli

    cli.app = typer.main.get_command(cli.app)  # type: ignore[assignment]  # built once, not for every file
    warm_up = folder / "warm-up.safetensors"  # what is imported and cached is no file's memory
    warm_up.write_bytes(ours())
    _commands(folder, warm_up)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if _LINUX else 0
    if size:  # so that a defect ends the child, not the machine
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**32, size + 2**32))
    for name, expect, commands in json.loads((folder / "manifest.json").read_text()):
        signal.alarm(MAX_SECONDS)  # it ends the child, wherever it hangs
        before, started = peak_mib(reset=True), time.perf_counter()
        outcome, detail = _load(folder / name, expect)
        problem = _commands(folder, folder / name, int(outcome == REFUSAL)) if commands else ""
        if problem and outcome in (MODEL, REFUSAL):
            outcome, detail = "wrong command", problem
        seconds, mib = time.perf_counter() - started, peak_mib() - before
        print(json.dumps([name, outcome, detail, seconds, mib]), flush=True)


_LINUX = sys.platform == "linux"


def _load(path: Path, expect: str) -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            model = veca.load(path)
        except veca.CheckpointError as error:
            outcome, detail = REFUSAL, str(error)
        except BaseException as error:
            return "crash", f"{type(error).__name__}: {error}"
        else:
            outcome, detail = MODEL, "; ".join(str(each.message) for each in warned)
            json.dumps([model.provenance, model.config.to_dict()])
    if len(detail) > MAX_MESSAGE or not detail.isprintable():
        return "wrong message", repr(detail)
    if "allocate memory" in detail:
        return "wrong claim", detail
    return (outcome, detail) if expect in (EITHER, outcome) else (f"wrong {outcome}", detail)


def _commands(folder: Path, path: Path, status: int = 0) -> str:
    """Run `veca info` and `veca convert` in place; what is wrong with what they say, or nothing."""
    from veca.cli.main import main

    converted = folder / "converted.pt"
    for arguments in (
        ["info", "--model", str(path)],
        ["convert", "--model", str(path), "--out", str(converted), "--overwrite"],
    ):
        out, err, code = io.StringIO(), io.StringIO(), 0
        shown, sys.argv = sys.argv, ["veca", *arguments]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
                main()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            return f"{arguments[0]}: {type(error).__name__}: {error}"
        finally:
            sys.argv = shown
        if arguments[0] == "convert" and code == 0 and veca.load(converted).config != veca.load(path).config:
            return "convert: the file is read back otherwise"
        refused = status or (arguments[0] == "convert" and "released format" in err.getvalue())
        if code != int(bool(refused)) or (code and len(err.getvalue().splitlines()) != 1):
            return f"{arguments[0]}: status {code}: {err.getvalue()}"
    return ""


if __name__ == "__main__":
    sys.exit(run_script(__doc__, run, child, count=1000, seed=0))
