#!/usr/bin/env python3
"""Tests the page on the metrics' address in a headless Chromium.

Usage: page.py SHADOWSLICE_BINARY CHROMIUM [unittest arguments]

If you set the variable PICTURES to a folder, the script saves screenshots there.
"""

import hashlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient
from onnx import TensorProto
from playwright.sync_api import expect, sync_playwright
from tritonclient.utils import InferenceServerException

import models
from server import Server, free_port

TOKEN = "correct-horse-battery-staple-0123456789"
TIMEOUT = 30_000  # ms
BINARY, CHROMIUM = "", ""


def make(folder):
    models.identity(folder, "busy", [("x", "y", TensorProto.FLOAT)])
    models.identity(folder, "quiet", [("x", "y", TensorProto.FLOAT)])
    return {"busy": "batch: {max: 8}", "quiet": "batch: {max: 8}"}


def make_with_one_in_trouble(folder):
    (folder / "broken.onnx").write_text("not a model")
    return make(folder) | {"broken": "batch: {max: 8}"}


class Load:
    """A load of about 50 requests/s on a model. `failed` counts the failed requests."""

    def __init__(self, port, model):
        self.client, self.model, self.failed, self.going = httpclient.InferenceServerClient(f"localhost:{port}"), model, 0, True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        tensor = httpclient.InferInput("x", [1, 3], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
        while self.going:
            try:
                self.client.infer(self.model, [tensor])
            except InferenceServerException:
                self.failed += 1
            time.sleep(0.02)
        self.client.close()

    def stop(self):
        self.going = False
        self.thread.join()


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.playwright = sync_playwright().start()
        folder = os.path.dirname(os.path.abspath(CHROMIUM))
        libraries = {"LD_LIBRARY_PATH": f"{folder}/lib", "FONTCONFIG_PATH": folder, "HOME": os.environ.get("HOME", "/")}
        cls.browser = cls.playwright.chromium.launch(
            executable_path=CHROMIUM, env=libraries,
            args=["--no-sandbox"])

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()

    def serve(self, tokens="", make=make):
        self.metrics_port = free_port()
        address = f'{{address: "127.0.0.1:{self.metrics_port}"{tokens}}}'
        server = Server(BINARY, make, metrics=f"[{address}]")
        return server

    def open(self):
        """Opens the page. Collects the URLs that the page requests and the errors of the page."""
        page = self.browser.new_page(viewport={"width": 1280, "height": 900})
        self.addCleanup(page.close)
        page.set_default_timeout(TIMEOUT)
        expect.set_options(timeout=TIMEOUT)
        self.requested, self.errors = [], []
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.goto(f"http://127.0.0.1:{self.metrics_port}/")
        return page

    def row(self, page, model):
        return page.locator("#models tbody tr").filter(has_text=model)

    def picture(self, page, name):
        if folder := os.environ.get("PICTURES"):
            page.screenshot(path=Path(folder, name), full_page=True)

    def test_models_and_what_happens_to_them_are_shown_live(self):
        server = self.serve()
        self.addCleanup(server.stop)
        page = self.open()
        expect(page.locator("#link")).to_have_text("live")
        expect(self.row(page, "busy").locator("td").nth(5)).to_have_text("idle")
        load = Load(server.http_port, "busy")
        self.addCleanup(load.stop)
        expect(self.row(page, "busy").locator("td").nth(5)).not_to_have_text("idle")
        expect(self.row(page, "busy").locator("td").nth(9)).to_have_text("100%")
        expect(self.row(page, "quiet").locator("td").nth(5)).to_have_text("idle")
        server.command("resize", "quiet", "25%")
        expect(self.row(page, "quiet").locator("td").nth(2)).to_have_text("25% held")
        marks = page.locator("#marks")
        expect(marks).to_contain_text("100% -> 25% (32 SMs), completed; by hand")
        os.kill(server.worker("busy"), signal.SIGKILL)
        expect(marks).to_contain_text("a worker died: ")
        self.sms_are_divided(page)
        self.picture(page, "page.png")
        self.assertEqual(self.errors, [])
        own = f"http://127.0.0.1:{self.metrics_port}/"
        self.assertEqual({url for url in self.requested if not url.startswith((own, "data:"))}, set(), "it works offline")

    def sms_are_divided(self, page):
        """Checks the chart's newest colours. The first model has all 132 SMs except half of the 32 shared SMs."""
        page.get_by_role("button", name="5 min", exact=True).click()
        page.wait_for_function("""(wanted) => {
            const canvas = document.querySelector("#gpu-0 canvas");
            const pixels = canvas.getContext("2d").getImageData(canvas.width - 4, 0, 1, canvas.height).data;
            const rows = [...document.querySelectorAll("#models tbody tr")];
            const swatches = rows.map((row) => getComputedStyle(row.querySelector(".swatch")).backgroundColor);
            const colours = swatches.map((swatch) => swatch.match(/\\d+/g).map(Number));
            const counts = colours.map(() => 0);
            for (let at = 0; at < pixels.length; at += 4) {
                const far = colours.map((own) => Math.hypot(...own.map((part, place) => part - pixels[at + place])));
                const near = far.indexOf(Math.min(...far));
                if (far[near] < 60 && pixels[at + 3] > 150) counts[near] += 1;
            }
            return Math.abs(counts[0] / (counts[0] + counts[1]) - wanted) < 0.03;
        }""", arg=(132 - 32 / 2) / 132)

    def test_a_chart_tells_the_figures_under_the_pointer(self):
        server = self.serve()
        self.addCleanup(server.stop)
        load = Load(server.http_port, "busy")
        self.addCleanup(load.stop)
        page = self.open()
        expect(self.row(page, "busy").locator("td").nth(5)).not_to_have_text("idle")
        server.command("hold", "busy")
        page.locator("#chart-busy canvas").first.hover(position={"x": 500, "y": 60})
        expect(page.locator("#tip")).to_contain_text("p99")
        page.mouse.move(2, 2)
        expect(page.locator("#tip")).to_be_hidden()
        page.get_by_role("button", name="1 h").click()
        expect(page.get_by_role("button", name="1 h")).to_have_attribute("aria-pressed", "true")
        self.assertEqual(self.errors, [])

    def test_models_are_filtered_and_those_in_trouble_come_first(self):
        server = self.serve(make=make_with_one_in_trouble)
        self.addCleanup(server.stop)
        page = self.open()
        names = page.locator("#models tbody td:first-child")
        expect(names).to_have_text(["broken", "busy", "quiet"])
        page.locator("#filter").fill("QUI")
        for _ in range(2):
            expect(names).to_have_text(["quiet"])
            expect(page.locator("#charts .card")).to_have_count(1)
            self.assertTrue(page.url.endswith("/#models=QUI"), page.url)
            page.reload()
        expect(page.locator("#filter")).to_have_value("QUI")
        page.locator("#filter").fill("")
        expect(names).to_have_count(3)
        expect(page.locator("#charts .card")).to_have_count(3)
        self.assertTrue(page.url.endswith("/"), page.url)
        self.assertEqual(self.errors, [])

    def test_a_narrow_screen_has_every_column(self):
        server = self.serve()
        self.addCleanup(server.stop)
        page = self.open()
        page.set_viewport_size({"width": 390, "height": 800})
        expect(self.row(page, "busy")).to_be_visible()
        table = page.locator(".wide")
        table.evaluate("(table) => table.scrollTo(table.scrollWidth, 0)")
        right = lambda cell: cell.evaluate("(cell) => cell.getBoundingClientRect().right")
        for cell in (page.locator("#models th").last, page.locator("#models th").first):
            expect(cell).to_be_visible()
            self.assertTrue(0 < right(cell) <= 390, right(cell))
        self.assertEqual(page.evaluate("document.documentElement.scrollWidth"), 390, "only the table scrolls")
        self.picture(page, "narrow.png")

    def test_a_page_too_many_says_so_and_is_live_once_there_is_room(self):
        server = self.serve()
        self.addCleanup(server.stop)
        others, answer = [], b" 200 "
        while b" 200 " in answer:
            others.append(socket.create_connection(("127.0.0.1", self.metrics_port), 30))
            others[-1].sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            answer = others[-1].recv(4096)
        self.assertIn(b" 503 ", answer)
        page = self.open()
        expect(page.locator("#link")).to_contain_text("too many pages are open")
        for other in others:
            other.close()
        expect(page.locator("#link")).to_have_text("live")

    def test_a_page_outlives_its_supervisor_and_keeps_what_it_saw(self):
        server = self.serve()
        page = self.open()
        expect(self.row(page, "busy")).to_be_visible()
        server.command("resize", "busy", "50%")
        expect(page.locator("#marks")).to_contain_text("-> 50%")
        pid = int(server.command("upgrade").split()[1])
        expect(page.locator("#link")).to_have_text("live")
        server.command("resize", "busy", "75%")
        expect(page.locator("#marks")).to_contain_text("-> 75%")
        expect(page.locator("#marks")).to_contain_text(f"supervisor {pid}, version")
        expect(page.locator("#marks")).to_contain_text("-> 50%")
        os.kill(pid, signal.SIGTERM)
        expect(page.locator("#link")).to_contain_text("no connection since")
        server.process.wait(60)

    def test_where_a_token_is_asked_for_the_page_asks_for_it(self):
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        tokens = folder / "tokens"
        tokens.write_text(f"operator {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
        server = self.serve(f', tokens: "{tokens}"')
        self.addCleanup(server.stop)
        page = self.open()
        expect(page.locator("#ask")).to_be_visible()
        expect(page.locator("main")).to_be_hidden()
        page.locator("#token").fill("a wrong one")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#link")).to_have_text("the supervisor rejected this token")
        expect(page.locator("#ask")).to_be_visible()
        page.locator("#token").fill(TOKEN)
        page.get_by_role("button", name="Show").click()
        expect(self.row(page, "busy")).to_be_visible()
        expect(page.locator("#ask")).to_be_hidden()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    BINARY, CHROMIUM = sys.argv[1:3]
    del sys.argv[1:3]
    unittest.main()
