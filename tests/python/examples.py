#!/usr/bin/env python3
"""Compares the answers of the example Python models with direct calls of the libraries that they use.

Usage: examples.py SHADOWSLICE_BINARY PYTHON_WITH_TORCH [unittest arguments]

If PYTHON_WITH_TORCH does not exist, the tests that need PyTorch are skipped.
"""

import json
import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import joblib
import numpy as np
import openai
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from server import Server
from streams import Stream, tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "configs" / "python"

# A model whose outputs are tensors that PyTorch cannot convert to NumPy directly.
TENSORS = """
import torch
from shadowslice import Tensor

class Tensors:
    inputs = {"x": Tensor("FP32", [-1, 4])}
    outputs = {"gradient": Tensor("FP32", [-1, 4]), "brains": Tensor("BF16", [-1, 4])}

    def load(self, context):
        self.factor = torch.tensor(3.0, requires_grad=True)

    def infer(self, batch):
        x = torch.from_numpy(batch["x"])
        return {"gradient": x * self.factor, "brains": (x * 2).bfloat16()}
"""

# A program that runs the network without a server. It reads images as JSON and writes probabilities.
DIRECT = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from net import Net
net = Net().eval()
net.load_state_dict(torch.load(sys.argv[1] + "/weights.pt"))
with torch.no_grad():
    print(json.dumps(net(torch.tensor(json.load(sys.stdin))).softmax(1).tolist()))
"""

# A program that generates tokens with `generate` of transformers. It reads a list of prompts as JSON and writes tokens.
GENERATE = """
import json, sys, torch
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from model import LanguageModel
from shadowslice import Context
model = LanguageModel()
model.load(Context(name="direct", folder=Path(sys.argv[1]), cache=None, device="cpu"))
prompts, count = json.load(sys.stdin)
tokens = [model.network.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
          for prompt in prompts]
tokens = [row[0, len(prompt):].tolist() for row, prompt in zip(tokens, prompts)]
# The token 0 ends a text.
print(json.dumps([row[:row.index(0) + 1] if 0 in row else row for row in tokens]))
"""

# A program that computes the vectors of texts one by one.
EMBED = """
import json, sys
import numpy as np
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from model import Embeddings
from shadowslice import Context
model = Embeddings()
model.load(Context(name="direct", folder=Path(sys.argv[1]), cache=None, device="cpu"))
print(json.dumps([model.infer({"text": np.array([text.encode()], object)})["vector"][0].tolist()
                  for text in json.load(sys.stdin)]))
