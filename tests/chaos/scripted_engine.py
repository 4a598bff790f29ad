"""A test tool that speaks vLLM's protocol over a unix socket and makes up its answers: no model runs in it.

A completion is a pure function of the weights that were loaded last, the prompt and the request's seed. So a run with
it repeats to the bit, and an engine that missed a sync writes other tokens. Tokens are drawn evenly from the
tokenizer's characters, and their logprobs say so; the trainer's importance weights are as true as with a real engine.

It can misbehave on purpose (`Faults`): close the connection instead of answering, answer 500, answer late, or keep its
old weights while it says that it has the new ones.

A judge's verdict is a function of the question alone.

It sleeps as vLLM's server is documented to, on any machine: memory that sleeps holds nothing (at level 2, not even
afterwards), a load into it is an error, and a question waits until all of it is awake again.

Not here: putting it in vLLM's place (`command`). Standard library only, so that it starts at once.
"""

import argparse
import array
import asyncio
import hashlib
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

_CHARACTERS_AT_MOST = 1  # a token of more is a special one, and never written
_MEMORY = ("weights", "kv_cache")
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
_WORDS = {2: "h", 4: "i", 8: "q"}

Answer = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Faults:
    """Shares are of the calls that generate or load; what happens to which call follows from `seed` and its number."""

    seed: int = 0
    close: float = 0.0
    error: float = 0.0
    late: float = 0.0
    late_s: float = 2.0
    stale_from: int | None = None
    """The load from which on weights are no longer taken; the load 0 is that of the model's own, at the start."""

    def of_call(self, number: int) -> str | None:
        """Return `close`, `error`, `late` or None."""
        at = random.Random(f"{self.seed}/{number}").random()
        for name, share in (("close", self.close), ("error", self.error), ("late", self.late)):
            if at < share:
                return name
            at -= share
        return None


@dataclass(frozen=True, slots=True)
class Tensor:
    """The engine keeps this of a tensor: a digest of its type, shape and bytes, and the sums that ycore asks for."""

    digest: str
    width: int
    rows: int
    columns: int


