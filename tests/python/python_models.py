#!/usr/bin/env python3
"""Tests correct and faulty Python models with Triton's clients.

Usage: python_models.py SHADOWSLICE_BINARY [unittest arguments]
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import unittest
from pathlib import Path

import ml_dtypes
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aiogrpc
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from server import Server, wait_until

TYPES = {"FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "INT8": np.int8, "INT64": np.int64,
         "UINT8": np.uint8, "BOOL": np.bool_, "BF16": ml_dtypes.bfloat16}

EVERY_TYPE = f"""
from shadowslice import Tensor
TYPES = {[*TYPES, "BYTES"]!r}

class EveryType:
    inputs = {{name: Tensor(name, [-1, -1]) for name in TYPES}}
    outputs = {{"out_" + name: Tensor(name, [-1, -1]) for name in TYPES}}

    def infer(self, batch):
        return {{"out_" + name: array for name, array in batch.items()}}
"""

MOODS = """
import ctypes, os, signal, socket, subprocess, sys, tempfile, threading, time, urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
import numpy as np
from shadowslice import InvalidInput, Tensor

class Moods:
    inputs = {"mood": Tensor("BYTES", [-1, 1])}
    outputs = {"y": Tensor("FP32", [-1, -1]), "text": Tensor("BYTES", [-1, 1])}
    deterministic = False  # `y` is the number of rows in the batch.

    def load(self, context):
        self.context, self.kept = context, []
        with open(context.cache / "written", "w") as file:
            print(context.name, file=file)

    def infer(self, batch):
        self.kept.append(batch["mood"])
        moods = [mood.decode() for mood in batch["mood"][:, 0]]
        rows = len(moods)
        answer = {"y": np.full((rows, 2), rows, np.float32), "text": batch["mood"]}
        for mood in moods:
            answer = getattr(self, mood, lambda answer: answer)(answer) or answer
        return answer

    def raises(self, _): raise RuntimeError("a broken model")
    def refuses(self, _): raise InvalidInput("it is unlucky")
    def coloured(self, _): raise InvalidInput("\\x1b[31mred\\x00\\n\\tnext\\x9b " + "\\u00e4" * 10_000)
    def exits(self, _): sys.exit(3)
    def dies(self, _): os.kill(os.getpid(), signal.SIGSEGV)
    def forks(self, _): os.fork()
    def runs(self, _): subprocess.run(["true"])
    def pools(self, _): ProcessPoolExecutor(2).submit(int).result()
    def connects(self, _): socket.create_connection(("127.0.0.1", 9), 1)
    def resolves(self, _): socket.getaddrinfo("example.org", 443)
    def fetches(self, _): urllib.request.urlopen("http://127.0.0.1:9/")
    def writes(self, _): open("/tmp/written", "w")
    def reads(self, _): open("/nowhere/weights")
    def places(self, answer):
        places = [tempfile.gettempdir(), Path.home(), os.environ["XDG_CACHE_HOME"], Path("~/x").expanduser().parent]
        same = {os.path.realpath(place) for place in places} == {os.path.realpath(self.context.cache)}
        return answer | {"text": np.array([[f"{same} {os.environ['HF_HUB_OFFLINE']}"]], object)}
    def writes_elsewhere(self, answer):
        libc, outcomes = ctypes.CDLL(None), []
        def write(_):
            try: outcomes.append(self.writes(None))
            except OSError as error: outcomes.append(error.strerror)
        handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write)
        # A C handler runs in the thread that gets the signal, not in Python's main thread.
        libc.signal(signal.SIGUSR1, handler)
        others = [int(thread) for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()]
        for thread in others: libc.tgkill(os.getpid(), thread, signal.SIGUSR1)
        while len(outcomes) < len(others): time.sleep(0.01)
        libc.signal(signal.SIGUSR1, None)
        return answer | {"text": np.array([[repr(sorted(set(outcomes), key=str)).encode()]], object)}
    def prints(self, _):
        for _ in range(200_000): print("x" * 80)
    def nothing(self, _): return 7
    def omits(self, answer): return {"y": answer["y"]}
    def dtype(self, answer): return answer | {"y": answer["y"].astype(np.float64)}
    def rows(self, answer): return answer | {"y": answer["y"][:0]}
    def number(self, answer): return answer | {"text": np.array([[5]], dtype=object)}
    def axes(self, answer): return answer | {"y": answer["y"][0]}
    def huge(self, answer): return answer | {"y": np.zeros((len(answer["y"]), 10 << 28), np.float32)}
    def nan(self, answer): return answer | {"y": answer["y"] * np.nan}
    def strided(self, answer): return answer | {"y": np.arange(8, dtype=np.float32).reshape(2, 4).T[:1]}
