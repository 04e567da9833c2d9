"""Measures how fast batches run on a part of the GPU, depending on where they were recorded.

Run it on a host with one idle H100 or H200 and the packages that `meetings.py` needs:

    python3 benches/gpu/recordings.py --out recordings.json

A batch is recorded on the whole GPU and moved to the part ("moved"), recorded on the part itself
("own"), or recorded on a small part and moved ("small"). The comparison shows whether cuBLAS
and cuDNN choose other kernels for the SMs of a part.
"""

import argparse
import json
import statistics

import meetings

MODELS = ["resnet50", "vgg19", "bert", "vit_b16", "vit_b16_fp16", "convnext_tiny", "efficientnet_b0"]
PARTS = {"eighth": range(2), "quarter": range(4), "third": range(5), "half": range(8)}
# The part of the GPU on which the variant "small" is recorded.
SMALL = "quarter"
ROUNDS, WARM = 15, 3
# The GPU's name and the version of PyTorch, which are known once a model is loaded.
FACTS = {}


def milliseconds(engine, executable):
    """Returns the median time of one batch, in ms."""
    torch, driver = engine.torch, engine.driver
    stream = driver.CUstream(engine.stream.cuda_stream)
    times = []
    for _ in range(WARM + ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(engine.stream)
        meetings.checked(driver.cuGraphLaunch(executable, stream))
        end.record(engine.stream)
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[WARM:])


def attempt(measure):
    """Returns the time that `measure` returns, or the reason why `measure` failed."""
    try:
        return round(measure(), 3)
    except Exception as error:
        return str(error)


def figures(model):
    """Returns the times of the model's batches, by rows and part."""
    engine = meetings.Engine(model)
    FACTS.update({name: engine.facts()[name] for name in ("device", "torch")})
    greens = {part: engine.green(groups)[0] for part, groups in PARTS.items()}
    places = {part: engine.recorder(green) for part, green in greens.items()}
    streams = {part: stream_of(engine, green) for part, green in greens.items()}
    contexts = {
        part: meetings.checked(engine.driver.cuCtxFromGreenCtx(green))
        for part, green in greens.items()
    }
    found = []
    for rows in meetings.ROWS:
        whole = milliseconds(engine, engine.executables[rows, "whole"])
        row = {"model": model, "rows": rows, "whole": round(whole, 3), "parts": {}}
        small = engine.record(rows, streams[SMALL])
        for part in PARTS:
            moved = lambda: engine.instantiate(engine.move(engine.graphs[rows], contexts[part]))
            shrunk = lambda: engine.instantiate(engine.move(small, contexts[part]))
            row["parts"][part] = {
                "moved": attempt(lambda: milliseconds(engine, moved())),
                "own": attempt(lambda: milliseconds(engine, places[part](rows))),
                "small": attempt(lambda: milliseconds(engine, shrunk())),
            }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def stream_of(engine, green):
    made = engine.driver.cuGreenCtxStreamCreate(green, meetings.NON_BLOCKING, 0)
    return engine.torch.cuda.ExternalStream(int(meetings.checked(made)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", nargs="*", default=MODELS)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        try:
            rows += figures(model)
        except Exception as error:
            print(f"{model}: {error!r}", flush=True)
        with open(arguments.out, "w") as file:
            json.dump({**FACTS, "unit": "ms", "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
