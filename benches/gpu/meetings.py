"""Measures how batches of 2, 3 and 5 saturated models slow each other down on one GPU under MPS.

Run it on a host with one idle H100 or H200, PyTorch 2.11, torchvision, timm, transformers and
cuda-bindings 13:

    python3 benches/gpu/meetings.py --out meetings.json [--limit 240] [--sets built,second]

Each model is a separate process and an MPS client at 100 %. The process replays CUDA graphs without
pauses, with at most two graphs in flight. It records a graph once for each number of rows. Like the
worker, it then moves the graph's kernel nodes to the green contexts of the partitions. If that
doesn't limit a model to its partition, the process records the model's graphs on the streams of the
green contexts instead. Weights are random.

The program starts its own MPS control daemon and stops it at the end. It changes no GPU setting.
It writes the JSON file after each phase, so the file is usable if the program ends early. The
models that `--lower` names are MPS clients with a lower priority than the others. `--rehearse`
replaces CUDA by sleeps, so that you can try the program on a host without a GPU.
"""

import argparse
import collections
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

SETS = {
    "built": ["resnet50", "mobilenet_v2", "vgg19", "alexnet", "bert"],
    "second": ["efficientnet_b0", "vit_b16", "convnext_tiny", "distilbert", "vit_b16_fp16"],
}
# The models that run at the same time in each meeting, as positions in a set. Some layouts give the
# first model the whole GPU.
MEETINGS = {
    5: [(0, 1, 2, 3, 4)],
    3: [(0, 2, 4), (1, 3, 0), (4, 2, 1)],
    2: [(0, 2), (0, 4), (1, 2), (4, 0)],
}
ROWS = [1, 8, 16, 32]
# A Hopper GPU with 132 SMs has 15 groups of 8 SMs. The remaining 12 SMs are the last group.
GROUPS, GROUP_SMS = 15, 8
SPLITS = {
    "half": [range(8), range(8, 16)],
    "third": [range(5), range(5, 10), range(10, 16)],
    "quarter": [range(first, first + 4) for first in range(0, 16, 4)],
    "fifth": [range(first, first + 3) for first in range(0, 15, 3)],
    "two_thirds": [range(10)],
    "three_quarters": [range(12)],
}
PARTITIONS = {"whole": list(range(16))}
for split_name, split_parts in SPLITS.items():
    PARTITIONS |= {f"{split_name}{k}": list(part) for k, part in enumerate(split_parts)}
ALONE = ["whole", "half0", "third0", "fifth0", "quarter0", "two_thirds0", "three_quarters0"]
# Partitions count as effective if a batch of 32 rows takes at least this many times as long on a
# quarter of the GPU as on the whole GPU.
BOUNDED = 1.3
START_TIMEOUT_S, PREPARE_TIMEOUT_S, REPLY_TIMEOUT_S, MPS_TIMEOUT_S = 110, 60, 15, 20
# The longest extension of a measurement, in seconds. Processes extend it for slow batches.
PATIENCE_S = 3
DRIVER_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
# The values of CU_GREEN_CTX_DEFAULT_STREAM and CU_STREAM_NON_BLOCKING.
DEFAULT_STREAM, NON_BLOCKING = 1, 1


# This section runs in the processes of the models.


def network(torch, model):
    """Returns the network, with random weights on the current default device."""
    if model in ("bert", "distilbert"):
        import transformers

        if model == "bert":
            return transformers.BertModel(transformers.BertConfig(), add_pooling_layer=False)
        return transformers.DistilBertModel(transformers.DistilBertConfig())
    if model in SETS["built"]:
        import torchvision

        return getattr(torchvision.models, model)(weights=None)
    import timm

    name = "vit_base_patch16_224" if model.startswith("vit_b16") else model
    net = timm.create_model(name, pretrained=False)
    return net.half() if model.endswith("fp16") else net


def batch(torch, model, rows):
    """Returns a batch of random inputs on the current default device."""
    if model in ("bert", "distilbert"):
        return torch.randint(1, 1000, (rows, 128))
    dtype = torch.float16 if model.endswith("fp16") else torch.float32
    return torch.randn(rows, 3, 224, 224, dtype=dtype)


def checked(answer):
    """Returns the results of a driver call without its status. Raises if the call failed."""
    status, *values = answer
    if int(status):
        raise RuntimeError(getattr(status, "name", str(status)))
    return values[0] if len(values) == 1 else values