"""

# This model fails with generated values and with the values of another worker's `warmup`.
PICKY = """
import json
import numpy as np
from shadowslice import Tensor

class Picky:
    inputs = {"text": Tensor("BYTES", [-1, 1]), "ids": Tensor("INT64", [-1, -1])}
    outputs = {"sum": Tensor("INT64", [-1, -1])}

    def warmup(self):
        number = int(np.random.default_rng().integers(1 << 40))
        return {"ids": np.array([[1000, 1001, number]]), "text": [[b'{"add": %d}' % number]]}

    def infer(self, batch):
        added = np.array([[json.loads(text)["add"]] for text in batch["text"][:, 0]])
        assert batch["ids"].shape[1] == 3 and batch["ids"].min() >= 1000
        return {"sum": batch["ids"] + added}

    def reference(self, batch):
        rows = zip(batch["ids"].tolist(), batch["text"][:, 0])
        return {"sum": np.array([[each + json.loads(text)["add"] for each in ids] for ids, text in rows])}
"""

RANDOM = """
import numpy as np
from shadowslice import Tensor

class Random:
    deterministic = False
    inputs = {"x": Tensor("FP32", [-1, 4])}
    outputs = {"y": Tensor("FP32", [-1, -1])}

    def infer(self, batch):
        return {"y": np.random.rand(len(batch["x"]), np.random.randint(1, 1000)).astype(np.float32)}
"""

# This model has a `warmup` but no batch axis.
WHOLE = """
import numpy as np
from shadowslice import Tensor

class Whole:
    inputs = {"x": Tensor("INT32", [-1])}
    outputs = {"y": Tensor("INT32", [1])}
    def warmup(self): return {"x": np.arange(7, dtype=np.int32)}
    def infer(self, batch):
        if len(batch["x"]) != 7: raise ValueError("it must be seven")
        return {"y": batch["x"].sum(keepdims=True, dtype=np.int32)}
"""

# This model has no `warmup`, so the configuration names a file with valid values.
GIVEN = WHOLE.replace("    def warmup(self): return {\"x\": np.arange(7, dtype=np.int32)}\n", "")

# These tensors behave like the tensors of CuPy and JAX on a GPU, and of other libraries on the host.
FOREIGN = """
from __future__ import annotations
from typing import Annotated, TypedDict
import numpy as np
from shadowslice import Tensor

class OnGpu:
    def __init__(self, array): self.array = array
    def __dlpack__(self, **_): raise BufferError("no host can read it")
    def __dlpack_device__(self): return 2, 0

class Cupy(OnGpu):
    def __array__(self, *_, **__): raise TypeError("implicit conversion")
    def get(self): return self.array

class Jax(OnGpu):
    def __array__(self, *_, **__): return self.array

class OnHost(OnGpu):
    def __dlpack__(self, **options): return self.array.__dlpack__(**options)
    def __dlpack_device__(self): return self.array.__dlpack_device__()

Row = Annotated[np.ndarray, Tensor("FP32", [-1, 4])]
class In(TypedDict):
    x: Row
class Out(TypedDict):
    cupy: Row
    jax: Row
    host: Row
    text: Annotated[np.ndarray, Tensor("BYTES", [-1])]

class Foreign:
    def infer(self, batch: In) -> Out:
        x = batch["x"]
        text = [b"zero\\0"] * len(x)
        return {"cupy": Cupy(x * 2), "jax": Jax(x * 3), "host": OnHost(x * 4), "text": text}
