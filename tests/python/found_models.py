#!/usr/bin/env python3
"""Tests typical models of users, for example with random outputs or a first axis that is not the batch axis.

Usage: found_models.py SHADOWSLICE_BINARY [unittest arguments]
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import unittest

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

from models import write
from server import Server, wait_until

BINARY = None
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
CLIENTS = 8
FIRST = {f"first_{name}": getattr(TensorProto, name.upper()) for name in ("int32", "int64", "bool")}


def constant(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def elementwise(folder, name, nodes, constants=(), columns=4, out=None):
    """Writes a model whose input `x` has `columns` columns and whose output `y` has `out` columns."""
    write(folder, name, nodes, [("x", FLOAT, ["rows", columns])], [("y", FLOAT, ["rows", out or columns])],
          constants)


def external(folder, name, value=None):
    """Writes a model that adds the weights in the file `name.data`. That file may be written later."""
    tensor = helper.make_tensor("w", FLOAT, [4], np.zeros(4, np.float32))
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in (("location", f"{name}.data"), ("offset", "0"), ("length", "16")):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, text
    elementwise(folder, name, [helper.make_node("Add", ["x", "w"], ["y"])], [tensor])
    if value is not None:
        weights(folder, name, value)


def weights(folder, name, value):
    """Writes the weights in the same way as rsync, which writes another file and then renames that file."""
    np.full(4, value, np.float32).tofile(folder / "new")
    (folder / "new").rename(folder / f"{name}.data")


def make_changing(folder):
    external(folder, "late")
    external(folder, "replaced", 1)
    return dict.fromkeys(("late", "replaced"), "batch: {max: 4}")


def make_loaded(folder):
    for name in ("kept", "overwritten"):
        external(folder, name, 1)
    # The weights of this model are in its own file.
    plus(folder, "exchanged", 1)
    return dict.fromkeys(("kept", "overwritten", "exchanged"), "batch: {max: 4}")


def plus(folder, name, value):
    elementwise(folder, name, [helper.make_node("Add", ["x", "w"], ["y"])],
                [constant("w", np.full(4, value, np.float32))])


def make_sampled(folder):
    fifty(folder, "sampled")
    np.save(folder / "sampled.npy", np.int64([50]))
    return {"sampled": "warmup: sampled.npy"}


def make(folder):
    """Writes the models. Returns each model's keys in the configuration."""
    node = helper.make_node
    for name in ("running", "insisted"):
        elementwise(folder, name, [node("CumSum", ["x", "axis"], ["y"])], [constant("axis", np.int64(0))])
    elementwise(folder, "softmax", [node("Softmax", ["x"], ["y"], axis=0)])
    elementwise(folder, "centred", [node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
                                    node("Sub", ["x", "m"], ["y"])])
    for name in ("random", "given_random"):
        elementwise(folder, name, [node("RandomNormalLike", ["x"], ["n"]), node("Add", ["x", "n"], ["y"])])
    # The model computes the shape, so the limit of one row shows only when the model runs.
    elementwise(folder, "single", [node("Shape", ["x"], ["s"]), node("Mul", ["s", "none"], ["z"]),
                                   node("Add", ["z", "shape"], ["t"]), node("Reshape", ["x", "t"], ["y"])],
                [constant("none", np.array([0, 0])), constant("shape", np.array([1, 4]))])
    for name in ("quantized", "given_quantized"):
        elementwise(folder, name, [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("MatMulInteger", ["q", "w", "zero", "w_zero"], ["i"]),
            node("Cast", ["i"], ["f"], to=FLOAT), node("Mul", ["f", "scale"], ["y"])],
            [constant("w", np.random.default_rng(1).integers(-9, 9, (64, 4), dtype=np.int8)),
             constant("w_zero", np.int8(0))], columns=64, out=4)
    write(folder, "detector", [node("ReduceMean", ["x"], ["m"], axes=[1], keepdims=1),
                               node("Expand", ["m", "shape"], ["y"])],
          [("x", FLOAT, ["batch", 4])], [("y", FLOAT, ["batch", 700_000])],
          [constant("shape", np.array([1, 700_000]))])
    write(folder, "signal", [node("Mul", ["x", "half"], ["y"])], [("x", FLOAT, ["samples"])],
          [("y", FLOAT, ["samples"])], [constant("half", np.float32(0.5))])
    city = helper.make_node("OneHotEncoder", ["x"], ["y"], domain="ai.onnx.ml", cats_strings=["Berlin", "Wien"], zeros=0)
    for name in ("city", "given_city"):
        write(folder, name, [city], [("x", TensorProto.STRING, ["batch", 1])], [("y", FLOAT, ["batch", 1, 2])])
    for name in ("index", "given_index"):
        fifty(folder, name)

    def branch(length):
        shape = helper.make_node("Constant", [], ["s"], value=constant("s", np.array([1, length])))
        out = helper.make_tensor_value_info("o", FLOAT, [1, length])
        return helper.make_graph([shape, helper.make_node("Reshape", ["x", "s"], ["o"])], "branch", [], [out])

    for name in ("voice", "given_voice"):
        write(folder, name, [node("Equal", ["rate", "fast"], ["is_fast"]),
                             node("If", ["is_fast"], ["y"], then_branch=branch(512), else_branch=branch(256))],
              [("x", FLOAT, [1, "samples"]), ("rate", INT64, [])], [("y", FLOAT, [1, "n"])],
              [constant("fast", np.int64(16000))])
    write(folder, "sides", [node("Conv", ["x", "w"], ["y"], kernel_shape=[7, 7])],
          [("x", FLOAT, ["batch", 3, "height", "width"])], [("y", FLOAT, ["batch", 4, "h", "w2"])],
          [constant("w", np.ones((4, 3, 7, 7), np.float32))])
    # A row changes the outputs of other rows only if it has a large value.
    elementwise(folder, "clipped", [node("Abs", ["x"], ["a"]), node("ReduceMax", ["a"], ["m"], keepdims=0),
                                    node("Max", ["m", "one"], ["d"]), node("Div", ["x", "d"], ["y"])],
                [constant("one", np.float32(1))])
    write(folder, "lengths", [node("ReduceMax", ["n"], ["m"], keepdims=0), node("Cast", ["m"], ["f"], to=FLOAT),
                              node("Max", ["f", "one"], ["d"]), node("Div", ["x", "d"], ["y"])],
          [("x", FLOAT, ["rows", 4]), ("n", INT64, ["rows"])], [("y", FLOAT, ["rows", 4])],
          [constant("one", np.float32(1))])
    # y[t] = x[t] - x[t - 2]
    elementwise(folder, "lagged", [node("Pad", ["x", "pads"], ["p"]), node("Shape", ["x"], ["s"]),
                                   node("Slice", ["s", "zero", "first"], ["n"]),
                                   node("Slice", ["p", "zero", "n", "zero"], ["l"]), node("Sub", ["x", "l"], ["y"])],
                [constant("pads", np.array([2, 0, 0, 0])), constant("zero", np.array([0])),
                 constant("first", np.array([1]))])
    write(folder, "sequence", [node("ReduceSum", ["x", "first"], ["y"], keepdims=0)],
          [("x", FLOAT, ["length", "batch", 4])], [("y", FLOAT, ["batch", 4])], [constant("first", np.array([0]))])
    # y[t] = (x[t] == x[0]). Each row is one value, whose type is not float.
    for name, datatype in FIRST.items():
        write(folder, name, [node("Gather", ["x", "zero"], ["first"]), node("Equal", ["x", "first"], ["y"])],
              [("x", datatype, ["rows"])], [("y", TensorProto.BOOL, ["rows"])], [constant("zero", np.int64(0))])
    named = (*FIRST, "clipped", "lengths", "lagged", "sequence", "running", "softmax", "centred", "random", "single", "quantized", "detector", "signal")
    return dict.fromkeys(named, "batch: {max_delay: 20ms}") | {
        "insisted": "batch: {max: 8}", "given_quantized": "batch: {max: 8}", "given_random": "batch: {max: 8}", "city": "priority: 1", "given_city": "warmup: {x: {values: [Wien, Berlin]}}",
        "voice": "warmup: {x: [1, 512]}", "given_voice": "warmup: {x: [1, 512], rate: 16000}", "sides": "priority: 1",
        "index": "batch: {max: 4}", "given_index": "batch: {max: 4}, warmup: {x: {range: [50, 50]}}"}


