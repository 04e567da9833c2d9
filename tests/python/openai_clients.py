#!/usr/bin/env python3
"""Tests OpenAI's endpoints with the official Python client, curl and Node.

Usage: openai_clients.py SHADOWSLICE_BINARY [unittest arguments]
"""

import base64
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import unittest
import urllib.error
import urllib.request

import openai

from server import Server, wait_until

TIMEOUT = 30  # seconds

# These models have vectors that follow from the texts or tokens.
EMBEDDERS = """
import numpy as np
from shadowslice import Tensor

class {name}:
    inputs = {{"{input}": Tensor("{datatype}", {shape})}}
    outputs = {{"vector": Tensor("{vector}", [{axis}, 4]), "tokens": Tensor("INT32", [{axis}, 1])}}

    def infer(self, batch):
        rows = batch["{input}"].tolist()
        numbers = [[len(x) if isinstance(x, bytes) else x for x in row] for row in rows]
        vectors = [[sum(row), -0.1, len(row), max(row, default=0)] for row in numbers]
        return {{"vector": np.array(vectors, "{numpy}"), "tokens": np.array([[sum(row)] for row in numbers], np.int32)}}
"""

# This model streams the words of the prompt. The first word can select a fault.
WRITER = """
import os, time
import numpy as np
from shadowslice import InvalidInput, Tensor

class Writer:
    inputs = {"prompt": Tensor("BYTES", [1]), "limit": Tensor("INT32", [1]), "heat": Tensor("FP32", [1])}
    outputs = {"text": Tensor("BYTES", [1]), "reason": Tensor("BYTES", [1]),
               "read": Tensor("INT32", [1]), "written": Tensor("INT32", [1])}
    streams = 4

    def warmup(self):
        return {"prompt": np.array([b"a b"], dtype=object), "limit": np.int32([3]), "heat": np.float32([1])}

    def generate(self, request):
        words = request["prompt"][0].split()
        limit = int(request["limit"][0])
        if words[0] == b"unlucky": raise InvalidInput("it is unlucky")
        if words[0] == b"bytes": words = [bytes([byte]) for byte in "h\\u00e9\\u20ac".encode()]
        if words[0] == b"forever": words = words * 10**6
        if words[0] == b"heat": words = [str(float(request["heat"][0])).encode()]
        try:
            for n, word in enumerate(words[:limit]):
                if word == b"broken": raise RuntimeError("a broken model")
                if words[0] == b"forever": time.sleep(0.002)
                last = n + 1 == min(limit, len(words))
                reason = b"" if not last else b"length" if limit < len(words) else b"stop"
                yield {"text": np.array([word], dtype=object), "reason": np.array([reason], dtype=object),
                       "read": np.int32([len(words)]), "written": np.int32([n + 1])}
        except GeneratorExit:
            print("given up at", n, flush=True)
            raise
"""

# This model has one answer to a request.
UPPER = """
import numpy as np
from shadowslice import Tensor

class Upper:
    inputs = {"prompt": Tensor("BYTES", [-1, 1])}
    outputs = {"text": Tensor("BYTES", [-1, 1])}

    def infer(self, batch):
        return {"text": np.array([[text.upper() for text in row] for row in batch["prompt"]], dtype=object)}
"""

WRITER_KEYS = """completions: {prompt: prompt, text: text, finish_reason: reason, prompt_tokens: read,
      completion_tokens: written, fields: {max_tokens: {input: limit, default: 16}, temperature: {input: heat, default: 1.0}}}"""
TOKEN = "a secret token"
VECTOR = "input: x, embedding: vector"

