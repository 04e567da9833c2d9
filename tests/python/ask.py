#!/usr/bin/env python3
"""Sends requests to a model at random times, as a Python service would. Uses asyncio and HTTP with binary tensors.

Usage: ask.py SOCKET MODEL REQUESTS_PER_S SECONDS SEED

Needs only Python. Prints a JSON object with three lists of pairs. The first value of each pair is the time at which the
request was due, in microseconds since the start. The second value depends on the list:

* `answered`: the time from the due time to the response, in microseconds
* `failed`: the status of the response
* `sent_late`: the time from the due time to the sending of the request, in microseconds
"""

import asyncio
import json
import random
import struct
import sys

ROW = {"FP32": ("f", lambda r: r.uniform(-1, 1)), "INT64": ("q", lambda r: r.randrange(1, 1000)),
       "INT32": ("i", lambda r: r.randrange(1, 1000))}
VARIANTS = 4
HEAD = "POST /v2/models/{}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n" \
       "Inference-Header-Content-Length: {}\r\nContent-Length: {}\r\n\r\n"
IDLE_AT_MOST = 64


def us(seconds):
    return round(seconds * 1e6)


class Server:
    def __init__(self, path):
        self.path, self.idle = path, []

    async def send(self, request):
        """Returns the status and body of the response."""
        reader, writer = self.idle.pop() if self.idle else await asyncio.open_unix_connection(self.path, limit=2**20)
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
        body = await reader.readexactly(length)
        if len(self.idle) < IDLE_AT_MOST and "connection: close" not in head:
            self.idle.append((reader, writer))
        else:
            writer.close()
        return int(head.split(" ", 2)[1]), body


def request(model, inputs, seed):
    draw = random.Random(seed)
    data, described = b"", []
    for tensor in inputs:
        shape = [1] + [max(size, 1) for size in tensor["shape"][1:]]
        count = 1
        for size in shape:
            count *= size
        code, value = ROW[tensor["datatype"]]
        packed = struct.pack(f"<{count}{code}", *(value(draw) for _ in range(count)))
        described.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape,
                          "parameters": {"binary_data_size": len(packed)}})
        data += packed
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    return HEAD.format(model, len(header), len(header) + len(data)).encode() + header + data


async def main(path, model, rate, seconds, seed):
    server, loop, draw = Server(path), asyncio.get_running_loop(), random.Random(seed)
    status, body = await server.send(f"GET /v2/models/{model} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert status == 200, (status, body)
    requests = [request(model, json.loads(body)["inputs"], n) for n in range(VARIANTS)]
    answered, failed, sent_late = [], [], []

    async def ask(n, due):
        try:
            status, _ = await server.send(requests[n % VARIANTS])
        except (OSError, asyncio.IncompleteReadError) as error:
            status = type(error).__name__
        if status == 200:
            answered.append((us(due - begun), us(loop.time() - due)))
        else:
            failed.append((us(due - begun), str(status)))

    begun, due, under_way = loop.time(), 0.0, set()
    while (due := due + draw.expovariate(rate)) < seconds:
        if (wait := begun + due - loop.time()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(ask(len(sent_late), begun + due))
        sent_late.append((us(due), us(max(0.0, loop.time() - begun - due))))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.wait_for(asyncio.gather(*under_way), 30)
    print(json.dumps({"answered": answered, "failed": failed, "sent_late": sent_late}))


asyncio.run(main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:5]), int(sys.argv[5])))
