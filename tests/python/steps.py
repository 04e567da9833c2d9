#!/usr/bin/env python3
"""Tests models whose streams advance together (`step`), and streams with faults.

Usage: steps.py SHADOWSLICE_BINARY [unittest arguments]
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from tritonclient.utils import InferenceServerException

import streams
from server import wait_until
from streams import Stream, tensor

# This model counts up to `count`. A step of all streams takes `STEP` s.
COUNTER = """
import os, queue, threading, time
import numpy as np
from shadowslice import PENDING, InvalidInput, Tensor

STEP = 0.002

class State:
    def __init__(self, count, fault):
        self.count, self.fault, self.n, self.done, self.waits = count, fault, 0, False, False
        self.queue = queue.Queue()
        if fault == "thread":
            threading.Thread(target=self.fail).start()

    def fail(self):
        raise KeyError("a thread without luck")

class Steps:
    inputs = {"count": Tensor("INT32", [1]), "fault": Tensor("BYTES", [1])}
    outputs = {"n": Tensor("INT32", [1]), "together": Tensor("INT32", [1])}
    streams = 16

    def load(self, context):
        self.open = 0

    def warmup(self):
        return {"count": np.array([8], np.int32), "fault": np.array([b""], object)}

    # The answers depend on the number of streams, which is what these tests read.
    deterministic = False

    def start(self, request):
        count, fault = int(request["count"][0]), request["fault"][0].decode()
        if fault == "refused":
            raise InvalidInput("it is unlucky")
        self.open += 1
        assert self.open <= self.streams + 1, "too many at a time"
        return State(count, fault)

    def step(self, states):
        time.sleep(STEP)
        for state in states:
            if state.n == 3:
                self.fail(state.fault, state)
        if any(state.fault == "few" and state.n == 3 for state in states):
            return [None] * (len(states) - 1)
        return [self.answer(state, len(states)) for state in states]

    def fail(self, fault, state):
        if fault == "raise":
            raise RuntimeError("a broken state")
        if fault == "hang":
            state.queue.get()
        if fault == "spin":
            while True:
                try:
                    time.sleep(0.001)
                except Exception:
                    pass
        if fault == "abort":
            os.abort()

    def answer(self, state, together):
        n = state.n
        state.waits = state.fault == "slow" and not state.waits
        if state.waits:
            return PENDING
        state.n += 1
        if state.fault == "shape" and n == 3:
            return {"n": np.zeros(3, np.int32), "together": np.zeros(1, np.int32)}
        if state.fault == "error" and n == 3:
            return InvalidInput("not this one")
        state.done = state.n == state.count
        if state.count == 0:
            return None
        return {"n": np.array([n], np.int32), "together": np.array([together], np.int32)}

    def end(self, state):
        self.open -= 1
        print("ended at", state.n, flush=True)
"""

# Hugging Face's recipe: a thread puts pieces into a queue, and the generator takes them.
THREADS = """
import queue, threading
import numpy as np
from shadowslice import Tensor

class Threads:
    inputs = {"count": Tensor("INT32", [1]), "fault": Tensor("BYTES", [1])}
    outputs = {"n": Tensor("INT32", [1])}

    def warmup(self):
        return {"count": np.array([8], np.int32), "fault": np.array([b""], object)}

    def generate(self, request):
        pieces = queue.Queue()
        thread = threading.Thread(target=self.produce, args=(pieces, request), daemon=True)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                yield {"n": np.array([piece], np.int32)}
        finally:
            thread.join()

    def produce(self, pieces, request):
        for n in range(request["count"][0]):
            if n == 3 and request["fault"][0] == b"thread":
                raise ValueError("out of memory, for example")
            if n == 3 and request["fault"][0] == b"ends":
                return
            if n == 3 and request["fault"][0] == b"hangs":
                threading.Event().wait()
            pieces.put(n)
        pieces.put(None)