MODELS = {
    "texts": (EMBEDDERS.format(name="Texts", input="x", datatype="BYTES", shape=[-1, 1], vector="FP32", numpy="f4", axis=-1),
              f"embeddings: {{{VECTOR}, prompt_tokens: tokens}}"),
    "ids": (EMBEDDERS.format(name="Ids", input="x", datatype="INT64", shape=[-1, -1], vector="FP16", numpy="f2", axis=-1),
            f"embeddings: {{{VECTOR}}}"),
    "single": (EMBEDDERS.format(name="Single", input="x", datatype="BYTES", shape=[1, 1], vector="FP64", numpy="f8", axis=1),
               f"embeddings: {{{VECTOR}, prompt_tokens: tokens}}"),
    "writer": (WRITER, WRITER_KEYS),
    "upper": (UPPER, "completions: {prompt: prompt, text: text}"),
    "wrong": (UPPER, "completions: {prompt: prompt, text: txet}"),
    "unmapped": (UPPER, None),
}

SERVER = None


class Models(Server):
    def write(self, folder):
        for name, (text, _) in MODELS.items():
            (folder / f"{name}.py").write_text(text)
        (folder / "tokens").write_text(f"ci {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
        return {}

    def __init__(self, binary):
        super().__init__(binary, self.write)

    def configuration(self, _):
        python = "python: {executable: " + sys.executable + "}, slo: 1s, share: {initial: 10%}"
        lines = ["listen:",
                 f'  http: ["unix:http.sock", {{address: "127.0.0.1:{self.http_port}", tokens: tokens}}]',
                 f'  grpc: ["127.0.0.1:{self.grpc_port}"]',
                 "  metrics: []",
                 "gpus: [{device: emulated, sms: 132}]",
                 "controller: {policy: static}",
                 "workers: {environment: [PYTHONPATH]}",
                 "ready: all",
                 "models:"]
        for name, (_, keys) in MODELS.items():
            mapping = f", openai: {{{keys}}}" if keys else ""
            lines.append(f"  - {{path: {name}.py, {python}{mapping}}}")
        return "\n".join(lines) + "\n"


def setUpModule():
    global SERVER
    SERVER = Models(sys.argv[0])


def tearDownModule():
    SERVER.stop()


def base_url():
    return f"http://127.0.0.1:{SERVER.http_port}/v1"


def official(token=TOKEN):
    return openai.OpenAI(base_url=base_url(), api_key=token, max_retries=0, timeout=TIMEOUT)


def plain(path, body=None):
    """Sends a request without a client library. Returns the status, the headers and the body."""
    request = urllib.request.Request(f"{base_url()}{path}", body, {"authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


class Clients(unittest.TestCase):
    def setUp(self):
        self.client = official()
        self.addCleanup(self.client.close)


class Embeddings(Clients):
    def test_a_text_has_one_vector(self):
        # The official client requests base64.
        found = self.client.embeddings.create(model="texts", input="hello")
        self.assertEqual([round(x, 6) for x in found.data[0].embedding], [5.0, -0.1, 1.0, 5.0])
        self.assertEqual((found.object, found.model, found.data[0].index), ("list", "texts", 0))
        self.assertEqual((found.usage.prompt_tokens, found.usage.total_tokens), (5, 5))

    def test_both_encodings_have_the_same_numbers(self):
        ask = {"model": "texts", "input": ["a", "bcd"]}
        floats = self.client.embeddings.create(encoding_format="float", **ask)
        texts = self.client.embeddings.create(encoding_format="base64", **ask)
        for one, other in zip(floats.data, texts.data):
            packed = struct.pack("<4f", *one.embedding)
            self.assertEqual(base64.b64decode(other.embedding), packed)
        self.assertEqual([data.embedding[0] for data in floats.data], [1.0, 3.0])
        self.assertEqual(floats.usage.total_tokens, 4)

    def test_many_texts_are_batches_in_their_order(self):
        for model in "texts", "single":
            texts = ["x" * (n % 7) for n in range(100)]
            found = self.client.embeddings.create(model=model, input=texts)
            self.assertEqual([data.embedding[0] for data in found.data], [len(text) for text in texts])
            self.assertEqual([data.index for data in found.data], list(range(100)))
            self.assertEqual(found.usage.prompt_tokens, sum(map(len, texts)))

    def test_tokens(self):
        for tokens, expected in [([1, 2, 3], [6]), ([[1, 2], [3, 4], [5]], [3, 7, 5])]:
            found = self.client.embeddings.create(model="ids", input=tokens)
            self.assertEqual([data.embedding[0] for data in found.data], expected)
            self.assertIsNone(found.usage, "the model reports none")

    def test_dimensions_must_be_those_of_the_model(self):
        self.assertEqual(len(self.client.embeddings.create(model="texts", input="a", dimensions=4).data), 1)
        with self.assertRaisesRegex(openai.BadRequestError, "must be 4 for this model") as caught:
            self.client.embeddings.create(model="texts", input="a", dimensions=2)
        self.assertEqual(caught.exception.param, "dimensions")

    def test_wrong_requests(self):
        for model, text, why in [("texts", [1, 2], "a string or an array of strings"), ("ids", "a", "arrays of tokens"),
                                 ("texts", [], "not empty"), ("ids", [2**70], "invalid data")]:
            with self.subTest(why), self.assertRaisesRegex(openai.BadRequestError, why):
                self.client.embeddings.create(model=model, input=text)
        for model in "absent", "unmapped", "writer":
            with self.subTest(model), self.assertRaises(openai.NotFoundError) as caught:
                self.client.embeddings.create(model=model, input="a")
            self.assertEqual((caught.exception.code, caught.exception.type),
                             ("model_not_found", "invalid_request_error"))


class Completions(Clients):
    def test_all_answers_are_joined(self):
        found = self.client.completions.create(model="writer", prompt="a b c")
        self.assertEqual((found.choices[0].text, found.choices[0].finish_reason), ("abc", "stop"))
        self.assertEqual((found.object, found.model), ("text_completion", "writer"))
        self.assertEqual((found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens), (3, 3, 6))

    def test_fields_are_inputs(self):
        found = self.client.completions.create(model="writer", prompt="a b c", max_tokens=2)
        self.assertEqual((found.choices[0].text, found.choices[0].finish_reason), ("ab", "length"))
        for heat, expected in [({}, "1.0"), ({"temperature": 0.5}, "0.5")]:
            self.assertEqual(self.client.completions.create(model="writer", prompt="heat", **heat).choices[0].text, expected)

    def test_events(self):
        chunks = list(self.client.completions.create(model="writer", prompt="a b c", stream=True))
        self.assertEqual([(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks],
                         [("a", None), ("b", None), ("c", "stop")])
        self.assertEqual(len({(chunk.id, chunk.created) for chunk in chunks}), 1)
        self.assertEqual({chunk.usage for chunk in chunks}, {None})

    def test_events_with_usage(self):
        *chunks, last = self.client.completions.create(model="writer", prompt="a b c", stream=True,
                                                       stream_options={"include_usage": True})
        self.assertEqual(["".join(choice.text for choice in chunk.choices) for chunk in chunks], ["a", "b", "c"])
        self.assertEqual((last.choices, last.usage.completion_tokens, last.usage.total_tokens), ([], 3, 6))

    def test_characters_are_whole(self):
        chunks = [chunk.choices[0].text for chunk in
                  self.client.completions.create(model="writer", prompt="bytes", stream=True)]
        self.assertEqual(chunks, ["h", "", "é", "", "", "€"])

    def test_a_model_with_one_answer(self):
        found = self.client.completions.create(model="upper", prompt=["hello"])
        self.assertEqual((found.choices[0].text, found.choices[0].finish_reason, found.usage), ("HELLO", "stop", None))
        chunks = list(self.client.completions.create(model="upper", prompt="hello", stream=True))
        self.assertEqual([(chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks],
                         [("HELLO", None), ("", "stop")])

    def test_unsupported_fields_are_refused(self):
        for field, value in [("n", 2), ("best_of", 3), ("echo", True), ("logprobs", 1), ("suffix", "x"), ("stop", ["."]),
                             ("top_p", 0.5), ("seed", 7)]:
            with self.subTest(field), self.assertRaises(openai.BadRequestError) as caught:
                self.client.completions.create(model="writer", prompt="a", **{field: value})
            self.assertEqual(caught.exception.param, field)
        with self.assertRaisesRegex(openai.BadRequestError, "'max_tokens' is not supported by this model"):
            self.client.completions.create(model="upper", prompt="a", max_tokens=3)
        with self.assertRaisesRegex(openai.BadRequestError, "one string"):
            self.client.completions.create(model="writer", prompt=["a", "b"])
        found = self.client.completions.create(model="writer", prompt="a", n=1, echo=False, user="me", top_p=1)
        self.assertEqual(found.choices[0].text, "a")

    def test_failures_before_and_in_a_stream(self):
        for stream in False, True:
            with self.assertRaisesRegex(openai.BadRequestError, "it is unlucky"):
                self.client.completions.create(model="writer", prompt="unlucky", stream=stream)
        with self.assertRaisesRegex(openai.InternalServerError, "a broken model"):
            self.client.completions.create(model="writer", prompt="a broken")
        chunks = self.client.completions.create(model="writer", prompt="a b broken", stream=True)
        self.assertEqual([next(chunks).choices[0].text for _ in range(2)], ["a", "b"])
        with self.assertRaisesRegex(openai.APIError, "a broken model"):
            next(chunks)

    def test_a_wrong_mapping_is_the_operators_fault(self):
        with self.assertRaises(openai.InternalServerError) as caught:
            self.client.completions.create(model="wrong", prompt="a")
        self.assertIn("openai.completions.text: the model has no output 'txet'; its outputs are: text", str(caught.exception))
        self.assertEqual(caught.exception.type, "server_error")

    def test_a_dead_worker_ends_its_streams(self):
        before = SERVER.worker("writer")
        chunks = self.client.completions.create(model="writer", prompt="forever", max_tokens=10**6, stream=True)
        next(chunks)
        os.kill(before, signal.SIGKILL)
        with self.assertRaisesRegex(openai.APIError, "send the request again|died while computing"):
            list(chunks)
        wait_until(lambda: SERVER.worker("writer") not in (None, before))
        self.assertEqual(self.client.completions.create(model="writer", prompt="a").choices[0].text, "a")

    def test_a_client_that_leaves_ends_its_generator(self):
        def given_up():
            return len(re.findall("given up at", SERVER.log_tail()))

        for stream in False, True:
            before = given_up()
            client = official()
            if stream:
                chunks = client.completions.create(model="writer", prompt="forever", max_tokens=10**6, stream=True)
                next(chunks)
                chunks.close()
            else:
                with self.assertRaises(openai.APITimeoutError):
                    client.with_options(timeout=0.5).completions.create(model="writer", prompt="forever", max_tokens=10**6)
            client.close()
            wait_until(lambda: given_up() > before)


class Plain(Clients):
    def test_models(self):
        listed = {model.id: model for model in self.client.models.list()}
        self.assertEqual(set(listed), set(MODELS) - {"unmapped"})
        self.assertEqual({model.owned_by for model in listed.values()}, {"shadowslice"})
        self.assertEqual(self.client.models.retrieve("upper"), listed["upper"])
        self.assertGreater(listed["upper"].created, 1_700_000_000)
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.models.retrieve("unmapped")
        self.assertEqual(caught.exception.code, "model_not_found")

    def test_tokens_protect_the_endpoints(self):
        for ask in (lambda client: client.models.list(), lambda client: client.embeddings.create(model="texts", input="a")):
            with self.assertRaises(openai.AuthenticationError) as caught:
                ask(official("another token"))
            self.assertEqual(caught.exception.code, "invalid_api_key")

    def test_garbage(self):
        for path, body, status in [("/completions", b"garbage", 400), ("/completions", b"", 400),
                                   ("/completions", b"[]", 400), ("/completions", b'{"model": 7}', 400),
                                   ("/embeddings", b'{"input": "a"}', 400), ("/embeddings", b'{"model": "absent"}', 404),
                                   ("/embeddings", b'{"model": "texts", "model": "ids"}', 400),
                                   ("/embeddings", None, 405), ("/models", b"{}", 405), ("/chat/completions", b"{}", 404)]:
            with self.subTest(path=path, body=body):
                got, headers, text = plain(path, body)
                error = json.loads(text)["error"]
                self.assertEqual((got, set(error)), (status, {"message", "type", "param", "code"}))
                self.assertEqual(error["type"], "invalid_request_error")

    def test_events_end_with_a_mark(self):
        body = json.dumps({"model": "upper", "prompt": "a", "stream": True}).encode()
        status, headers, text = plain("/completions", body)
        self.assertEqual((status, headers["content-type"], headers["content-encoding"]), (200, "text/event-stream", None))
        self.assertTrue(text.endswith(b"data: [DONE]\n\n"))

    def test_a_reload_changes_the_mapping_without_new_workers(self):
        before = SERVER.worker("upper")
        config = SERVER.folder / "config.yaml"
        text = config.read_text()
        mapped = "upper.py, "
        line = next(line for line in text.splitlines() if mapped in line)
        self.addCleanup(lambda: (config.write_text(text), SERVER.command("reload")))
        config.write_text(text.replace(line, line.split(", openai")[0] + "}"))
        SERVER.command("reload")
        with self.assertRaises(openai.NotFoundError):
            self.client.completions.create(model="upper", prompt="a")
        config.write_text(text)
        SERVER.command("reload")
        self.assertEqual(self.client.completions.create(model="upper", prompt="a").choices[0].text, "A")
        self.assertEqual(SERVER.worker("upper"), before)


@unittest.skipUnless(shutil.which("curl"), "curl is missing")
class Curl(unittest.TestCase):
    def test_events_are_not_buffered(self):
        body = json.dumps({"model": "writer", "prompt": "forever", "max_tokens": 10**6, "stream": True})
        with subprocess.Popen(["curl", "--silent", "--no-buffer", "--compressed", f"{base_url()}/completions", "--header",
                               f"authorization: Bearer {TOKEN}", "--data", body], stdout=subprocess.PIPE) as curl:
            first = json.loads(curl.stdout.readline().removeprefix(b"data: "))
            self.assertEqual(first["choices"][0]["text"], "forever")
            curl.terminate()


NODE = """
const [url, token] = process.argv.slice(1);
const headers = {authorization: `Bearer ${token}`, "content-type": "application/json"};
const ask = (path, body) => fetch(url + path, {method: "POST", headers, body: JSON.stringify(body)});
const vectors = await (await ask("/embeddings", {model: "texts", input: "abc"})).json();
const response = await ask("/completions", {model: "writer", prompt: "a b", stream: true});
let text = "";
for await (const chunk of response.body.pipeThrough(new TextDecoderStream())) text += chunk;
const events = text.split("\\n\\n").filter(Boolean).map(event => event.replace("data: ", ""));
const pieces = events.slice(0, -1).map(event => JSON.parse(event).choices[0].text);
console.log(JSON.stringify([vectors.data[0].embedding[0], pieces, events.at(-1)]));
"""


@unittest.skipUnless(shutil.which("node"), "Node is missing")
class Node(unittest.TestCase):
    def test_fetch(self):
        done = subprocess.run(["node", "--input-type=module", "--eval", NODE, base_url(), TOKEN], check=True,
                              stdout=subprocess.PIPE, timeout=TIMEOUT)
        self.assertEqual(json.loads(done.stdout), [3, ["a", "b"], "[DONE]"])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