"""

SERVER = TORCH = BFLOAT16 = None


class Examples(Server):
    def __init__(self, binary, torch, bfloat16):
        self.torch, self.bfloat16 = torch, bfloat16
        super().__init__(binary, self.write)

    def write(self, folder):
        """Copies the examples, and runs the scripts that write their model files."""
        for name, script, program in [("scikit_learn", "fit.py", sys.executable), ("pytorch", "train.py", self.torch)]:
            if program:
                shutil.copytree(EXAMPLES / name, folder / name)
                subprocess.run([program, folder / name / script], check=True, timeout=120)
        for name in ("language_model", "embeddings", "streamer"):
            shutil.copytree(EXAMPLES / name, folder / name)
        (folder / "tensors.py").write_text(TENSORS)
        return {}

    def configuration(self, _):
        models = [("irises", "scikit_learn", sys.executable)]
        if self.torch:
            models.append(("patterns", "pytorch", self.torch))
            models.append(("embedder", "embeddings", self.torch))
        if self.bfloat16:
            models.append(("tensors", "tensors.py", self.torch))
        lines = [f"  - {{name: {name}, engine: python, path: {path}, slo: 1s, python: {{executable: {program}}}, "
                 "batch: {max: 4}, share: {initial: 20%}}" for name, path, program in models]
        if self.torch:
            lines.append("  - {name: language_model, engine: python, path: language_model, slo: {first: 5s, next: 1s}, "
                         f"python: {{executable: {self.torch}}}, share: {{initial: 20%}}}}")
            lines.append(f"  - {{name: streamer, engine: python, path: streamer, slo: 5s, python: {{executable: {self.torch}}}, "
                         "share: {initial: 20%}, openai: {completions: {prompt: prompt, text: text, "
                         "fields: {max_tokens: {input: max_tokens, default: 16}}}}}")
            lines[2] = lines[2][:-1] + ", openai: {embeddings: {input: text, embedding: vector, prompt_tokens: tokens}}}"
        head = super().configuration({}).replace("models:\n", "workers: {environment: [PYTHONPATH]}\nmodels:\n")
        return head + "\n".join(lines) + "\n"


def setUpModule():
    global SERVER, TORCH, BFLOAT16
    TORCH = os.path.abspath(sys.argv[1]) if os.path.exists(sys.argv[1]) else None
    # This interpreter's ml_dtypes does not count, because the interpreter with PyTorch may have another Python version.
    BFLOAT16 = TORCH and subprocess.run([TORCH, "-c", "import ml_dtypes"], stderr=subprocess.DEVNULL).returncode == 0
    SERVER = Examples(sys.argv[0], TORCH, BFLOAT16)


def tearDownModule():
    SERVER.stop()


def infer(model, name, array):
    with grpcclient.InferenceServerClient(f"localhost:{SERVER.grpc_port}") as client:
        tensor = grpcclient.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor], client_timeout=30)


class ExamplesAnswer(unittest.TestCase):
    def test_scikit_learn(self):
        classifier = joblib.load(SERVER.folder / "scikit_learn" / "classifier.joblib")
        measures = np.array([[5.1, 3.5, 1.4, 0.2], [6.2, 2.9, 4.3, 1.3], [6.5, 3.0, 5.8, 2.2]], np.float32)
        answer = infer("irises", "measures", measures)
        species = [name.decode() for name in answer.as_numpy("species")]
        self.assertEqual(species, classifier.predict(measures).tolist())
        self.assertEqual(species, ["setosa", "versicolor", "virginica"])
        np.testing.assert_allclose(answer.as_numpy("probability"), classifier.predict_proba(measures), rtol=1e-5)

    def test_pytorch(self):
        self.need(TORCH)
        images = np.random.default_rng(1).random((3, 3, 32, 32), np.float32)
        images[0] += np.arange(32) // 4 % 2
        direct = subprocess.run([TORCH, "-c", DIRECT, SERVER.folder / "pytorch"], check=True, text=True, timeout=60,
                                input=json.dumps(images.tolist()), stdout=subprocess.PIPE)
        probability = infer("patterns", "images", images).as_numpy("probability")
        np.testing.assert_allclose(probability, json.loads(direct.stdout), rtol=1e-4, atol=1e-6)
        self.assertGreater(probability[0, 0], 0.9, "columns are recognised")

    def direct(self, program, example, given):
        package = Path(__file__).resolve().parents[2] / "python"
        done = subprocess.run([TORCH, "-c", program, SERVER.folder / example, package], check=True, text=True,
                              timeout=120, input=json.dumps(given), stdout=subprocess.PIPE)
        return json.loads(done.stdout)

    def test_streams_of_a_language_model_are_right_to_the_token(self):
        self.need(TORCH)
        random = np.random.default_rng(1)
        prompts = [random.integers(1, 512, random.integers(1, 60)).tolist() for _ in range(24)]
        streams = [Stream(SERVER) for _ in prompts]
        for stream, prompt in zip(streams, prompts):
            self.addCleanup(stream.close)
            stream.ask("language_model", [tensor("prompt", np.array(prompt, np.int64), "INT64"),
                                          tensor("max_tokens", np.int32([30]), "INT32")],
                       enable_empty_final_response=True)
        tokens = [[int(answer.as_numpy("token")[0]) for answer in stream.rest()] for stream in streams]
        self.assertEqual(tokens, self.direct(GENERATE, "language_model", [prompts, 30]))
        with self.assertRaisesRegex(InferenceServerException, "tokens must be from 0 to 511"):
            streams[0].until_the_end("language_model", [tensor("prompt", np.int64([512]), "INT64"),
                                                        tensor("max_tokens", np.int32([1]), "INT32")])

    def test_the_thread_of_a_streamer_fails_alone_and_its_client_gets_the_exception(self):
        self.need(TORCH)
        client = openai.OpenAI(base_url=f"http://localhost:{SERVER.http_port}/v1", api_key="none", max_retries=0)
        self.addCleanup(client.close)
        whole = client.completions.create(model="streamer", prompt="GPU sharing is", max_tokens=40).choices[0].text
        self.assertGreater(len(whole.split()), 10)
        # The network has 1,024 positions, so its thread raises after them.
        failing = client.completions.create(model="streamer", prompt="GPU sharing is", max_tokens=2000, stream=True)
        pieces = [next(failing).choices[0].text]
        events = client.completions.create(model="streamer", prompt="GPU sharing is", max_tokens=40, stream=True)
        self.assertEqual("".join(event.choices[0].text for event in events), whole)
        with self.assertRaisesRegex(openai.APIError, "IndexError: index out of range"):
            pieces.extend(event.choices[0].text for event in failing)
        self.assertTrue("".join(pieces).startswith(whole[:-1]))

    def test_openai_s_client_gets_the_vectors_of_texts(self):
        self.need(TORCH)
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "GPUs are shared badly, and one model rarely fills one."]
        client = openai.OpenAI(base_url=f"http://localhost:{SERVER.http_port}/v1", api_key="none")
        self.addCleanup(client.close)
        reply = client.embeddings.create(model="embedder", input=texts)
        vectors = np.array([row.embedding for row in reply.data])
        np.testing.assert_allclose(vectors, self.direct(EMBED, "embeddings", texts), atol=1e-5)
        self.assertGreater(vectors[0] @ vectors[1], 0.5)
        self.assertLess(vectors[0] @ vectors[2], 0.2)
        self.assertEqual(reply.usage.prompt_tokens, 9 + 9 + 15)

    def test_tensors_with_gradients_and_of_bfloat16(self):
        self.need(BFLOAT16)
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        answer = infer("tensors", "x", x)
        np.testing.assert_array_equal(answer.as_numpy("gradient"), 3 * x)
        np.testing.assert_array_equal(answer.as_numpy("brains").astype(np.float32), 2 * x)
        self.assertNotIn("not writable", SERVER.log_tail())

    def test_configurations_are_sound(self):
        programs = {"scikit_learn": sys.executable, "pytorch": TORCH, "language_model": TORCH, "embeddings": TORCH,
                    "streamer": TORCH}
        for name, program in programs.items():
            if not program:
                continue
            configuration = SERVER.folder / name / "shadowslice.yaml"
            variables = os.environ | {"PATH": os.path.dirname(program) + os.pathsep + os.environ["PATH"]}
            checked = subprocess.run([SERVER.binary, "check", configuration], env=variables, text=True,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60)
            self.assertEqual(checked.returncode, 0, checked.stdout)

    def need(self, what):
        if not what:
            self.skipTest("no usable PyTorch found")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