@dataclass(slots=True)
class ScriptedEngine:
    """The server's state: the digest of its weights, the version it was given, and how it misbehaves."""

    letters: tuple[tuple[int, str], ...]
    weights: dict[str, "Tensor"]
    model: Path
    faults: Faults = Faults()
    calls: tuple[str, ...] = ()
    """Functions that most completions are calls of, with a digit."""

    think_s: float = 0.0
    token_s: float = 0.0
    """Seconds that each token takes; until then it can be aborted."""

    under_way: dict[str, asyncio.Event] = field(default_factory=dict)
    """Events, by the request's id, that tell it to come back as far as it is."""

    version: str = "default"
    num_loads: int = 1
    num_calls: int = field(default=0)
    asleep: set[str] = field(default_factory=set)
    """Parts of the memory that sleep: `weights`, `kv_cache`."""

    awake: asyncio.Event = field(default_factory=asyncio.Event)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the body of an answer to `/v1/completions`."""
        inputs = [self.digest(), request["prompt"], request["seed"]]
        source = random.Random(hashlib.sha256(json.dumps(inputs).encode()).digest())
        most = int(request["max_tokens"])
        length = source.randint(min(2, most), most)
        written = [source.choice(self.letters) for _ in range(length)]
        if self.calls and source.random() < 0.7:
            numbers, call = (
                {letter: number for number, letter in self.letters},
                source.choice(self.calls),
            )
            written = [
                (numbers[letter], letter) for letter in f"{call}({source.randint(0, 9)})"
            ][:most]
            length = len(written)
        ids, ends = [number for number, _ in written], request.get("stop_token_ids") or []
        if length < most and ends:
            ids.append(ends[0])
        choice = {
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-math.log(len(self.letters))] * len(ids)},
            "text": "".join(letter for _, letter in written),
            "finish_reason": "stop" if length < most else "length",
        }
        return {"choices": [choice]}

    async def write(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do as `complete`, or return as much of it as was written when it was aborted."""
        body = self.complete(request)
        if not self.token_s:
            return body
        (choice,), name = body["choices"], f"cmpl-{request['request_id']}-0"
        ids, began = choice["token_ids"], asyncio.get_running_loop().time()
        aborted = self.under_way[name] = asyncio.Event()
        with suppress(TimeoutError):
            await asyncio.wait_for(aborted.wait(), self.token_s * len(ids))
        del self.under_way[name]
        if aborted.is_set():
            written = min(
                len(ids), int((asyncio.get_running_loop().time() - began) / self.token_s)
            )
            choice["token_ids"] = ids[:written]
            choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][
                :written
            ]
            choice |= {"text": choice["text"][:written], "finish_reason": "abort"}
        return body

    def judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the body for `/v1/chat/completions`: a number in the range of the schema that was sent along."""
        schema = request["response_format"]["json_schema"]["schema"]
        question = json.dumps(request["messages"])
        source = random.Random(question)
        code = re.search(r'code is \\"([0-9a-f]+)', question)
        made_up = {"code": code[1]} if code else {}
        verdict = {
            name: round(source.uniform(schema_["minimum"], schema_["maximum"]), 3)
            if schema_["type"] == "number"
            else made_up.get(name, "made up")
            for name, schema_ in schema["properties"].items()
        }
        message = {"role": "assistant", "content": json.dumps(verdict)}
        return {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"total_tokens": 1},
        }

    def digest(self) -> str:
        digests = sorted((name, tensor.digest) for name, tensor in self.weights.items())
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def read_back(self) -> list[tuple[str, int, int, int, int, int]]:
        """Return the sums of the weights it holds, as `PolicyWorker.load_policy` does."""
        return [
            (name, 0, 0, sums.width, sums.rows, sums.columns)
            for name, sums in self.weights.items()
        ]

    def sleep(self, level: int) -> None:
        """All memory sleeps; what is in it is kept at level 1, but for the cache, and lost at level 2."""
        print(f"sleeps at level {level}", file=sys.stderr, flush=True)
        self.asleep = set(_MEMORY)
        self.awake.clear()
        if level > 1:
            self.weights = {}

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate memory again; questions are answered once all of it is awake."""
        print(f"wakes: {' '.join(tags)}", file=sys.stderr, flush=True)
        self.asleep -= set(tags or _MEMORY)
        if not self.asleep:
            self.awake.set()

    def load(self, folder: Path) -> None:
        """Take the weights in `folder`, unless this engine has stopped doing so."""
        print("loads", file=sys.stderr, flush=True)
        if "weights" in self.asleep:
            raise RuntimeError("a load into memory that sleeps")
        stale_from = self.faults.stale_from
        if stale_from is None or self.num_loads < stale_from:
            self.weights = read_weights(folder)
        self.num_loads += 1


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a folder's safetensors files, by its name."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                tensors[name] = _tensor(
                    entry["dtype"], entry["shape"], data[start + begin : start + end]
                )
    if not tensors:
        raise FileNotFoundError(f"no safetensors in {folder}")
    return tensors


def _tensor(dtype: str, shape: Sequence[int], body: bytes) -> Tensor:
    """Take the sums of `ycore.engine.weight_proof.tensor_sums`, written a second time without torch."""
    width = _WIDTHS[dtype]
    num_columns = math.prod(shape[1:])
    width = 8 if num_columns * width % 8 == 0 else width
    words = array.array(_WORDS[width], body)
    num_words = len(words) // shape[0]
    by_row = (sum(words[row * num_words : (row + 1) * num_words]) for row in range(shape[0]))
    by_column = (sum(words[column::num_words]) for column in range(num_words))
    digest = hashlib.sha256(f"{dtype} {list(shape)} ".encode() + body).hexdigest()
    return Tensor(
        digest, width, _hash(by_row, 0x5851F42D4C957F2D), _hash(by_column, 0x14057B7EF767814F)
    )


def _hash(sums: Iterable[int], base: int) -> int:
    return (
        sum(tensor_sum * pow(base, place, 2**64) for place, tensor_sum in enumerate(sums, 1))
        % 2**64
    )


def read_letters(model: Path) -> tuple[tuple[int, str], ...]:
    """Read the tokens of one character, with their numbers, of a tokenizer that has one token a character."""
    vocabulary = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"][
        "vocab"
    ]
    return tuple(
        (number, token)
        for token, number in vocabulary.items()
        if len(token) == _CHARACTERS_AT_MOST
    )


