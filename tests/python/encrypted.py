#!/usr/bin/env python3
"""Tests TLS, tokens and client certificates with Triton's clients over both protocols.

Usage: encrypted.py SHADOWSLICE_BINARY [unittest arguments]
"""

import datetime
import hashlib
import http.client
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import trustme
from cryptography import x509
from tritonclient.utils import InferenceServerException

import models
from server import Server, free_port, wait_until

HOST = "localhost"
CI, GUEST, LATER = "token-of-ci", "token-of-a-guest", "a-token-that-comes-later"

SERVER = None


def hashed(token):
    return hashlib.sha256(token.encode()).hexdigest()


class Encrypted(Server):
    """A server that requires tokens on two TLS ports, and client certificates on two other TLS ports.

    The ports `tls` and `tls_grpc` require tokens. The port `plain` requires tokens too, but has no encryption.
    """

    def configuration(self, listed):
        self.ca, self.client_ca = trustme.CA(), trustme.CA()
        (self.tls, self.tls_grpc, self.mutual, self.mutual_grpc, self.plain, self.metrics) = (
            free_port() for _ in range(6))
        self.root = self.folder / "root.pem"
        self.ca.cert_pem.write_to_path(str(self.root))
        self.client_ca.cert_pem.write_to_path(str(self.folder / "clients.pem"))
        self.issue()
        self.tokens(f"ci {hashed(CI)}", f"guest {hashed(GUEST)}")
        tls = "certificate: server.pem, key: server.key"
        token = f"tls: {{{tls}}}, tokens: tokens"
        certificate = f"tls: {{{tls}, client_ca: clients.pem}}"

        def listener(port, more):
            return f'{{address: "127.0.0.1:{port}", {more}}}'

        text = super().configuration(listed)
        for protocol, port, ports in [("http", self.http_port, (self.tls, self.mutual)),
                                      ("grpc", self.grpc_port, (self.tls_grpc, self.mutual_grpc))]:
            more = [listener(ports[0], token), listener(ports[1], certificate)]
            more += [listener(self.plain, "tokens: tokens")] if protocol == "http" else []
            text = text.replace(f'"127.0.0.1:{port}"', f'"127.0.0.1:{port}", {", ".join(more)}')
        return text.replace("metrics: []", f"metrics: [{listener(self.metrics, token)}]")

    def issue(self):
        """Issues a certificate for the server. Replaces the file of the key, and then the file of the certificate."""
        issued = self.ca.issue_cert(HOST)
        replace(self.folder / "server.key", issued.private_key_pem.bytes())
        replace(self.folder / "server.pem", b"".join(part.bytes() for part in issued.cert_chain_pems))

    def tokens(self, *lines):
        replace(self.folder / "tokens", "\n".join(["# clients", *lines, ""]).encode())

    def certificate_of_a_client(self, name, ca=None):
        """Returns the paths of the certificate and the key of a client."""
        issued = (ca or self.client_ca).issue_cert(name)
        paths = [self.folder / f"{name}.pem", self.folder / f"{name}.key"]
        issued.private_key_pem.write_to_path(str(paths[1]))
        paths[0].write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return [str(path) for path in paths]


def replace(path, content):
    (path.parent / "new").write_bytes(content)
    os.replace(path.parent / "new", path)


def setUpModule():
    global SERVER
    SERVER = Encrypted(sys.argv[0], models.make, "model_control: {clients: [ci, deployer.example]}")


def tearDownModule():
    SERVER.stop()


def bearer(token):
    return {"authorization": f"Bearer {token}"} if token else {}


def context(client=None):
    made = ssl.create_default_context(cafile=str(SERVER.root))
    if client:
        made.load_cert_chain(*client)
    return made


def status(url, token=None, client=None):
    """Returns the HTTP status of a GET request."""
    request = urllib.request.Request(url, headers=bearer(token))
    try:
        with urllib.request.urlopen(request, timeout=30, context=context(client)) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