"""


PROCESSES = "the sandbox does not allow this: models cannot start processes or use the network"


def doubled(more, answer="2 * batch['x']"):
    """Returns the source of a model. `more` starts at line 7."""
    text = "import numpy as np\nfrom shadowslice import Tensor\nclass A:\n" \
           "    inputs = outputs = {'x': Tensor('FP32', [-1, 4])}\n" \
           f"    def infer(self, batch): return {{'x': {answer}}}\n\n"
    return text + "".join(f"    {each}\n" for each in more.split("\n"))


# The sources of faulty models, and the reason why each model is unready. {} stands for the model's file.
FAULTY = {
    "empty": ("# nothing\n", "{}: no class has a method `infer(self, batch)`"),
    "syntax": ("class A\n", "{}:1: expected ':'"),
    "binary": ("class A:\0\n", "source code string cannot contain null bytes"),
    "axis": ("from shadowslice import Tensor\nclass A:\n    inputs = outputs = {'x': Tensor('FP32', [1 << 62])}\n"
             "    def infer(self, batch): pass\n", "{}:2: 'x' has shape [4611686018427387904]; each axis must be -1, or from 1 to 2147483647"),
    "name": ("from shadowslice import Tensor\nclass A:\n    inputs = outputs = {'\\ud800': Tensor('FP32', [1])}\n"
             "    def infer(self, batch): pass\n", "{}:2: inputs of class A: invalid entry '\\ud800'; use"),
    "unspeakable": ("raise OSError('\\ud800')\n", "OSError: \\ud800"),
    "made": ("exec('class A:\\n def infer(self, batch): pass', globals())\n", "{}:0: class A does not declare its inputs"),
    "package": ("\nimport no_such_package\n", f"{{}}:2: {sys.executable} has no package 'no_such_package'"),
    "inside": ("from no_such_package.sub import x\n", f"{{}}:1: {sys.executable} has no package 'no_such_package'"),
    "signature": ("class A:\n    inputs = outputs = {}\n    def infer(self): pass\n", "{}:3: `infer` must be a method `infer(self, batch)`"),
    "inputs": ("class A:\n    def infer(self, batch): pass\n", "{}:1: class A does not declare its inputs"),
    "datatype": ("from shadowslice import Tensor\nclass A:\n    inputs = outputs = {'x': Tensor('FP31', [1])}\n"
                 "    def infer(self, batch): pass\n", "{}:2: 'x' has unknown datatype 'FP31'"),
    "several": ("class A:\n    def infer(self, batch): pass\nclass B(A): pass\n", "several classes have `infer`, `generate` or `step` (A, B)"),
    "two_ways": ("class A:\n    def step(self, states): pass\n    def infer(self, batch): pass\n",
                 "class A has both `infer` and `step`"),
    "no_start": ("class A:\n    def step(self, states): pass\n", "{}:1: class A has `step`, but no `start(self, request)`"),
    "exits": ("import sys\nsys.exit(0)\n", "the model called sys.exit"),
    "raises": ("from shadowslice import Tensor\nclass A:\n    inputs = outputs = {'x': Tensor('FP32', [1])}\n"
               "    def load(self, context): raise OSError('no weights')\n"
               "    def infer(self, batch): return batch\n", "OSError: no weights"),
    "made_up": (doubled("", "1 // 0"), "add a method `warmup`"),
    "sandboxed": (doubled("", "__import__('subprocess').run(['true'])"), PROCESSES + " (docs/security.md)"),
    "undefined": (doubled("", "no_such_name"), "NameError: name 'no_such_name' is not defined"),
    "output_dtype": (doubled("", "batch['x'].astype(float)"), "output 'x' has dtype float64, but float32 is declared"),
    "output_shape": (doubled("", "batch['x'][:, batch['x'][0] > 7]"), "add a method `warmup`"),
    "imports": ("import os\nos.fork()\n", PROCESSES),
    "silent": ("from shadowslice import Tensor\nclass A:\n    inputs = outputs = {'x': Tensor('INT32', [1])}\n"
               "    def generate(self, request):\n        for _ in range(request['x'][0] - 1): yield request\n",
               "the stream ended without an answer, so it proves nothing; if the model cannot run on made-up values, add"),
    "no_warmup": (doubled("def warmup(self, batch): pass"), "{}:7: `warmup` must be a method `warmup(self)`"),
    "warmup_type": (doubled("def warmup(self): pass"), "{}:7: `warmup` of class A returned NoneType; return a dict"),
    "warmup_name": (doubled("def warmup(self): return {'y': 1}"), "{}:7: `warmup` of class A returned unknown input 'y'; the"),
    "warmup_lacks": (doubled("def warmup(self): return {}"), "{}:7: `warmup` of class A returned no array for input 'x'"),
    "warmup_dtype": (doubled("def warmup(self): return {'x': np.zeros((1, 4))}"),
                     "{}:7: `warmup` of class A: input 'x' has dtype float64, but float32 is declared"),
    "warmup_rows": (doubled("def warmup(self): return {'x': np.zeros((2, 4), 'float32')}"),
                    "{}:7: `warmup` of class A: input 'x' has shape [2, 4], but expected [1, 4]"),
    "warmup_raises": (doubled("def warmup(self):\n    open('none')"),
                      "{}:7: `warmup` of class A failed at line 8: FileNotFoundError"),
    "reference": (doubled("def reference(self, batch): return {'x': 3 * batch['x']}"), "differ from the reference answers"),
    "no_reference": (doubled("def reference(self): pass"), "{}:7: `reference` must be a method `reference(self, batch)`"),
    "lost": (doubled("class Lost:\n    def __dlpack__(self): pass\n    def __dlpack_device__(self): return 2, 0", "self.Lost()"),
             "TypeError: Lost is on DLPack device 2; copy it to the host"),
    "bf16": ("import sys\nfrom shadowslice import Tensor\nsys.modules['ml_dtypes'] = None\nclass A:\n"
             "    inputs = outputs = {'x': Tensor('BF16', [1])}\n    def infer(self, batch): return batch\n",
             "-m pip install ml_dtypes`"),
    "no_field": ("from typing import TypedDict\nclass In(TypedDict):\n    x: int\nclass A:\n"
                 "    def infer(self, batch: In) -> In: return batch\n", "{}:5: field 'x' of In has no Tensor"),
    "no_annotation": ("class A:\n    def infer(self, batch: 'Missing'): return batch\n",
                      "{}:2: cannot read the annotations of `infer`: NameError: name 'Missing' is not defined"),
    "graph": (doubled("cuda_graph = 1"), "{}:3: `cuda_graph` of class A is 1; use True or False"),
    "graph_of_arrays": (doubled("cuda_graph = True"), "{}:3: class A has `cuda_graph`, but does not use PyTorch"),
    "graph_of_texts": ("import numpy as np\nfrom shadowslice import Tensor\nclass A:\n    cuda_graph = True\n"
                       "    inputs = outputs = {'x': Tensor('BYTES', [1])}\n    def infer(self, batch): return batch\n",
                       "{}:3: CUDA graphs do not support BYTES ('x'); remove `cuda_graph`"),
    "graph_of_streams": ("import numpy as np\nfrom shadowslice import Tensor\nclass A:\n    cuda_graph = True\n"
                         "    inputs = outputs = {'x': Tensor('FP32', [1])}\n    def generate(self, request): yield request\n",
                         "{}:3: CUDA graphs do not support `generate`; use `step`, or remove `cuda_graph` from class A"),
    "deterministic": (doubled("deterministic = 'no'"), "{}:3: `deterministic` of class A is 'no'; use True or False"),
}

# The faults for which the message suggests a `warmup` with other input values.
HELPED_BY_WARMUP = {"made_up", "silent", "output_shape"}

# A batch of two rows takes longer than twice the SLO.
SLOW = """
import time
from shadowslice import Tensor

