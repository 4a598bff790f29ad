"""Real trainers that start at once: forked from a process that has imported what they need, in accelerate's place.

`serve` is that process. Where `SITE` is on PYTHONPATH, accelerate's launcher asks it for a rank, which goes into the
launcher's namespaces and has its environment, also for whoever looks at it from outside.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import yaml

SITE = """
import sys
if "accelerate.commands.launch" in sys.orig_argv:
    from tests.distributed.forked_ranks import launch
    launch(sys.orig_argv[3:])
"""
SOCKET = "YCORE_FORKED_RANKS"
ROOM = {"PADDING": "." * 60_000}
"""A part of the server's environment in which a rank's takes its place."""
_NAMESPACES = ("net", "uts", "mnt")
_IMPORTS = (
    "ycore.trainer.rollout_run",
    "ycore.round.assemble",
    "ycore.trl.build",
    "accelerate.commands.launch",
    "trl.trainer.grpo_trainer",
    "ycore.engine.vllm_engine",
    "ycore.engine.weights",
    "torch.distributed.run",
    "peft",
    "httpx",
)


def launch(words: list[str]) -> None:
    """`accelerate launch WORDS` with one rank on this machine; ends this process as the rank ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        request = [os.getpid(), os.getcwd(), dict(os.environ), words]
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [1, 2])
        with server.makefile("r") as answers:
            code = int(answers.readline() or 1)
    os._exit(int(code != 0))


def serve(path: str) -> None:
    for name in _IMPORTS:
        importlib.import_module(name)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    server.settimeout(0.02)
    waiting: dict[int, socket.socket] = {}
    while True:
        with suppress(TimeoutError):
            link, _ = server.accept()
            link.settimeout(10)
            data, files, _, _ = socket.recv_fds(link, 2**20, 2)
            while not data.endswith(b"\n"):
                data += link.recv(2**20)
            if (pid := os.fork()) == 0:
                server.close()
                link.close()
                become_rank(*json.loads(data), files)
                return
            for file in files:
                os.close(file)
            waiting[pid] = link
        for pid in list(waiting):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with suppress(OSError):  # a launcher that was killed
                    waiting[pid].sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                waiting.pop(pid).close()


def become_rank(
    launcher: int, cwd: str, environment: dict[str, str], words: list[str], files: list[int]
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for name in _NAMESPACES:
        space = os.open(f"/proc/{launcher}/ns/{name}", os.O_RDONLY)
        assert libc.setns(space, 0) == 0, os.strerror(ctypes.get_errno())
        os.close(space)
    os.setsid()
    os.chdir(cwd)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    os.environ.clear()
    os.environ.update(environment)
    arguments = accelerate_launch.launch_command_parser().parse_args(words)
    arguments, _, _ = accelerate_launch._validate_launch_command(arguments)
    settings = yaml.safe_load(Path(words[1]).read_text())
    of_rank = {
        **prepare_multi_gpu_env(arguments),
        "RANK": str(settings["machine_rank"]),
        "WORLD_SIZE": str(settings["num_processes"]),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": str(settings["main_process_ip"]),
        "MASTER_PORT": str(settings["main_process_port"]),
    }
    os.environ.clear()
    os.environ.update(of_rank)
    show_environment(of_rank)
    module, root = words[-2:]
    sys.argv = [module, root]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def show_environment(environment: dict[str, str]) -> None:
    """Write the variables where the kernel reads a process's environment."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    block = b"".join(f"{name}={value}".encode() + b"\0" for name, value in environment.items())
    assert len(block) < end - begin
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    serve(sys.argv[1])