class Dates(unittest.TestCase):
    def check(self, before, after):
        """Returns the notes of `check` and the log of `serve`. The certificate is valid from `before` to `after` days from now."""
        folder = Path(tempfile.mkdtemp(prefix="ss-", dir="/tmp"))
        self.addCleanup(shutil.rmtree, folder)
        now = datetime.datetime.now(datetime.timezone.utc)
        dates = {"not_before": now + datetime.timedelta(days=before), "not_after": now + datetime.timedelta(days=after)}
        issued = trustme.CA().issue_cert(HOST, **dates)
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        tls = "tls: {certificate: server.pem, key: server.pem}"
        (folder / "config.yaml").write_text(
            f'run_dir: {folder}/run\ngpus: [{{device: emulated}}]\nmodels: []\nlisten:\n'
            f'  http: [{{address: "127.0.0.1:{free_port()}", {tls}}}]\n'
            f'  grpc: [{{address: "127.0.0.1:{free_port()}", {tls}}}]\n  metrics: []\n')
        checked = subprocess.run([SERVER.binary, "check", folder / "config.yaml"], text=True, capture_output=True, timeout=30)
        self.assertEqual(checked.returncode, 0, checked.stderr)
        with open(folder / "log", "w+") as log:
            served = subprocess.Popen([SERVER.binary, "serve", folder / "config.yaml"], stderr=log)
            try:
                wait_until(lambda: (folder / "run/control.sock").exists() or served.poll() is not None)
            finally:
                served.terminate()
                served.wait(30)
            return checked.stderr.splitlines(), (folder / "log").read_text()

    def test_invalid_certificates_are_reported(self):
        for before, after, said in [(-30, -3, "expired 3 days ago, and clients refuse it"), (2.5, 9, "becomes valid in 2 days"),
                                    (-3, 2.5, "expires in 2 days")]:
            with self.subTest(said):
                notes, log = self.check(before, after)
                self.assertEqual([said in note for note in notes], [True], notes)
                self.assertIn("server.pem " + said, log)
        notes, log = self.check(-30, 30)
        self.assertEqual(notes, [])
        self.assertNotIn("expire", log)


class OverHttp(unittest.TestCase):
    module = httpclient

    def client(self, port, token=None, certificate=None):
        made = httpclient.InferenceServerClient(f"{HOST}:{port}", ssl=True,
                                                ssl_context_factory=lambda: context(certificate))
        self.addCleanup(made.close)
        return made, bearer(token)

    def ports(self):
        return SERVER.tls, SERVER.mutual

    def refused_as(self):
        return "401", "403"

    def infer(self, client, headers):
        (name, (datatype, array)), = models.dynamic_input(2, 5).items()
        tensor = self.module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        return client.infer("dynamic", [tensor], headers=headers)

    def assert_refused(self, code, call, *arguments, **more):
        with self.assertRaises(InferenceServerException) as caught:
            call(*arguments, **more)
        self.assertIn(code, str(caught.exception.status()))

    def test_a_token_lets_its_client_in_and_nothing_else_does(self):
        unknown, forbidden = self.refused_as()
        for token in [None, "guess", "", CI + "x"]:
            client, headers = self.client(self.ports()[0], token)
            self.assertTrue(client.is_server_live(headers=headers), "probes have no tokens")
            self.assert_refused(unknown, self.infer, client, headers)
            self.assert_refused(unknown, client.get_model_metadata, "dynamic", headers=headers)
        client, headers = self.client(self.ports()[0], GUEST)
        self.infer(client, headers)
        self.assert_refused(forbidden, client.unload_model, "unbatched", headers=headers)
        client, headers = self.client(self.ports()[0], CI)
        client.load_model("unbatched", headers=headers)
        wanted = ('action="load"', 'client="ci"', 'outcome="done"')
        # The server may write the log after its response.
        wait_until(lambda: any(all(each in line for each in wanted) for line in SERVER.log_tail().splitlines()))

    def test_a_certificate_lets_its_client_in_and_names_it(self):
        certificate = SERVER.certificate_of_a_client("deployer.example")
        client, headers = self.client(self.ports()[1], certificate=certificate)
        self.infer(client, headers)
        client.load_model("unbatched", headers=headers)
        other = SERVER.certificate_of_a_client("other.example")
        client, headers = self.client(self.ports()[1], certificate=other)
        self.infer(client, headers)
        self.assert_refused(self.refused_as()[1], client.load_model, "unbatched", headers=headers)

    def test_without_a_certificate_of_the_right_root_there_is_no_connection(self):
        stranger = SERVER.certificate_of_a_client("stranger.example", trustme.CA())
        for certificate in [None, stranger]:
            client, headers = self.client(self.ports()[1], certificate=certificate)
            with self.assertRaises(Exception):
                self.infer(client, headers)