class Engine:
    """A model whose batches are CUDA graphs, one for each number of rows and partition."""

    def __init__(self, model):
        import torch
        from cuda.bindings import driver

        self.torch, self.driver, self.model = torch, driver, model
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.device("cuda"), torch.no_grad():
            self.net = network(torch, model).eval()
            self.inputs = {rows: batch(torch, model, rows) for rows in ROWS}
        torch.cuda.synchronize()
        self.device = checked(driver.cuDeviceGet(0))
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self.graphs, self.executables, self.contexts, self.recorded = {}, {}, {}, []
        for rows in ROWS:
            self.graphs[rows] = self.record(rows, self.stream)
            self.executables[rows, "whole"] = self.instantiate(self.graphs[rows])
        self.resources = self.split()

    def facts(self):
        """Returns the GPU's properties and the software versions, for the JSON file."""
        torch, driver = self.torch, self.driver
        mps = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        return {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "mps": bool(checked(driver.cuDeviceGetAttribute(mps, self.device))),
            "sms": {"whole": torch.cuda.get_device_properties(0).multi_processor_count},
            "group_sms": [resource.sm.smCount for resource in self.resources],
        }

    def split(self):
        """Returns the groups of SMs. The left-over SMs are the last group."""
        driver = self.driver
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        everything = checked(driver.cuDeviceGetDevResource(self.device, kind))
        count = min(GROUPS, everything.sm.smCount // GROUP_SMS)
        groups, count, rest = checked(
            driver.cuDevSmResourceSplitByCount(count, everything, 0, GROUP_SMS)
        )
        return groups[:count] + ([rest] if rest.sm.smCount else [])

    def green(self, groups):
        """Returns a green context on these groups of SMs, and the number of its SMs."""
        driver, kept = self.driver, [group for group in groups if group < len(self.resources)]
        resources = [self.resources[group] for group in kept]
        description = checked(driver.cuDevResourceGenerateDesc(resources, len(resources)))
        green = checked(driver.cuGreenCtxCreate(description, self.device, DEFAULT_STREAM))
        return green, sum(resource.sm.smCount for resource in resources)

    def record(self, rows, stream):
        """Returns the graph of one batch, recorded on this stream."""
        torch, feed = self.torch, self.inputs[rows]
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(3):
                self.net(feed)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        options = {"pool": self.pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.inference_mode(), torch.cuda.graph(graph, **options):
            self.net(feed)
        self.recorded.append(graph)
        return self.driver.CUgraph(graph.raw_cuda_graph())

    def instantiate(self, graph):
        return checked(self.driver.cuGraphInstantiate(graph, 0))

    def move(self, graph, context):
        """Moves the graph's kernel nodes to another context, and returns the graph."""
        driver = self.driver
        _, count = checked(driver.cuGraphGetNodes(graph, 0))
        nodes, _ = checked(driver.cuGraphGetNodes(graph, count))
        for node in nodes[:count]:
            kind = checked(driver.cuGraphNodeGetType(node))
            if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                continue
            parameters = checked(driver.cuGraphKernelNodeGetParams(node))
            if not int(parameters.kern):
                raise RuntimeError("a kernel node has no CUkernel")
            parameters.func, parameters.ctx = driver.CUfunction(0), context
            checked(driver.cuGraphKernelNodeSetParams(node, parameters))
        return graph

    def partition(self, partitions, method):
        """Makes executables for these partitions. Returns the SMs of each, and the failures."""
        sms, failures = {}, {}
        for name, groups in partitions.items():
            try:
                if name not in self.contexts:
                    self.contexts[name] = self.green(groups)
                green, sms[name] = self.contexts[name]
                place = self.mover(green) if method == "move" else self.recorder(green)
            except Exception as error:
                failures[name] = repr(error)
                continue
            for rows in ROWS:
                try:
                    self.executables[rows, name] = place(rows)
                except Exception as error:
                    self.executables.pop((rows, name), None)
                    failures[f"{name}, {rows} rows"] = repr(error)
        return {"sms": sms, "failures": failures}

    def mover(self, green):
        context = checked(self.driver.cuCtxFromGreenCtx(green))
        return lambda rows: self.instantiate(self.move(self.graphs[rows], context))

    def recorder(self, green):
        stream = checked(self.driver.cuGreenCtxStreamCreate(green, NON_BLOCKING, 0))
        external = self.torch.cuda.ExternalStream(int(stream))
        return lambda rows: self.instantiate(self.record(rows, external))

    def launcher(self, rows, partition):
        """Returns a function that launches one batch and returns the event of its completion."""
        executable = self.executables[rows, partition]
        stream = self.driver.CUstream(self.stream.cuda_stream)
        events = itertools.cycle([self.torch.cuda.Event() for _ in range(2)])

        def launch():
            checked(self.driver.cuGraphLaunch(executable, stream))
            event = next(events)
            event.record(self.stream)
            return event

        return launch


class Rehearsal:
    """A stand-in for `Engine` that sleeps instead of executing."""

    def __init__(self, model):
        self.weight = 1 + len(model) % 3

    def facts(self):
        return {"device": "none", "torch": "none", "mps": True, "sms": {"whole": 132}}

    def partition(self, partitions, method):
        return {"sms": {name: 8 * len(groups) for name, groups in partitions.items()}}

    def launcher(self, rows, partition):
        self.seconds = 1e-4 * self.weight * rows * 16 / len(PARTITIONS[partition])
        return lambda: self

    def synchronize(self):
        time.sleep(self.seconds)


def replay(launch, start, begin, end):
    """Replays a graph from `start` to `end`. Returns the time per batch after `begin`, in ms."""
    time.sleep(max(0.0, start - time.monotonic()))
    stamps, pending = [], collections.deque()
    while not enough(stamps, begin, end):
        while len(pending) < 2:
            pending.append(launch())
        pending.popleft().synchronize()
        stamps.append(time.monotonic())
    for event in pending:
        event.synchronize()
    kept = [stamp for stamp in stamps if begin <= stamp <= end]
    if len(kept) < 3:
        kept = [stamp for stamp in stamps if stamp >= begin]
    each = sorted(1e3 * (after - before) for before, after in itertools.pairwise(kept))
    if not each:
        raise RuntimeError("too few batches ended in the time measured")
    figures = {"p50": each[len(each) // 2], "p90": each[len(each) * 9 // 10]}
    return {"batches": len(each), "ms": sum(each) / len(each), **figures}


def enough(stamps, begin, end):
    """Returns true if the measurement can end: the time is over, and two complete batches fit."""
    last = stamps[-1] if stamps else 0.0
    few = len(stamps) < 3 or stamps[-3] < begin
    return last > end + PATIENCE_S or (last > end and not few)


def serve(pipe, model, rehearse):
    """Runs as the main function of a model's process, and executes the coordinator's commands."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        engine = Rehearsal(model) if rehearse else Engine(model)
        pipe.send(engine.facts())
        while (command := pipe.recv()) is not None:
            try:
                if "partitions" in command:
                    pipe.send(engine.partition(**command))
                else:
                    launch = engine.launcher(command.pop("rows"), command.pop("partition"))
                    pipe.send(replay(launch, **command))
            except Exception as error:
                pipe.send({"error": repr(error)})
    except EOFError:
        pass
    except Exception:
        pipe.send({"error": traceback.format_exc()})
    finally:
        # This call skips destructors, which could wait for a GPU that has failed.
        os._exit(0)


# This section runs in the coordinator.


class Worker:
    """The process of a model, as the coordinator sees it."""

    def __init__(self, model, rehearse, lower):
        context = multiprocessing.get_context("spawn")
        self.model, self.sms, self.failed_in_a_row = model, {}, 0
        self.pipe, theirs = context.Pipe()
        # MPS reads this variable when the process becomes a client. The value 0 is the normal
        # priority, and 1 is a lower priority.
        os.environ["CUDA_MPS_CLIENT_PRIORITY"] = str(int(lower))
        self.process = context.Process(target=serve, args=(theirs, model, rehearse), daemon=True)
        self.process.start()
        theirs.close()
        self.alive = True

    def send(self, command):
        try:
            self.pipe.send(command)
        except OSError:
            self.end()

    def reply(self, deadline):
        """Returns the next reply. Kills the process if it does not reply before the deadline."""
        answer = {"error": "the process has ended"}
        if self.alive:
            try:
                if self.pipe.poll(max(0.0, deadline - time.monotonic())):
                    answer = self.pipe.recv()
                else:
                    answer = {"error": "no reply in time"}
                    self.end()
            except (OSError, EOFError):
                self.end()
        # A failed CUDA context does not recover. Other errors affect only this command, for example
        # a model that does not fit on a partition.
        failed = "CUDA" in str(answer.get("error"))
        self.failed_in_a_row = self.failed_in_a_row + 1 if failed else 0
        if self.failed_in_a_row >= 4:
            self.end()
        return answer

    def end(self):
        self.alive = False
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


class Mps:
    """The MPS control daemon of this program, in a temporary folder."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="mps-")
        for name in ("PIPE", "LOG"):
            folder = os.path.join(self.folder, name.lower())
            os.mkdir(folder)
            os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = folder
        os.environ.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)

    def start(self):
        # The daemon keeps the output open that it inherits. If that output were a pipe, reading
        # from it would never end.
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        command = ["nvidia-cuda-mps-control", "-d"]
        subprocess.run(command, check=True, timeout=MPS_TIMEOUT_S, **quiet)

    def ask(self, command):
        return output(["nvidia-cuda-mps-control"], command + "\n")

    def logs(self):
        paths = [os.path.join(self.folder, "log", name) for name in ("control.log", "server.log")]
        return output(["tail", "-n", "15", *paths])

    def stop(self):
        """Stops the daemon, and kills it if it doesn't exit."""
        pid_file = os.path.join(self.folder, "pipe", "nvidia-cuda-mps-control.pid")
        try:
            with open(pid_file) as file:
                pid = int(file.read())
        except (OSError, ValueError):
            pid = None
        print("stop MPS:", self.ask("quit") or "done", flush=True)
        for attempt in range(60 if pid else 0):
            if not os.path.exists(f"/proc/{pid}"):
                break
            if attempt == 50:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)


def layouts(count):
    """Returns the layouts for this number of models: for each name, the partition of each model."""

    def spread(name, models):
        return [f"{name}{k % len(SPLITS[name])}" for k in range(models)]

    found = {
        "whole": ["whole"] * count,
        "halves": spread("half", count),
        "thirds": spread("third", count),
        "first whole": ["whole", *spread("half", count - 1)],
    }
    if count == 2:
        found |= {"same half": ["half0", "half0"], "first whole, quarter": ["whole", "quarter0"]}
    if count == 5:
        found["fifths"] = spread("fifth", 5)
    return found


def phases(models):
    """Yields each phase and its cells: a label, a layout, and (model, rows, partition) tuples."""
    yield "alone", [(str(r), p, [(m, r, p)]) for p in ALONE for r in ROWS for m in models]
    for count, meetings in MEETINGS.items():
        rows = {str(r): [r] * count for r in ROWS}
        if count != 3:
            rows["1+16"] = [1] + [16] * (count - 1)
        yield f"meetings of {count}", [
            (label, layout, list(zip([models[k] for k in meeting], each, parts)))
            for meeting in meetings
            for label, each in rows.items()
            for layout, parts in layouts(count).items()
        ]


class Session:
    """The measurements and the output of one run of the program."""

    def __init__(self, args):
        self.args, self.deadline = args, time.monotonic() + args.limit
        self.alone, self.workers = {}, {}
        self.results = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "driver": output(DRIVER_QUERY),
            "partitions": PARTITIONS,
            "sets": {name: SETS[name] for name in args.sets},
            "lower": args.lower,
            "processes": {},
            "unbounded": [],
            "cells": [],
            "complete": False,
        }

    def save(self):
        temporary = self.args.out + ".tmp"
        with open(temporary, "w") as file:
            json.dump(self.results, file, indent=1)
        os.replace(temporary, self.args.out)

    def start(self):
        """Starts all processes, and waits until their graphs are recorded."""
        began, models = time.monotonic(), [m for name in self.args.sets for m in SETS[name]]
        for model in models:
            self.workers[model] = Worker(model, self.args.rehearse, model in self.args.lower)
        deadline = began + min(START_TIMEOUT_S, 0.6 * self.args.limit)
        for model, worker in self.workers.items():
            facts = self.results["processes"][model] = worker.reply(deadline)
            if "error" in facts:
                worker.end()
                print(f"{model} failed to start: {facts['error']}", flush=True)
                continue
            worker.sms = dict(facts["sms"])
            for key in ("device", "torch", "cuda", "group_sms"):
                self.results.setdefault(key, facts.get(key))
        print(f"started in {time.monotonic() - began:.1f} s", flush=True)
        self.save()

    def prepare(self, name, models, method):
        """Makes these models of a set prepare executables for each partition that they need."""
        used = {model: set() for model in SETS[name]}
        for _, cells in phases(SETS[name]):
            for model, _, partition in itertools.chain.from_iterable(cell[2] for cell in cells):
                used[model].add(partition)
        workers = [self.workers[model] for model in models if self.workers[model].alive]
        for worker in workers:
            partitions = {p: PARTITIONS[p] for p in sorted(used[worker.model] - {"whole"})}
            worker.send({"partitions": partitions, "method": method})
        deadline = time.monotonic() + PREPARE_TIMEOUT_S
        for worker in workers:
            answer = worker.reply(deadline)
            worker.sms |= answer.get("sms", {})
            facts = self.results["processes"][worker.model]
            facts |= {"method": method, **answer, "sms": worker.sms}
            if answer.get("failures") or "error" in answer:
                print(f"{worker.model}, {method}: {str(answer)[:400]}", flush=True)

    def check_bounds(self, models):
        """Returns the models that a quarter of the GPU does not slow down by the factor BOUNDED."""
        unbounded = []
        for model in models:
            if not self.workers[model].alive:
                continue
            ends = [[(model, ROWS[-1], part)] for part in ("whole", "quarter0")]
            cells = [self.measure("", "", parts, 0.1) for parts in ends]
            whole, quarter = (cell["models"][0].get("ms", 0.0) for cell in cells)
            ratio = quarter / whole if whole else 0.0
            self.results["processes"][model]["quarter_to_whole"] = ratio
            print(f"{model}: {ratio:.2f} times as long on a quarter as on the whole", flush=True)
            if ratio < BOUNDED:
                unbounded.append(model)
        return unbounded

    def measure(self, label, layout, parts, seconds):
        """Measures one cell, in which the models in `parts` run at the same time."""
        known = [self.alone.get((model, rows, "whole"), 0.0) for model, rows, _ in parts]
        # A batch may take as long as the batches of all models together, or as long as it takes
        # alone on its partition. The measurement must have time for several such batches.
        scaled = [ms * 16 / len(PARTITIONS[part[2]]) for ms, part in zip(known, parts)]
        slowest = 1e-3 * max(sum(known), *scaled, 0.0)
        start = time.monotonic() + 0.003
        begin = start + max(self.args.run_in * (0.5 if len(parts) == 1 else 1.0), 1.5 * slowest)
        end = begin + max(seconds, 5 * slowest)
        cell = {"rows": label, "layout": layout, "models": []}
        workers = [self.workers[model] for model, _, _ in parts]
        if not all(worker.alive for worker in workers):
            dead = [{"model": model} for model, _, _ in parts]
            return cell | {"error": "a process has ended", "models": dead}
        for worker, (_, rows, partition) in zip(workers, parts):
            times = {"start": start, "begin": begin, "end": end}
            worker.send({"rows": rows, "partition": partition, **times})
        for worker, (model, rows, partition), alone in zip(workers, parts, known):
            answer = worker.reply(end + REPLY_TIMEOUT_S)
            one = {"model": model, "rows": rows, "partition": partition}
            one |= {"sms": worker.sms.get(partition), "groups": PARTITIONS[partition], **answer}
            if alone and "ms" in one:
                one |= {"alone_ms": alone, "slowdown": one["ms"] / alone}
            if "error" in one:
                cell["error"] = f"{model}: {one['error']}"
            cell["models"].append(one)
        return cell

    def measure_set(self, name, deadline):
        """Measures the cells of a set. Returns true if the time was sufficient for all cells."""
        models, method = SETS[name], self.args.method
        self.prepare(name, models, method)
        if unbounded := self.check_bounds(models):
            self.prepare(name, unbounded, "capture" if method == "move" else "move")
            self.results["unbounded"] += self.check_bounds(unbounded)
        for phase, cells in phases(models):
            began, failed, done = time.monotonic(), 0, 0
            for label, layout, parts in cells:
                if time.monotonic() > deadline:
                    print(f"{name}: out of time in phase {phase!r}", flush=True)
                    self.save()
                    return False
                if len(parts) == 5:
                    # If a model's process has ended, the remaining models are still measured.
                    parts = [part for part in parts if self.workers[part[0]].alive] or parts
                alone = phase == "alone"
                # All ratios depend on the times on the whole GPU, so these times are measured
                # longer.
                brief = alone and layout != "whole"
                seconds = self.args.seconds * (0.4 if brief else 1.0)
                cell = {"set": name, "phase": phase, **self.measure(label, layout, parts, seconds)}
                if alone and "ms" in cell["models"][0]:
                    self.alone[parts[0]] = cell["models"][0]["ms"]
                self.results["cells"].append(cell)
                done, failed = done + 1, failed + ("error" in cell)
            took = time.monotonic() - began
            print(f"{name}, {phase}: {done} cells in {took:.1f} s, {failed} failed", flush=True)
            self.save()
        return True

    def run(self, mps):
        self.start()
        alive = [worker for worker in self.workers.values() if worker.alive]
        if not alive:
            raise SystemExit("no process started\n" + (mps.logs() if mps else ""))
        if mps:
            servers = self.results["mps_servers"] = mps.ask("get_server_list")
            clients = [facts.get("mps") for facts in self.results["processes"].values()]
            if not servers and not any(clients):
                raise SystemExit("the processes don't use MPS\n" + mps.logs())
        complete = True
        for index, name in enumerate(self.args.sets):
            left = self.deadline - time.monotonic()
            share = time.monotonic() + left / (len(self.args.sets) - index)
            complete &= self.measure_set(name, share)
            # The green contexts of this set must be destroyed before the next set creates its own.
            self.stop([self.workers[model] for model in SETS[name]])
        self.results["complete"] = complete

    def stop(self, workers):
        for worker in workers:
            if worker.alive:
                worker.send(None)
        deadline = time.monotonic() + 8
        for worker in workers:
            worker.process.join(max(0.1, deadline - time.monotonic()))
            worker.end()


def output(command, text=None):
    """Returns the output of a command, or the error if the command failed."""
    options = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        run = subprocess.run(command, timeout=MPS_TIMEOUT_S, check=False, **options)
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)