class Slow:
    inputs = {"x": Tensor("FP32", [-1, 4])}
    outputs = {"y": Tensor("FP32", [-1, 4])}

    def infer(self, batch):
        time.sleep(1.1 * len(batch["x"]))
        return {"y": batch["x"]}
"""

# The output of a row depends on the first row of its batch.
BESIDE = """
import numpy as np
from shadowslice import Tensor

class Beside:
    inputs = {{"x": Tensor("{}", [-1])}}
    outputs = {{"y": Tensor("BOOL", [-1])}}

    def infer(self, batch):
        return {{"y": batch["x"] == batch["x"][0]}}
"""

# The output of a row depends on the longest text of its batch.
LONGEST = """
import numpy as np
from shadowslice import Tensor

class Longest:
    inputs = {"x": Tensor("BYTES", [-1])}
    outputs = {"y": Tensor("INT64", [-1])}

    def infer(self, batch):
        lengths = np.array([len(text) for text in batch["x"]], np.int64)
        return {"y": lengths - lengths.max()}
"""

DEPENDENT = {"beside_int64": BESIDE.format("INT64"), "beside_text": BESIDE.format("BYTES"), "longest": LONGEST}

SMALL = {**DEPENDENT, "foreign": FOREIGN, "picky": PICKY, "random_numbers": RANDOM, "whole": WHOLE, "given": GIVEN, "slow": SLOW,
         "unmarked": doubled("", "np.random.rand(*batch['x'].shape).astype('float32')")}

# The faults that `check` finds in the class without creating an object.
SEEN = ["no_warmup", "no_reference", "deterministic", "graph", "graph_of_texts", "graph_of_streams", "bf16", "no_field",
        "no_annotation"]

SERVER = CHECKS = None


class Models(Server):
    def __init__(self, binary):
        super().__init__(binary, self.write)

    def write(self, folder):
        (folder / "every").mkdir()
        (folder / "every" / "model.py").write_text(EVERY_TYPE)
        (folder / "moods.v1.py").write_text(MOODS)
        for name, text in SMALL.items():
            (folder / f"{name}.py").write_text(text)
        np.save(folder / "seven.npy", np.arange(7, dtype=np.int32))
        for name, (text, _) in FAULTY.items():
            (folder / f"{name}.py").write_text(text)
        return {}

    def configuration(self, _):
        python = "python: {executable: " + sys.executable + "}, slo: 1s"
        lines = [
            "listen:",
            f'  http: ["127.0.0.1:{self.http_port}"]',
            f'  grpc: ["unix:grpc.sock", "127.0.0.1:{self.grpc_port}"]',
            "  metrics: []",
            "gpus: [{device: emulated, sms: 132}]",
            "controller: {policy: static}",
            "workers: {environment: [PYTHONPATH]}",
            "models:",
            f"  - {{name: every, engine: python, path: every, {python}, batch: {{max: 8}}, share: {{initial: 20%}}}}",
            f"  - {{name: moods, path: moods.v1.py, {python}, batch: {{max: 8, max_delay: 20ms}}, share: {{initial: 20%}}, handover: shadow}}",
        ]
        more = {"given": ", warmup: {x: {file: seven.npy}}"}
        lines += [f"  - {{path: {name}.py, {python}, share: {{initial: 2%}}{more.get(name, '')}}}"
                  for name in [*SMALL, *FAULTY]]
        return "\n".join(lines) + "\n"

    def model(self, name):
        models = json.loads(self.command("status", "--json"))["models"]
        return next(model for model in models if model["name"] == name)


def setUpModule():
    global SERVER, CHECKS
    SERVER = Models(sys.argv[0])
    package = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "python")
    CHECKS = os.environ | {"PYTHONPATH": package + os.pathsep + os.environ.get("PYTHONPATH", "")}


def tearDownModule():
    SERVER.stop()


def mood_tensor(module, *moods):
    tensor = module.InferInput("mood", [len(moods), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[mood.encode()] for mood in moods], dtype=np.object_))
    return tensor


class PythonModels(unittest.TestCase):
    def setUp(self):
        self.client = grpcclient.InferenceServerClient(f"localhost:{SERVER.grpc_port}")
        self.addCleanup(self.client.close)

    def ask(self, *moods):
        return self.client.infer("moods", [mood_tensor(grpcclient, *moods)], client_timeout=30)

    def test_every_datatype_comes_back_over_both_protocols(self):
        draw = np.random.default_rng(1)
        arrays = {name: draw.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in TYPES.items()}
        arrays["BYTES"] = np.array([[b"", "\u00e9\x00".encode(), b"x" * 1000]] * 3, dtype=np.object_)
        http = httpclient.InferenceServerClient(f"localhost:{SERVER.http_port}")
        for module, client in ((grpcclient, self.client), (httpclient, http)):
            tensors = []
            for name, array in arrays.items():
                tensors.append(module.InferInput(name, list(array.shape), name))
                tensors[-1].set_data_from_numpy(array)
            answer = client.infer("every", tensors)
            for name, array in arrays.items():
                np.testing.assert_array_equal(answer.as_numpy("out_" + name), array, name)
        http.close()
        self.assertEqual(self.client.get_model_metadata("every").platform, "python")

    def test_requests_of_a_batch_come_together_and_apart_again(self):
        async def ask():
            async with aiogrpc.InferenceServerClient(f"localhost:{SERVER.grpc_port}") as client:
                asked = [client.infer("moods", [mood_tensor(grpcclient, *[f"m{n}"] * (n % 3 + 1))]) for n in range(40)]
                return await asyncio.gather(*asked)

        rows = []
        for number, answer in enumerate(asyncio.run(ask())):
            expected = [[f"m{number}".encode()]] * (number % 3 + 1)
            self.assertEqual(answer.as_numpy("text").tolist(), expected)
            rows.append(int(answer.as_numpy("y")[0, 0]))
        self.assertGreater(max(rows), 3, "requests shared batches")

    def test_what_a_model_does_wrong_fails_that_request_alone(self):
        before = SERVER.worker("moods")
        wrong = {
            "raises": ("RuntimeError: a broken model", "INTERNAL"),
            "refuses": ("it is unlucky", "INVALID_ARGUMENT"),
            "exits": ("the model called sys.exit", "INTERNAL"),
            "forks": (PROCESSES, "INTERNAL"),
            "runs": (PROCESSES, "INTERNAL"),
            "pools": (PROCESSES, "INTERNAL"),
            "connects": (PROCESSES, "INTERNAL"),
            "resolves": (PROCESSES, "INTERNAL"),
            "fetches": (PROCESSES, "INTERNAL"),
            "writes": ("Permission denied: '/tmp/written': the sandbox does not allow this: models can write files only in", "INTERNAL"),
            "reads": ("No such file or directory: '/nowhere/weights'", "INTERNAL"),
            "nothing": ("infer returned int, not a dict", "INTERNAL"),
            "omits": ("infer returned no output 'text'", "INTERNAL"),
            "dtype": ("output 'y' has dtype float64, but float32 is declared", "INTERNAL"),
            "number": ("a bytes-like object is required, not 'int'", "INTERNAL"),
            "rows": ("output 'y' has shape [0, 2], but expected [1, -1]", "INTERNAL"),
            "axes": ("output 'y' has shape [2], but expected [1, -1]", "INTERNAL"),
            "huge": ("raise limits.response_bytes", "INTERNAL"),
        }
        for mood, (why, code) in wrong.items():
            with self.subTest(mood), self.assertRaises(InferenceServerException) as caught:
                self.ask(mood)
            self.assertIn(why, str(caught.exception))
            self.assertIn(code, str(caught.exception.status()))
            self.assertEqual(self.ask("fine").as_numpy("text")[0, 0], b"fine")
            if mood == "raises":
                record = r'Traceback \(most recent call last\):\\n .*, in raises\\n.*\\nRuntimeError: a broken model"'
                wait_until(lambda: re.search(record, SERVER.log_tail()))
        self.assertEqual(SERVER.worker("moods"), before)
        self.assertTrue(np.isnan(self.ask("nan").as_numpy("y")).all())
        np.testing.assert_array_equal(self.ask("strided").as_numpy("y"), [[0, 4]])

    def test_the_text_of_an_exception_is_bounded_and_has_no_control_characters(self):
        with self.assertRaises(InferenceServerException) as caught:
            self.ask("coloured")
        text = caught.exception.message()
        self.assertRegex(text, r"\[31mred\n\tnext ä+$")
        self.assertNotRegex(text, r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
        self.assertLessEqual(len(text.encode()), 2048)

    def test_caches_and_home_are_the_folder_that_can_be_written(self):
        self.assertEqual(self.ask("places").as_numpy("text")[0, 0], b"True 1")

    def test_the_sandbox_holds_for_every_thread(self):
        self.assertEqual(self.ask("writes_elsewhere").as_numpy("text")[0, 0], b"['Permission denied']")

    def test_neighbours_in_the_batch_of_a_bad_request_are_answered(self):
        good, bad = [], []

        def ask(mood):
            try:
                good.append(self.ask(mood).as_numpy("text")[0, 0])
            except InferenceServerException as error:
                bad.append(str(error))

        threads = [threading.Thread(target=ask, args=["raises" if n == 7 else f"n{n}"]) for n in range(20)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual((len(good), len(bad)), (19, 1), bad)

    def test_a_model_that_dies_is_followed_by_another_worker(self):
        before = SERVER.worker("moods")
        with self.assertRaises(InferenceServerException) as caught:
            self.ask("dies")
        self.assertIn("workers died", str(caught.exception))
        wait_until(lambda: SERVER.worker("moods") not in (None, before))
        self.assertEqual(self.ask("fine").as_numpy("text")[0, 0], b"fine")

    def test_floods_of_lines_end_in_the_log_and_hold_nobody_up(self):
        self.ask("prints")
        self.assertEqual(self.ask("fine").as_numpy("text")[0, 0], b"fine")

    def infer(self, model, **arrays):
        datatypes = {np.dtype(dtype): name for name, dtype in TYPES.items()} | {np.dtype(np.int32): "INT32"}
        tensors = []
        for name, array in arrays.items():
            datatype = datatypes.get(array.dtype, "BYTES")
            tensors.append(grpcclient.InferInput(name, list(array.shape), datatype))
            tensors[-1].set_data_from_numpy(array)
        return self.client.infer(model, tensors, client_timeout=30)

    def test_values_of_warmup_stand_in_for_those_that_are_made_up(self):
        text = np.array([[b'{"add": 5}'], [b'{"add": 6}']], dtype=np.object_)
        ids = np.array([[1000, 2000, 3000], [4000, 5000, 6000]])
        np.testing.assert_array_equal(self.infer("picky", text=text, ids=ids).as_numpy("sum"), ids + [[5], [6]])
        for model in ("whole", "given"):
            answer = self.infer(model, x=np.full(7, 3, np.int32))
            np.testing.assert_array_equal(answer.as_numpy("y"), [21])

    def test_tensors_of_other_libraries_are_outputs_that_annotations_say(self):
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        answer = self.infer("foreign", x=x)
        for name, factor in {"cupy": 2, "jax": 3, "host": 4}.items():
            np.testing.assert_array_equal(answer.as_numpy(name), factor * x, name)
        self.assertEqual(answer.as_numpy("text").tolist(), [b"zero\0"] * 2)

    def test_what_needs_no_object_is_found_by_a_check(self):
        for name in SEEN:
            with self.subTest(name):
                path, (_, why) = SERVER.folder / f"{name}.py", FAULTY[name]
                checked = subprocess.run([sys.executable, "-m", "shadowslice.check", path], env=CHECKS, text=True,
                                         stdout=subprocess.PIPE, timeout=30)
                self.assertIn(why.format(path), checked.stdout)
                self.assertEqual(checked.returncode, 1)

    def test_a_check_imports_models_that_write_temporary_files_unless_no_import_is_set(self):
        known = {"writes": "import tempfile\ntempfile.TemporaryFile().write(b'x')\n" + SMALL["picky"], "fails": "1 / 0\n"}
        config = SERVER.folder / "checked.yaml"
        for name, options, code in (("writes", [], 0), ("fails", [], 78), ("fails", ["--no-import"], 0)):
            with self.subTest(name, options=options):
                (SERVER.folder / f"{name}.py").write_text(known[name])
                config.write_text(f"run_dir: {SERVER.folder}/checked\ngpus: [{{device: emulated}}]\nmodels:\n"
                                  f"  - {{path: {name}.py, slo: 1s, python: {{executable: {sys.executable}}}}}\n")
                done = subprocess.run([SERVER.binary, "check", *options, config], text=True, capture_output=True, timeout=60)
                self.assertEqual(done.returncode, code, done)
                self.assertEqual("fails.py:1: ZeroDivisionError" in done.stderr, code == 78, done)

    def test_a_model_may_answer_differently_each_time(self):
        first, second = (self.infer("random_numbers", x=np.zeros((2, 4), np.float32)).as_numpy("y") for _ in range(2))
        self.assertEqual((len(first), len(second)), (2, 2))
        self.assertNotEqual(first.tolist(), second.tolist())

    def test_random_numbers_are_found_without_a_word_of_the_class(self):
        wait_until(lambda: SERVER.model("unmarked")["state"] == "ready")
        first, second = (self.infer("unmarked", x=np.zeros((1, 4), np.float32)).as_numpy("x") for _ in range(2))
        self.assertNotEqual(first.tolist(), second.tolist())

    def test_rows_of_one_integer_or_text_show_that_they_depend_on_each_other(self):
        for name in DEPENDENT:
            with self.subTest(name):
                self.assertIn("depends on the other rows", SERVER.model(name)["batch_limit"])
                self.assertEqual(self.client.get_model_config(name).config.max_batch_size, 0)

    def test_sizes_that_the_objective_cannot_use_are_not_tried(self):
        wait_until(lambda: SERVER.model("slow")["state"] == "ready")
        self.assertRegex(SERVER.model("slow")["batch_limit"], "a batch of 2 rows takes [0-9.]+ s, and the SLO is 1 s")
        self.assertEqual(self.client.get_model_config("slow").config.max_batch_size, 1)

    def test_models_that_cannot_be_loaded_say_where_and_what_to_do(self):
        for name, (_, why) in FAULTY.items():
            with self.subTest(name):
                wait_until(lambda: SERVER.model(name)["state"] == "unready")
                said = SERVER.model(name)["why"]
                self.assertIn(why.format(SERVER.folder / f"{name}.py"), said)
                self.assertEqual("add a method `warmup`" in said, name in HELPED_BY_WARMUP, said)

    def test_shadows_and_deaths_under_load_lose_nothing(self):
        stop, outcomes = threading.Event(), []

        def load():
            with grpcclient.InferenceServerClient(f"localhost:{SERVER.grpc_port}") as client:
                while not stop.is_set():
                    answer = client.infer("moods", [mood_tensor(grpcclient, "fine")])
                    outcomes.append(answer.as_numpy("text")[0, 0])

        thread = threading.Thread(target=load)
        thread.start()
        self.addCleanup(stop.set)
        for share in (30, 10, 50, 20):
            self.assertIn("completed", SERVER.command("resize", "moods", str(share)))
        for _ in range(3):
            before = SERVER.worker("moods")
            os.kill(before, signal.SIGKILL)
            wait_until(lambda: SERVER.worker("moods") not in (None, before))
        stop.set()
        thread.join()
        self.assertEqual(set(outcomes), {b"fine"})


HANGS = """
import time
from shadowslice import Tensor