class OverGrpc(OverHttp):
    module = grpcclient

    def client(self, port, token=None, certificate=None):
        files = {"root_certificates": str(SERVER.root)}
        if certificate:
            files |= {"certificate_chain": certificate[0], "private_key": certificate[1]}
        made = grpcclient.InferenceServerClient(f"{HOST}:{port}", ssl=True, **files)
        self.addCleanup(made.close)
        return made, bearer(token)

    def ports(self):
        return SERVER.tls_grpc, SERVER.mutual_grpc

    def refused_as(self):
        return "UNAUTHENTICATED", "PERMISSION_DENIED"


class Others(unittest.TestCase):
    def test_a_token_is_asked_for_without_encryption_and_for_metrics(self):
        index = f"http://{HOST}:{SERVER.plain}/v2"
        self.assertEqual([status(index), status(index, CI)], [401, 200])
        self.assertEqual(status(f"{index}/health/ready"), 200)
        metrics = f"https://{HOST}:{SERVER.metrics}/metrics"
        self.assertEqual([status(metrics), status(metrics, GUEST)], [401, 200])

    def test_metrics_tell_when_each_certificate_expires(self):
        request = urllib.request.Request(f"https://{HOST}:{SERVER.metrics}/metrics", headers=bearer(GUEST))
        with urllib.request.urlopen(request, timeout=30, context=context()) as answer:
            text = answer.read().decode()
        name = "shadowslice_certificate_expiry_timestamp_seconds"
        told = re.findall(rf'^{name}{{file="([^"]+)",kind="(\w+)"}} (\d+)$', text, re.MULTILINE)
        expiry = {file: x509.load_pem_x509_certificate((SERVER.folder / file).read_bytes()).not_valid_after_utc.timestamp()
                  for file in ["server.pem", "clients.pem"]}
        self.assertEqual(sorted(told), sorted(
            (str(SERVER.folder / file), kind, str(int(expiry[file])))
            for file, kind in [("server.pem", "certificate"), ("clients.pem", "client_ca")]))

    def test_a_refusal_says_what_is_wanted(self):
        connection = http.client.HTTPSConnection(HOST, SERVER.tls, timeout=30, context=context())
        self.addCleanup(connection.close)
        connection.request("GET", "/v2")
        answer = connection.getresponse()
        self.assertEqual((answer.status, answer.headers["www-authenticate"]), (401, "Bearer"))
        self.assertIn(b"Authorization: Bearer TOKEN", answer.read())

    def test_what_is_no_tls_harms_nobody(self):
        silent = [socket.create_connection((HOST, SERVER.tls)) for _ in range(50)]
        for each, said in zip(silent, [b"", b"GET /v2 HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\0" * 999] * 13):
            each.sendall(said)
        begun = time.monotonic()
        self.assertEqual(status(f"https://{HOST}:{SERVER.tls}/v2", CI), 200)
        self.assertLess(time.monotonic() - begun, 5, "others wait for no handshake")
        for each in silent:
            each.settimeout(30)
            try:
                while each.recv(4096):
                    pass
            except ConnectionError:
                pass
            each.close()

    def test_files_that_change_are_read_again(self):
        def certificate():
            with socket.create_connection((HOST, SERVER.tls)) as plain:
                with context().wrap_socket(plain, server_hostname=HOST) as stream:
                    return stream.getpeercert(True)

        before = certificate()
        SERVER.issue()
        wait_until(lambda: certificate() != before)
        url = f"https://{HOST}:{SERVER.tls}/v2"
        SERVER.tokens(f"ci {hashed(CI)}", f"guest {hashed(GUEST)}", f"late {hashed(LATER)}")
        wait_until(lambda: status(url, LATER) == 200)
        SERVER.tokens("late no hash")
        wait_until(lambda: "cannot use a TLS or token file" in SERVER.log_tail())
        self.assertEqual(status(url, LATER), 200, "what was read last stands")
        SERVER.tokens(f"ci {hashed(CI)}", f"guest {hashed(GUEST)}")
        wait_until(lambda: status(url, LATER) == 401)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv.pop(0)
    unittest.main(argv=sys.argv)