"""

TIMEOUT = 30  # seconds
STREAMS = 16
SERVER = None


class Models(streams.Models):
    def write(self, folder):
        (folder / "steps.py").write_text(COUNTER)
        (folder / "threads.py").write_text(THREADS)
        return {}

    def models(self, python):
        python += ", step_timeout: 500ms"
        return [f"  - {{path: steps.py, slo: {{first: 1s, next: 100ms}}, {python}, handover: shadow}}",
                f"  - {{path: threads.py, slo: 1s, {python}}}"]

    def ended(self):
        """Returns the number of states that have ended."""
        return Path(self.log.name).read_text().count("ended at")


def setUpModule():
    global SERVER
    SERVER = Models(sys.argv[0])


def tearDownModule():
    SERVER.stop()


def request(count, fault=""):
    return [tensor("count", np.int32([count]), "INT32"),
            tensor("fault", np.array([fault.encode()], dtype=object), "BYTES")]


def counted(result):
    return int(result.as_numpy("n")[0])


class TestCase(unittest.TestCase):
    def stream(self):
        stream = Stream(SERVER)
        self.addCleanup(stream.close)
        return stream

    def until_the_end(self, stream, count, fault="", model="steps"):
        return stream.until_the_end(model, request(count, fault))


class Steps(TestCase):
    def test_streams_end_with_their_last_answer(self):
        stream = self.stream()
        for count in (1, 2, 50):
            answers = self.until_the_end(stream, count)
            self.assertEqual([counted(answer) for answer in answers], list(range(count)))
        self.assertEqual(self.until_the_end(stream, 0), [], "a stream without answers")

    def test_an_answer_can_need_several_steps(self):
        answers = self.until_the_end(self.stream(), 20, "slow")
        self.assertEqual([counted(answer) for answer in answers], list(range(20)))

    def test_all_streams_advance_in_one_step(self):
        stream = self.stream()
        begun = time.monotonic()
        for number in range(STREAMS):
            stream.ask("steps", request(200), request_id=str(number))
        numbers, together = {}, []
        for _ in range(STREAMS * 200):
            answer = stream.answer()
            numbers.setdefault(answer.get_response().id, []).append(counted(answer))
            together.append(int(answer.as_numpy("together")[0]))
        self.assertEqual(numbers, {str(number): list(range(200)) for number in range(STREAMS)})
        self.assertGreater(np.mean(together), STREAMS / 2, f"in {time.monotonic() - begun:.1f} s")

    def test_a_stream_joins_streams_under_way(self):
        long, short = self.stream(), self.stream()
        long.ask("steps", request(10**6), request_id="long")
        long.answer()
        answers = self.until_the_end(short, 20)
        self.assertEqual([counted(answer) for answer in answers], list(range(20)))
        self.assertEqual({int(answer.as_numpy("together")[0]) for answer in answers} - {1}, {2})

    def test_more_requests_than_streams_wait_for_one_that_ends(self):
        stream = self.stream()
        for number in range(3 * STREAMS):
            stream.ask("steps", request(10), request_id=str(number))
        came = {}
        for _ in range(30 * STREAMS):
            answer = stream.answer()
            came.setdefault(answer.get_response().id, []).append(counted(answer))
        self.assertEqual(came, {str(number): list(range(10)) for number in range(3 * STREAMS)})

    def test_one_more_request_is_refused_by_its_slo_and_not_before(self):
        stream = self.stream()
        for number in range(STREAMS):
            stream.ask("steps", request(10**6), request_id=str(number))
        wait_until(lambda: SERVER.metric('shadowslice_streams_open{model="steps".*}') == STREAMS)
        begun = time.monotonic()
        with self.assertRaises(InferenceServerException) as caught:
            self.until_the_end(self.stream(), 5)
        self.assertGreater(time.monotonic() - begun, 0.9, str(caught.exception))

    def test_a_fault_ends_its_stream_alone(self):
        faults = [("refused", 0, "it is unlucky"), ("raise", 3, "RuntimeError: a broken state"),
                  ("few", 3, "step returned 0 answers for 1 states"), ("shape", 3, "'n' has shape"),
                  ("error", 3, "not this one"), ("thread", None, "a thread without luck"),
                  ("hang", 3, "no answer within step_timeout (0.5 s)"),
                  ("spin", 3, "no answer within step_timeout (0.5 s)")]
        other = self.stream()
        other.ask("steps", request(10**6))
        expected = 0
        worker = SERVER.worker("steps")
        for fault, good, why in faults:
            with self.subTest(fault):
                stream = self.stream()
                stream.ask("steps", request(100, fault))
                numbers = []
                with self.assertRaises(InferenceServerException) as caught:
                    while True:
                        numbers.append(counted(stream.answer()))
                self.assertIn(why, str(caught.exception))
                self.assertEqual(numbers, list(range(len(numbers) if good is None else good)))
                for _ in range(50):
                    self.assertEqual(counted(other.answer()), expected)
                    expected += 1
        self.assertEqual(SERVER.worker("steps"), worker)

    def test_a_client_that_leaves_ends_its_state(self):
        ended = SERVER.ended()
        stream = self.stream()
        stream.ask("steps", request(10**6))
        [stream.answer() for _ in range(5)]
        stream.client.stop_stream(cancel_requests=True)
        wait_until(lambda: SERVER.ended() > ended)

    def test_streams_survive_a_change_of_share(self):
        before = SERVER.worker("steps")
        asked = [self.stream() for _ in range(4)]
        for stream in asked:
            stream.ask("steps", request(400))
            stream.answer()
        share = "35" if "20" in SERVER.command("status") else "20"
        resized = threading.Thread(target=lambda: SERVER.command("resize", "steps", share))
        resized.start()
        for stream in asked:
            self.assertEqual([counted(stream.answer()) for _ in range(399)], list(range(1, 400)))
        resized.join()
        wait_until(lambda: SERVER.worker("steps") not in (None, before))
        self.assertEqual(len(self.until_the_end(self.stream(), 5)), 5)

    def test_a_dead_worker_ends_its_streams_and_requests_without_an_answer_run_again(self):
        before = SERVER.worker("steps")
        stream = self.stream()
        for number in range(4):
            stream.ask("steps", request(10**6), request_id=str(number))
        came = set()
        while len(came) < 4:
            came.add(stream.answer().get_response().id)
        os.kill(before, signal.SIGKILL)
        late = self.stream()
        late.ask("steps", request(5), enable_empty_final_response=True)
        failed = 0
        while failed < 4:
            result, error = stream.came.get(timeout=TIMEOUT)
            if error is not None:
                self.assertRegex(str(error), "send the request again|died while computing")
                failed += 1
        answers = [late.answer() for _ in range(5)]
        self.assertEqual([counted(answer) for answer in answers], list(range(5)))

    def test_inputs_that_kill_workers_are_refused_and_others_are_not(self):
        for _ in range(6):
            stream = self.stream()
            stream.ask("steps", request(100, "abort"))
            with self.assertRaises(InferenceServerException) as caught:
                while True:
                    stream.answer()
            if "the server refuses" in str(caught.exception) and "these inputs" in str(caught.exception):
                break
        self.assertIn("these inputs", str(caught.exception))
        self.assertEqual(len(self.until_the_end(self.stream(), 5)), 5)


def by_events(count):
    """Returns the numbers of a stream of server-sent events, and its error, if any."""
    body = json.dumps({"count": count, "fault": ""}).encode()
    url = f"http://localhost:{SERVER.http_port}/v2/models/steps/generate_stream"
    numbers = []
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=TIMEOUT) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return numbers, event["error"]
                    numbers.append(event["n"])
    except urllib.error.HTTPError as error:
        return numbers, error.read().decode()
    return numbers, None


def by_grpc(stream, count):
    """Returns the numbers of a stream of gRPC, and its error, if any."""
    stream.ask("steps", request(count), enable_empty_final_response=True)
    numbers = []
    while True:
        result, error = stream.came.get(timeout=TIMEOUT)
        if error is not None:
            return numbers, str(error)
        if streams.is_final(result):
            return numbers, None
        numbers.append(counted(result))


class Endurance(TestCase):
    def test_a_thousand_streams_through_kills_and_resizes_are_right_or_broken_by_a_kill(self):
        kills, outcomes, left = 4, [], iter(range(1000))
        lock = threading.Lock()

        def client(seed):
            random = np.random.default_rng(seed)
            stream = self.stream()
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                count = int(random.integers(1, 80))
                numbers, error = by_events(count) if seed % 2 else by_grpc(stream, count)
                with lock:
                    outcomes.append((count, numbers, error))

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(STREAMS)]
        [thread.start() for thread in clients]
        for part in range(1, kills + 1):
            SERVER.command("resize", "steps", str(25 + 5 * part))
            wait_until(lambda: len(outcomes) >= part * 1000 / (kills + 1))
            wait_until(lambda: SERVER.worker("steps"))
            os.kill(SERVER.worker("steps"), signal.SIGKILL)
        [thread.join() for thread in clients]
        self.assertEqual(len(outcomes), 1000)
        broken = [error for count, numbers, error in outcomes if error is not None]
        for count, numbers, error in outcomes:
            self.assertEqual(numbers, list(range(count if error is None else len(numbers))))
        for error in broken:
            self.assertRegex(error, "send the request again|died while computing")
        self.assertLessEqual(len(broken), kills * STREAMS)


class Upgrades(TestCase):
    def test_streams_under_way_end_and_new_ones_begin_with_the_next_supervisor(self):
        server = Models(sys.argv[0])
        self.addCleanup(shutil.rmtree, server.folder)
        self.assertEqual(streams.through_an_upgrade(server, "steps", request(100), list(range(100))), {True})


class Threads(TestCase):
    """Generators that wait for a thread."""

    def test_a_thread_that_fails_ends_or_hangs_ends_its_stream_with_the_reason(self):
        worker = SERVER.worker("threads")
        for fault, why in (("thread", "ValueError: out of memory, for example"),
                           ("ends", "no answer within step_timeout (0.5 s)"),
                           ("hangs", "no answer within step_timeout (0.5 s)")):
            with self.subTest(fault):
                stream, other = self.stream(), self.stream()
                begun = time.monotonic()
                stream.ask("threads", request(100, fault))
                numbers = []
                with self.assertRaises(InferenceServerException) as caught:
                    while True:
                        numbers.append(counted(stream.answer()))
                self.assertIn(why, str(caught.exception))
                answers = self.until_the_end(other, 20, model="threads")
                self.assertEqual([counted(answer) for answer in answers], list(range(20)))
                self.assertLess(time.monotonic() - begun, TIMEOUT)
        self.assertEqual(SERVER.worker("threads"), worker)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