def table(results):
    """Prints throughput and mean slowdown, relative to one model alone on the whole GPU."""
    labels = [*map(str, ROWS), "1+16"]
    found = collections.defaultdict(list)
    for cell in results["cells"]:
        slowdowns = [one.get("slowdown") for one in cell["models"]]
        if len(slowdowns) > 1 and all(slowdowns) and "error" not in cell:
            figures = sum(1 / s for s in slowdowns), sum(slowdowns) / len(slowdowns)
            found[cell["set"], len(slowdowns), cell["layout"], cell["rows"]].append(figures)
    print("\nthroughput (1 = one batch at a time on the whole GPU) and mean slowdown, by rows")
    print(f"{'':36}" + "".join(f"{label:>13}" for label in labels))
    for name, count in itertools.product(results["sets"], sorted(MEETINGS)):
        for layout in layouts(count):
            line = f"{name:8}{count:2}  {layout:24}"
            for label in labels:
                cells = found.get((name, count, layout, label))
                means = [sum(figure) / len(cells) for figure in zip(*cells)] if cells else None
                line += f"{means[0]:7.2f}{means[1]:6.1f}" if means else f"{'-':>13}"
            print(line)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the JSON file to write")
    parser.add_argument("--limit", type=float, default=240, help="seconds to end within")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=list(SETS))
    parser.add_argument("--lower", type=lambda text: text.split(","), default=[], metavar="MODELS",
                        help="models of a lower MPS client priority")
    parser.add_argument("--seconds", type=float, default=0.2, help="time measured per cell")
    parser.add_argument("--run-in", type=float, default=0.06, help="seconds before that")
    parser.add_argument("--method", choices=["move", "capture"], default="move")
    parser.add_argument("--rehearse", action="store_true", help="sleep in place of using a GPU")
    args = parser.parse_args()
    if unknown := set(args.sets) - set(SETS):
        parser.error(f"unknown sets: {', '.join(sorted(unknown))}")
    return args


def main():
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    session, mps = Session(args), None
    try:
        if not args.rehearse:
            mps = Mps()
            mps.start()
        session.run(mps)
    finally:
        session.stop(list(session.workers.values()))
        if mps:
            session.results["mps_logs"] = mps.logs()
            mps.stop()
        session.save()
        table(session.results)


if __name__ == "__main__":
    main()