def fifty(folder, name):
    """Writes a model whose input must be 50. The file does not contain this number as a constant."""
    node = helper.make_node
    write(folder, name, [node("Add", ["half", "half"], ["fifty"]), node("Sub", ["x", "fifty"], ["at"]),
                         node("Gather", ["table", "at"], ["y"], axis=0)],
          [("x", INT64, ["batch"])], [("y", FLOAT, ["batch"])],
          [constant("half", np.int64(25)), constant("table", np.float32([7]))])


def request(name, datatype, shape, data):
    return json.dumps({"id": "1", "inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}]})


UNFIT = {
    "of_int32": (np.int32([50]), "the input is INT64, but the array is INT32; convert the array"),
    "of_two_axes": (np.int64([[50]]), "the input's shape is [-1] (-1: any size, the first axis is the batch), "
                                      "but the array's shape is [1, 1]; reshape the array"),
    "of_fortran": (np.asfortranarray(np.ones((2, 2), np.int64)), "in Fortran order"),
    "of_big_endian": (np.array([50], ">i8"), "big-endian (`>i8`)"),
    "of_objects": (np.array([50, None]), "Python objects"),
    "of_another": (np.int64([3]), "the values come from `warmup`; set values there"),
}


def make_with_files(folder):
    """Writes models that accept only a few values, and warm-up files with such values."""
    files = folder / "samples"
    files.mkdir()
    values = np.full(3, 50, np.int64)
    np.save(files / "npy.npy", values)
    np.savez_compressed(files / "npz.npz", x=values, other=np.zeros(2))
    np.savez(files / "all_npz.npz", x=values)
    (files / "list.json").write_text("[50, 50]")
    (files / "request.json").write_text(request("x", "INT64", [1], [50]))
    models = {"npy": "warmup: {x: {file: samples/npy.npy}}", "npz": f"warmup: {{x: {{file: '{files}/npz.npz'}}}}",
              "all_npz": "warmup: samples/all_npz.npz", "list": "warmup: samples/list.json",
              "request": "warmup: samples/request.json", "later": "warmup: samples/later.npy",
              "other_names": "warmup: samples/npz.npz"}
    for name, (array, _) in UNFIT.items():
        np.save(files / f"{name}.npy", array, allow_pickle=True)
        models[name] = f"warmup: {{x: {{file: samples/{name}.npy}}}}"
    for name in models:
        fifty(folder, name)
    np.save(files / "texts.npy", np.array([["Wien"], ["Berlin"]]))
    (files / "texts.json").write_text(request("x", "BYTES", [2, 1], ["Wien", "Berlin"]))
    city = helper.make_node("LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", keys_strings=["Wien", "Berlin"],
                            values_floats=[1.0, 2.0])
    for name, file in (("texts", "texts.npy"), ("texts_of_json", "texts.json")):
        write(folder, name, [city], [("x", TensorProto.STRING, ["batch", 1])], [("y", FLOAT, ["batch", 1])])
        models[name] = f"warmup: samples/{file}"
    # The arrays determine the lengths of the free axes, which must be equal for both inputs.
    write(folder, "two", [helper.make_node("Add", ["a", "b"], ["s"]),
                          helper.make_node("Conv", ["s", "w"], ["y"], kernel_shape=[300])],
          [(name, FLOAT, ["batch", 1, "length"]) for name in "ab"], [("y", FLOAT, ["batch", 1, "n"])],
          [constant("w", np.ones((1, 1, 300), np.float32))])
    np.savez(files / "two.npz", a=np.ones((2, 1, 333), np.float32), b=np.zeros((2, 1, 333), np.float32))
    models["two"] = "warmup: samples/two.npz"
    # The inputs of these models are whole images. The file with one image is almost as large as the limit.
    for name in ("image", "images"):
        write(folder, name, [helper.make_node("Add", ["a", "b"], ["s"]),
                             helper.make_node("ReduceMean", ["s"], ["y"], axes=[2, 3], keepdims=0)],
              [(each, FLOAT, ["batch", 3, 640, 640]) for each in "ab"], [("y", FLOAT, ["batch", 3])])
    image = np.ones((1, 3, 640, 640), np.float32)
    np.savez_compressed(files / "image.npz", a=image, b=2 * image)
    np.save(files / "images.npy", image.repeat(2, 0))
    each = "{file: samples/images.npy}"
    return models | {"image": "batch: {max: 1}, warmup: samples/image.npz",
                     "images": f"batch: {{max: 1}}, warmup: {{a: {each}, b: {each}}}"}


def make_optional(folder):
    """Writes models whose inputs have defaults. The weights of `many` are inputs with defaults."""
    node, default = helper.make_node, lambda name, value: constant(name, np.asarray(value, np.float32))
    write(folder, "shifted", [node("Mul", ["x", "scale"], ["s"]), node("Add", ["s", "b"], ["y"])],
          [("x", FLOAT, ["batch", 2]), ("scale", FLOAT, []), ("b", FLOAT, ["any"])], [("y", FLOAT, ["batch", 2])],
          [default("b", [0, 0]), default("scale", 1)])
    weights = [f"w{at}" for at in range(17)]
    steps = [node("Add", [f"s{at}" if at else "x", name], ["y" if at == 16 else f"s{at + 1}"])
             for at, name in enumerate(weights)]
    write(folder, "many", steps, [("x", FLOAT, ["batch", 2])] + [(name, FLOAT, [2]) for name in weights],
          [("y", FLOAT, ["batch", 2])], [default(name, [1, 1]) for name in weights])
    return {"shifted": "batch: {max: 32, max_delay: 20ms}", "many": "batch: {max: 4}"}


class Served(unittest.TestCase):
    """A server whose models may be unready."""

    make = None

    @classmethod
    def setUpClass(cls):
        if cls.make is None:
            raise unittest.SkipTest("the class has no models")
        cls.server = Server(BINARY, cls.make, wait=False)
        wait_until(lambda: all(each["state"] not in ("loading", "restarting") for each in cls.status().values()))
        cls.http = httpclient.InferenceServerClient(f"127.0.0.1:{cls.server.http_port}")
        cls.grpc = grpcclient.InferenceServerClient(f"127.0.0.1:{cls.server.grpc_port}")

    @classmethod
    def tearDownClass(cls):
        cls.grpc.close()
        cls.server.stop()

    @classmethod
    def status(cls):
        if not (cls.server.run_dir / "control.sock").exists():
            return {"": {"state": "loading"}}
        models = json.loads(cls.server.command("status", "--json"))["models"]
        return {each["name"]: each for each in models}

    def infer(self, name, x):
        x = np.asarray(x, np.float32)
        given = grpcclient.InferInput("x", x.shape, "FP32")
        given.set_data_from_numpy(x)
        return self.grpc.infer(name, [given]).as_numpy("y")


class ChangingFiles(Served):
    make = staticmethod(make_changing)

    def test_late_weights_make_the_model_ready(self):
        self.assertEqual(self.status()["late"]["state"], "unready")
        weights(self.server.folder, "late", 3)
        wait_until(lambda: self.status()["late"]["state"] == "ready")
        self.assertEqual(self.infer("late", [[1] * 4]).tolist(), [[4] * 4])

    def test_replaced_weights_are_reported_and_served_after_a_reload(self):
        self.assertEqual(self.infer("replaced", [[0] * 4]).tolist(), [[1] * 4])
        weights(self.server.folder, "replaced", 100)
        wait_until(lambda: self.status()["replaced"]["files_changed"])
        self.assertEqual(self.infer("replaced", [[0] * 4]).tolist(), [[1] * 4])
        self.assertIn("the files of replaced", self.server.command("status"))
        self.assertIn("replaced", self.server.command("reload"))
        self.assertEqual(self.infer("replaced", [[0] * 4]).tolist(), [[100] * 4])
        wait_until(lambda: not self.status()["replaced"]["files_changed"])


class LoadedFiles(Served):
    make = staticmethod(make_loaded)

    def answers_after_a_death(self, name):
        """Kills the model's worker, and returns the response of the next worker."""
        dead = self.server.worker(name)
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: self.server.worker(name) not in (dead, None))
        return self.infer(name, [[0] * 4]).tolist()

    def test_a_restarted_worker_serves_the_weights_that_were_loaded(self):
        weights(self.server.folder, "kept", 100)
        self.assertEqual(self.answers_after_a_death("kept"), [[1] * 4])
        (self.server.folder / "kept.data").unlink()
        self.assertEqual(self.answers_after_a_death("kept"), [[1] * 4])
        weights(self.server.folder, "kept", 1)

    def test_an_exchanged_model_is_served_as_it_was_loaded_until_the_next_reload(self):
        file, new = self.server.folder / "exchanged.onnx", self.server.folder / "new.onnx"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        wait_until(lambda: self.status()["exchanged"]["loaded"]["sha256"] == digest)
        plus(self.server.folder, "new", 100)
        new.rename(file)
        self.server.command("resize", "exchanged", "40%")
        self.assertEqual(self.answers_after_a_death("exchanged"), [[1] * 4])
        before = self.status()["exchanged"]["loaded"]
        self.assertEqual((before["sha256"], before["path"]), (digest, str(file)))
        for config in (self.http.get_model_config("exchanged"),
                       self.grpc.get_model_config("exchanged", as_json=True)["config"]):
            self.assertEqual(config["parameters"]["sha256"]["string_value"], digest)
        self.server.command("reload")
        self.assertEqual(self.infer("exchanged", [[0] * 4]).tolist(), [[100] * 4])
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        wait_until(lambda: self.status()["exchanged"]["loaded"]["sha256"] == digest)
        self.assertGreater(self.status()["exchanged"]["loaded"]["at_s"], before["at_s"])

    def test_weights_that_were_overwritten_are_not_served_before_a_reload(self):
        np.full(4, 100, np.float32).tofile(self.server.folder / "overwritten.data")
        os.kill(self.server.worker("overwritten"), signal.SIGKILL)
        wait_until(lambda: self.status()["overwritten"]["state"] == "unready")
        self.assertIn("overwritten.data was overwritten since", self.status()["overwritten"]["why"])
        self.server.command("reload")
        self.assertEqual(self.infer("overwritten", [[0] * 4]).tolist(), [[100] * 4])


class ChangingValues(Served):
    make = staticmethod(make_sampled)

    def test_a_reload_reads_them_again(self):
        self.assertEqual(self.status()["sampled"]["state"], "ready")
        np.save(self.server.folder / "sampled.npy", np.int64([50, 50]))
        self.assertIn("warmup", self.server.command("reload"))
        self.assertEqual(self.status()["sampled"]["state"], "ready")


class WarmUpFiles(Served):
    make = staticmethod(make_with_files)

    def test_values_come_from_files_of_each_kind(self):
        for name in ("npy", "npz", "all_npz", "list", "request", "texts", "texts_of_json", "two", "image"):
            with self.subTest(name):
                model = self.status()[name]
                self.assertEqual((model["state"], model["batch_limit"]), ("ready", None), model["why"])

    def test_an_array_that_does_not_fit_names_the_input_and_what_it_takes(self):
        for name, (_, why) in UNFIT.items():
            with self.subTest(name):
                model = self.status()[name]
                self.assertEqual(model["state"], "unready")
                self.assertIn(why, model["why"])
                self.assertTrue("warmup.x" in model["why"] or name == "of_another", model["why"])

    def test_arrays_that_are_too_large_together_are_refused(self):
        self.assertIn("the arrays have 19660800 bytes in total", self.status()["images"]["why"])

    def test_a_file_with_an_array_that_is_no_input_is_refused(self):
        self.assertIn("npz.npz has an array for the unknown input `other`; the model has x", self.status()["other_names"]["why"])

    def test_check_finds_files_that_cannot_be_used(self):
        found = subprocess.run([BINARY, "check", self.server.folder / "config.yaml"], text=True, capture_output=True)
        self.assertEqual(found.returncode, 78)
        for name in ("of_fortran", "of_big_endian", "of_objects", "other_names"):
            self.assertIn(f"{name}.npy: " if name in UNFIT else "unknown input `other`", found.stderr)

    def test_a_file_that_comes_later_makes_the_model_ready(self):
        self.assertIn("later.npy: No such file", self.status()["later"]["why"])
        np.save(self.server.folder / "new.npy", np.int64([50]))
        (self.server.folder / "new.npy").rename(self.server.folder / "samples/later.npy")
        wait_until(lambda: self.status()["later"]["state"] == "ready")


class OptionalInputs(Served):
    make = staticmethod(make_optional)

    def tensors(self, module=grpcclient, **arrays):
        tensors = []
        for name, array in arrays.items():
            array = np.asarray(array, np.float32)
            tensors.append(module.InferInput(name, list(array.shape), "FP32"))
            tensors[-1].set_data_from_numpy(array)
        return tensors

    def test_a_default_counts_unless_a_request_gives_a_value(self):
        x = [[1, 2], [3, 4]]
        for client, module in ((self.grpc, grpcclient), (self.http, httpclient)):
            for given, expected in (({}, x), ({"b": [10, 20]}, [[11, 22], [13, 24]]), ({"b": [5]}, [[6, 7], [8, 9]]),
                                    ({"scale": 3}, [[3, 6], [9, 12]]),
                                    ({"b": [10, 20], "scale": 3}, [[13, 26], [19, 32]]), ({}, x)):
                answer = client.infer("shifted", self.tensors(module, x=x, **given))
                self.assertEqual(answer.as_numpy("y").tolist(), expected, given)

    def test_requests_with_values_are_never_mixed_with_others(self):
        answers = {}
        for at in range(40):
            given = {"b": [at, 0]} if at % 2 else {}
            self.grpc.async_infer("shifted", self.tensors(x=[[at, 1]], **given), lambda result, error, at=at:
                                  answers.__setitem__(at, error if result is None else result.as_numpy("y").tolist()))
        wait_until(lambda: len(answers) == 40)
        self.assertEqual(answers, {at: [[2 * at if at % 2 else at, 1]] for at in range(40)})
        stats = self.http.get_inference_statistics("shifted")["model_stats"][0]
        self.assertLess(stats["execution_count"], stats["inference_count"], "those without values are batched")

    def test_clients_see_which_inputs_are_optional(self):
        inputs = {each["name"]: each["shape"] for each in self.http.get_model_metadata("shifted")["inputs"]}
        self.assertEqual(inputs, {"x": [-1, 2], "scale": [], "b": [-1]})
        config = self.grpc.get_model_config("shifted", as_json=True)["config"]
        self.assertEqual(config["max_batch_size"], 32)
        self.assertEqual([each.get("optional", False) for each in config["input"]], [False, True, True])

    def test_a_value_of_another_shape_or_type_is_refused(self):
        with self.assertRaisesRegex(InferenceServerException, r"shape for input 'scale'.*expected \[\], got \[1\]"):
            self.grpc.infer("shifted", self.tensors(x=[[1, 2]], scale=[3]))
        with self.assertRaisesRegex(InferenceServerException, "input 'x' is missing"):
            self.grpc.infer("shifted", self.tensors(scale=3))
        b = grpcclient.InferInput("b", [2], "INT64")
        b.set_data_from_numpy(np.int64([1, 2]))
        with self.assertRaisesRegex(InferenceServerException, "input 'b' has datatype INT64"):
            self.grpc.infer("shifted", [*self.tensors(x=[[1, 2]]), b])

    def test_weights_among_the_inputs_are_not_optional_inputs(self):
        self.assertEqual([each["name"] for each in self.http.get_model_metadata("many")["inputs"]], ["x"])
        self.assertEqual(self.grpc.infer("many", self.tensors(x=[[0, 1]])).as_numpy("y").tolist(), [[17, 18]])
        with self.assertRaisesRegex(InferenceServerException, "unexpected inference input 'w3'.*are: x"):
            self.grpc.infer("many", self.tensors(x=[[0, 1]], w3=[1, 1]))


class FoundModels(Served):
    make = staticmethod(make)

    def max_batch(self, name):
        return self.http.get_model_config(name)["max_batch_size"]

    def together(self, name, rows):
        """Sends all rows at the same time, each from its own client."""
        answers = {}
        for at, row in enumerate(rows):
            given = grpcclient.InferInput("x", row.shape, "FP32")
            given.set_data_from_numpy(row)
            self.grpc.async_infer(name, [given], lambda result, error, at=at: answers.__setitem__(
                at, error if result is None else result.as_numpy("y")))
        wait_until(lambda: len(answers) == len(rows))
        return [answers[at] for at in range(len(rows))]

    def test_clients_never_see_others_rows_where_rows_depend_on_each_other(self):
        rows = [np.full((1, 4), at + 1, np.float32) for at in range(CLIENTS)]
        for name, expected in (("running", rows), ("softmax", [np.ones((1, 4))] * CLIENTS),
                               ("centred", [np.zeros((1, 4))] * CLIENTS)):
            with self.subTest(name):
                model = self.status()[name]
                self.assertEqual((model["state"], self.max_batch(name)), ("ready", 0), model["why"])
                self.assertIn("depends on the other rows", model["batch_limit"])
                for answer, own in zip(self.together(name, rows), expected):
                    np.testing.assert_allclose(answer, own)
        sequence = np.ones((5, 4), np.float32)
        np.testing.assert_array_equal(self.infer("running", sequence), np.cumsum(sequence, 0))

    def test_a_batch_that_the_operator_asked_for_is_refused_with_the_reason(self):
        model = self.status()["insisted"]
        self.assertEqual(model["state"], "unready")
        self.assertIn("depends on the other rows", model["why"])
        self.assertIn("batch: {max: 0}", model["why"])

    def test_a_model_of_random_answers_serves(self):
        self.assertNotEqual(self.infer("random", [[0] * 4]).tolist(), self.infer("random", [[0] * 4]).tolist())
        self.assertEqual(self.status()["given_random"]["worker_deaths"], 0)

    def test_the_default_batch_is_as_large_as_works(self):
        self.assertEqual(self.max_batch("single"), 1)
        self.assertEqual(self.infer("single", [[1, 2, 3, 4]]).tolist(), [[1, 2, 3, 4]])
        self.assertEqual(self.max_batch("detector"), 16)
        limit = self.status()["detector"]["batch_limit"]
        self.assertIn("at most 16 rows: a batch of 32 rows failed", limit)
        self.assertEqual(self.infer("detector", np.ones((16, 4))).shape, (16, 700_000))
        with self.assertRaisesRegex(InferenceServerException, "between 1 and 16"):
            self.infer("detector", np.ones((17, 4)))

    def test_values_come_from_the_operator_or_from_the_models_file(self):
        for name in ("city", "given_city", "voice", "given_voice", "given_index"):
            with self.subTest(name):
                self.assertEqual(self.status()[name]["state"], "ready", self.status()[name]["why"])
        rate = httpclient.InferInput("rate", [], "INT64")
        rate.set_data_from_numpy(np.array(16000), binary_data=False)
        samples = httpclient.InferInput("x", [1, 512], "FP32")
        samples.set_data_from_numpy(np.ones((1, 512), np.float32))
        self.assertEqual(self.http.infer("voice", [samples, rate]).as_numpy("y").shape, (1, 512))

    def test_a_model_that_does_not_take_made_up_values_says_what_to_write(self):
        model = self.status()["index"]
        self.assertEqual(model["state"], "unready")
        self.assertIn("warmup: {x: VALUE}", model["why"])
        self.assertIn("`warmup: PATH`", model["why"])

    def test_free_axes_are_tried_at_larger_lengths(self):
        self.assertEqual(self.status()["sides"]["state"], "ready", self.status()["sides"]["why"])
        self.assertEqual(self.infer("sides", np.ones((1, 3, 32, 32))).shape, (1, 4, 26, 26))

    def test_a_large_value_of_one_client_changes_no_answer_of_another(self):
        for name in ("clipped", "lagged", "lengths", "quantized"):
            with self.subTest(name):
                model = self.status()[name]
                self.assertEqual((model["state"], self.max_batch(name)), ("ready", 0), model["why"])
                self.assertIn("depends on the other rows", model["batch_limit"])

    def test_rows_of_one_integer_or_text_show_that_they_depend_on_each_other(self):
        for name in FIRST:
            with self.subTest(name):
                model = self.status()[name]
                self.assertEqual((model["state"], self.max_batch(name)), ("ready", 0), model["why"])
                self.assertIn("depends on the other rows", model["batch_limit"])

    def test_models_whose_rows_cannot_be_shown_to_be_apart_are_batched_on_demand_alone(self):
        self.assertEqual((self.max_batch("random"), self.max_batch("given_random")), (0, 8))
        self.assertIn("set batch.max", self.status()["random"]["batch_limit"])
        self.assertEqual(self.max_batch("given_quantized"), 8, "rows of a kind differ by some hundredths")

    def test_an_answer_without_the_rows_of_its_batch_shows_that_there_is_none(self):
        self.assertEqual(self.max_batch("sequence"), 0)
        self.assertIn("first axis is not the batch", self.status()["sequence"]["batch_limit"])
        self.assertEqual(self.infer("sequence", np.ones((5, 3, 4))).tolist(), [[5] * 4] * 3)

    def test_a_signal_that_is_refused_says_what_to_configure(self):
        with self.assertRaisesRegex(InferenceServerException, "set batch.max to 0"):
            self.infer("signal", np.ones(16_000))


if __name__ == "__main__":
    BINARY = sys.argv.pop(1)
    unittest.main()