class Hangs:
    inputs = outputs = {"mood": Tensor("BYTES", [1])}

    def infer(self, batch):
        if batch["mood"][0] == b"print":
            for _ in range(3000):
                print("x" * 1000)
        if batch["mood"][0] == b"say":
            print("x")
        if batch["mood"][0] == b"raise":
            raise OSError("y" * 10_000_000)
        if batch["mood"][0] == b"hang":
            print("hangs now")
            time.sleep(10**6)
        return batch
"""


class Hanging(Server):
    def __init__(self, binary):
        super().__init__(binary, self.write)

    def write(self, folder):
        (folder / "hangs.py").write_text(HANGS)
        return {}

    def configuration(self, _):
        head = super().configuration({})
        return f"{head}  - {{path: hangs.py, slo: 60s, python: {{executable: {sys.executable}}}}}\n" \
               "workers: {environment: [PYTHONPATH]}\n"


class Bounds(unittest.TestCase):
    def setUp(self):
        self.server = Hanging(sys.argv[0])
        self.client = grpcclient.InferenceServerClient(f"localhost:{self.server.grpc_port}")
        self.addCleanup(self.client.close)

    def ask(self, mood):
        tensor = grpcclient.InferInput("mood", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([mood], np.object_))
        return tensor

    def test_a_worker_that_hangs_ends_after_a_supervisor_that_is_killed(self):
        wait_until(lambda: self.server.worker("hangs"))
        worker = self.server.worker("hangs")
        self.client.async_infer("hangs", [self.ask(b"hang")], callback=lambda result, error: None)
        threads = Path(f"/proc/{worker}/task")
        wait_until(lambda: "hangs now" in self.server.log_tail())
        self.server.process.kill()
        self.server.process.wait()
        wait_until(lambda: not threads.exists())

    def test_what_a_worker_prints_does_not_fill_the_log(self):
        wait_until(lambda: self.server.worker("hangs"))
        self.client.infer("hangs", [self.ask(b"print")])
        with self.assertRaisesRegex(InferenceServerException, "OSError: y{100,2000} ...$"):
            self.client.infer("hangs", [self.ask(b"raise")])
        log = self.server.folder / "log"

        def told():
            self.client.infer("hangs", [self.ask(b"say")])
            return "the log leaves out" in log.read_text()

        wait_until(told)
        self.assertLess(log.stat().st_size, 2 << 20)
        self.server.stop()


class Bytes(unittest.TestCase):
    def test_clients_see_no_byte_that_its_datatype_does_not_have(self):
        sys.path.append(str(Path(__file__).parents[2] / "python"))
        from shadowslice import _tensors
        truths = np.array([[2, 0], [0, 255]], np.uint8).view(np.bool_)
        self.assertEqual(_tensors.encode("BOOL", truths.T).tobytes(), bytes([1, 0, 0, 1]))
        elements = np.empty(1, np.object_)
        elements[0] = memoryview(np.array([7], np.int32))
        self.assertEqual(_tensors.encode("BYTES", elements).tobytes(), bytes([4, 0, 0, 0, 7, 0, 0, 0]))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