class Server:
    """HTTP/1.1 with just what ycore's client uses: a request line, a length, a JSON body, one answer after another."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def serve(self, socket: Path) -> None:
        """Serve until killed."""
        server = await asyncio.start_unix_server(self._talk, path=str(socket), limit=2**24)
        async with server:
            await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split()
                headers = {
                    line.partition(":")[0].lower(): line.partition(":")[2].strip()
                    for line in head[1:]
                }
                if method == "PUT":
                    folder = await self._take_file(Path(path).name, reader)
                    writer.write(_as_http(200, folder))
                    continue
                length = int(headers.get("content-length", 0))
                body = json.loads(await reader.readexactly(length)) if length else {}
                status, answer = await self._answer(path, body)
                if status == 0:
                    break
                writer.write(_as_http(status, answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _take_file(self, name: str, reader: asyncio.StreamReader) -> str:
        """Write a file of weights that comes in chunks, as `vllm_plugin.WeightFiles` does; return its folder."""
        folder = Path(tempfile.gettempdir()) / "weights"
        folder.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            while length := int(await reader.readline(), 16):
                file.write(await reader.readexactly(length))
                await reader.readline()
            await reader.readline()
        return str(folder)

    async def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Status 0 closes the connection instead."""
        engine = self._engine
        path, _, query = path.partition("?")
        if path in ("/sleep", "/wake_up", "/is_sleeping"):
            return 200, self._rest(path, parse_qs(query))
        if path.startswith("/v1/"):
            await engine.awake.wait()
        if path in ("/v1/completions", "/v1/chat/completions", "/collective_rpc"):
            fault = engine.faults.of_call(engine.num_calls)
            engine.num_calls += 1
            if fault == "close":
                return 0, None
            if fault == "error":
                return 500, {"error": "made up"}
            await asyncio.sleep(
                engine.think_s + (engine.faults.late_s if fault == "late" else 0.0)
            )
        if path == "/v1/completions":
            return 200, await engine.write(body)
        if path == "/abort_requests":
            for name in body["request_ids"]:
                if name in engine.under_way:
                    engine.under_way[name].set()
        if path == "/v1/chat/completions":
            return 200, engine.judge(body)
        if path == "/collective_rpc":
            return 200, self._call(body["method"], body.get("kwargs") or {})
        if path == "/update_weight_version":
            engine.version = str(body["new_version"])
        if path == "/weight_info":
            return 200, {"weight_version": engine.version}
        return 200, {}

    def _rest(self, path: str, query: dict[str, list[str]]) -> dict[str, Any]:
        engine = self._engine
        if path == "/sleep":
            engine.sleep(int(query.get("level", ["1"])[0]))
        elif path == "/wake_up":
            engine.wake(query.get("tags", []))
        return {"is_sleeping": bool(engine.asleep)}

    def _call(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if method == "reload_weights":
            self._engine.load(self._engine.model)
        if method == "load_policy":
            self._engine.load(Path(arguments["weights_path"]))
        if method in ("load_policy", "held_policy"):
            return {"results": [self._engine.read_back()]}
        return {"results": [None]}


def _as_http(status: int, value: Any) -> bytes:
    body = json.dumps(value).encode()
    reason = "OK" if status == 200 else "Internal Server Error"
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `python -m tests.chaos.scripted_engine --model FOLDER --uds SOCKET`; vLLM's other options mean nothing."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--uds", type=Path, required=True)
    parser.add_argument("--faults", type=json.loads, default={})
    parser.add_argument("--think-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument(
        "--calls", default="", help="functions, with commas between, that completions call"
    )
    options, _ = parser.parse_known_args(arguments)
    engine = ScriptedEngine(
        letters=read_letters(options.model),
        weights=read_weights(options.model),
        model=options.model,
        faults=Faults(**options.faults),
        calls=tuple(options.calls.split(",")) if options.calls else (),
        think_s=options.think_s,
        token_s=options.token_s,
    )
    engine.awake.set()
    print(f"scripted engine at {options.uds}", file=sys.stderr, flush=True)
    asyncio.run(Server(engine).serve(options.uds))


if __name__ == "__main__":
    main()
