"""The catalogue: escapes and abuses, each a few lines of Python that are run without a sandbox and within it.

The code of a probe is the body of a function of `t`, which names what it goes for (`targets.Targets`). It returns
something true where it got through, or "check" where only its effect shows that: `targets.Targets.harmed` looks for it.
"""

import textwrap
from typing import NamedTuple

PRELUDE = '''
import ctypes, errno, fcntl, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def call(number, *arguments):
    """A system call by its number on x86-64; its result, or OSError."""
    done = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done


def reads(path):
    with open(path, "rb") as file:
        return b"canary" in file.read(1 << 20)


def in_child(work):
    """Do it in a child process; true where it returned something true there."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def hold(size, make):
    """Make pieces of 16 MiB until `size` is held, and keep it for a moment; a watch has 0.3 s to see it."""
    held = [make(16 << 20) for _ in range(size >> 24)]
    time.sleep(0.3)
    return len(held) == size >> 24


def touched(memory, size):
    for at in range(0, size, 4096):
        memory[at] = 1
    return memory
'''


RIGHTS = ("root", "user", "root in a container", "user in a container")


class Probe(NamedTuple):
    """One attempt.

    `control`: who gets through without a sandbox: "any", "root", "host" (no container holds it) or "host root".
    `optional`: kernels differ, so that the control may fail. `known`: levels that do not hold it, as documented.
    """

    name: str
    kind: str
    code: str
    control: str = "any"
    optional: bool = False
    known: tuple[str, ...] = ()

    def must_get_through(self, rights: str) -> bool:
        """Whether it has to succeed without a sandbox, or its being stopped would prove nothing."""
        is_root, is_host = rights.startswith("root"), "container" not in rights
        fits = {"any": True, "root": is_root, "host": is_host, "host root": is_root and is_host}
        return fits[self.control] and not self.optional


def probe(name: str, kind: str, code: str, **more) -> Probe:
    return Probe(name, kind, textwrap.dedent(code).strip(), **more)


FILES = [
    probe("read a file of the user", "files", "return reads(t.secret)"),
    probe("read .env in the working folder", "files", "return reads(t.project + '/.env')"),
    probe("read a token in a dot folder of the home", "files", "return reads(t.home + '/.cache/huggingface/token')"),
    probe("read a key in .ssh", "files", "return reads(t.home + '/.ssh/id_ed25519')"),
    probe("read .git/config with a password", "files", "return reads(t.project + '/.git/config')"),
    probe("read the run's journal", "files", "return reads(t.run + '/journal/round-000001.json')"),
    probe("read the run's log", "files", "return reads(t.run + '/logs/trainer.log')"),
    probe("list the run folder", "files", "return 'journal' in os.listdir(t.run)", known=("landlock",)),
    probe("read the judge's prompt in the run folder", "files", "return reads(t.run + '/run.json')"),
    probe("read the validation set", "files", "return reads(t.home + '/data/test.jsonl')"),
    probe("read /etc/passwd", "files", "return b'root:' in open('/etc/passwd', 'rb').read()"),
    probe("learn that a file exists", "files", "return os.path.exists(t.secret)", known=("landlock",)),
    probe("write a file of the user", "files", "open(t.writable, 'w').write('x'); return True"),
    probe("append to .bashrc", "files", "open(t.home + '/.bashrc', 'a').write('evil'); return True"),
    probe("truncate a file by open", "files", "os.open(t.truncate_open, os.O_RDONLY | os.O_TRUNC); return True"),
    probe("truncate a file by name", "files", "os.truncate(t.truncate_name, 0); return True"),
    probe("truncate the run's log by name", "files", "os.truncate(t.run + '/logs/trainer.log', 0); return True"),
    probe("delete a file of the user", "files", "os.unlink(t.unlinkable); return True"),
    probe("rename a folder of the user", "files", "os.rename(t.renamable, t.renamable + '-gone'); return True"),
    probe("make a file in the working folder", "files", "open(t.project + '/planted.py', 'w').close(); return True"),
    probe("make a file in the run folder", "files", "open(t.run + '/planted', 'w').close(); return True"),
    probe("hard link to a file, and write through it", "files", """
        os.link(t.linkable, 'hard')
        open('hard', 'w').write('x')
        return True
    """),
    probe("symbolic link to a file, and read through it", "files", """
        name = f"soft{os.getpid()}"
        os.symlink(t.secret, name)
        try:
            return reads(name)
        finally:
            os.unlink(name)
    """),
    probe("swap a folder for a link while reading (race)", "files", """
        os.makedirs("race", exist_ok=True)
        open("race/secret.txt", "w").close()
        os.rename("race", "aside")
        os.symlink(os.path.dirname(t.secret), "race")
        try:
            return reads("race/secret.txt")
        finally:
            os.unlink("race")
    """),
    probe("/proc/self/root and cwd as ways around", "files", "return reads('/proc/self/root' + t.secret)"),
    probe("climb out by ..", "files", "return reads('../' * 30 + t.secret.lstrip('/'))"),
    probe("climb out by an inherited folder descriptor", "files", """
        for number in range(256):
            try:
                found = os.open("../" * 30 + t.secret.lstrip("/"), os.O_RDONLY, dir_fd=number)
                return b"canary" in os.read(found, 100)
            except OSError:
                pass
        return reads(t.secret)
    """),
    probe("open a file by handle", "files", """
        handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
        mount = ctypes.c_int()
        if libc.name_to_handle_at(-100, t.secret.encode(), handle, ctypes.byref(mount), 0):
            return False
        folder = os.open(t.home, os.O_RDONLY)
        found = libc.open_by_handle_at(folder, handle, os.O_RDONLY)
        return found >= 0 and b"canary" in os.read(found, 100)
    """, control="host root", optional=True),
    probe("change the mode of a file", "files", "os.chmod(t.changed, 0o600); return 'check'"),
    probe("change the owner of a file", "files", "os.chown(t.changed, 12345, -1); return 'check'", control="root"),
    probe("change the times of a file", "files", "os.utime(t.changed, (1, 1)); return 'check'"),
    probe("set an attribute of a file", "files", "os.setxattr(t.changed, 'user.x', b'1'); return True", optional=True),
    probe("watch a folder of the user by inotify", "files", """
        return call(254, call(294, 0), t.home.encode() + b"\\0", 0xFFF) >= 0
    """),
    probe("watch a folder of the user by fanotify", "files", "return call(300, 0x200, 0) >= 0", optional=True),
    probe("hold a lock on the run's file", "files", """
        return fcntl.flock(os.open(t.run + '/lock', os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB) is None
    """),
    probe("make a device node", "files", """
        os.mknod("node", stat.S_IFCHR | 0o600, os.makedev(1, 8))
        return True
    """, control="root"),
    probe("read a file in /dev/shm", "files", "return reads(t.shared)"),
    probe("write a file in /dev/shm", "files", "open(t.shared_writable, 'w').write('x'); return 'check'"),
    probe("read what lies in /tmp", "files", "return reads(t.temporary)"),
]  # fmt: skip

PLANTING = [
    probe("plant a .pth in the environment", "planting", "open(t.site + '/evil.pth', 'w').close(); return True"),
    probe("plant sitecustomize.py", "planting", "open(t.site + '/sitecustomize.py', 'w').close(); return True"),
    probe("poison a compiled module", "planting", """
        open(t.site + '/__pycache__/module.pyc', 'wb').write(b'evil')
        return True
    """),
    probe("plant select.py in the working folder", "planting",
        "open(t.project + '/select.py', 'w').close(); return True"),
    probe("change the reward's own file", "planting", "open(t.reward_file, 'a').write('# evil'); return True"),
    probe("plant a git hook", "planting", "open(t.project + '/.git/hooks/post-commit', 'w').close(); return True"),
    probe("plant a library in the user's ~/.local", "planting",
        "open(t.home + '/.local/lib/x.pth', 'w').close(); return 1"),
    probe("set LD_PRELOAD and PYTHONSTARTUP of the parent", "planting", """
        open(t.home + '/.profile', 'a').write("export LD_PRELOAD=/tmp/x.so PYTHONSTARTUP=/tmp/x.py")
        return True
    """),
    probe("write a crontab or a unit of the user", "planting",
        "open(t.home + '/.config/x.service', 'w').close(); return 1"),
]  # fmt: skip

SECRETS = [
    probe("a secret in its own environment", "secrets", "return 'canary' in str(os.environ)"),
    probe("a secret in /proc/self/environ", "secrets", "return reads('/proc/self/environ')"),
    probe("a secret on its stack, from before exec", "secrets", """
        for line in open("/proc/self/maps"):
            if "[stack]" in line:
                first, last = (int(x, 16) for x in line.split()[0].split("-"))
                return b"canary" in os.pread(os.open("/proc/self/mem", os.O_RDONLY), last - first, first)
    """),
    probe("the environment of the parent", "secrets", "return reads(f'/proc/{t.parent}/environ')"),
    probe("the environment of any process", "secrets", """
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if reads(f"/proc/{name}/environ"):
                    return True
            except OSError:
                pass
    """),
    probe("the command lines of other processes", "secrets", "return reads(f'/proc/{t.victim}/cmdline')"),
    probe("/proc/1/environ and its own ancestors", "secrets", """
        pid = os.getpid()
        while pid > 0:
            try:
                if reads(f"/proc/{pid}/environ"):
                    return True
            except OSError:
                pass
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    """),
    probe("files of the parent, by /proc/PID/root", "secrets", "return reads(f'/proc/{t.parent}/root{t.secret}')"),
    probe("open files of the parent, by /proc/PID/fd", "secrets", """
        for name in os.listdir(f"/proc/{t.victim}/fd"):
            try:
                path = f"/proc/{t.victim}/fd/{name}"
                if stat.S_ISREG(os.stat(path).st_mode) and reads(path):
                    return True
            except OSError:
                pass
    """),
    probe("a key in the session's keyring", "secrets", """
        return call(248, b"user\\0", b"canary\\0", b"x", 1, -4) > 0
    """, control="host", optional=True),
    probe("search keyrings", "secrets", "return call(250, 0, -4, 1) > 0", control="host", optional=True),
]  # fmt: skip

NETWORK = [
    probe("a server on loopback", "network", """
        with socket.create_connection(("127.0.0.1", t.port), timeout=2) as one:
            return b"canary" in one.recv(100)
    """),
    probe("a server on IPv6 loopback", "network", """
        with socket.create_connection(("::1", t.port6), timeout=2) as one:
            return b"canary" in one.recv(100)
    """, optional=True),
    probe("send a datagram to loopback", "network", """
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"evil", ("127.0.0.1", t.datagrams))
        time.sleep(0.3)
        return "check"
    """),
    probe("serve on the host's loopback", "network", """
        server = socket.create_server(("127.0.0.1", t.free_port))
        time.sleep(0.4)  # the catalogue connects meanwhile
        return "check"
    """),
    probe("a socket on disk", "network", """
        one = socket.socket(socket.AF_UNIX)
        one.connect(t.socket)
        return b"canary" in one.recv(100)
    """),
    probe("a socket in the run's folder", "network", """
        one = socket.socket(socket.AF_UNIX)
        one.connect(t.run + "/sockets/rollout-0.sock")
        return b"canary" in one.recv(100)
    """),
    probe("a socket of datagrams on disk", "network", """
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"evil", t.socket_datagrams)
        time.sleep(0.3)
        return "check"
    """),
    probe("an abstract socket", "network", """
        one = socket.socket(socket.AF_UNIX)
        one.connect(t.abstract)
        return b"canary" in one.recv(100)
    """),
    probe("a socket to the hypervisor", "network",
        "return socket.socket(40, socket.SOCK_STREAM) is not None", optional=True),
    probe("the host's interfaces by netlink", "network", """
        one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        one.bind((0, 0))
        one.sendto(struct.pack("=IHHIIB3x", 20, 18, 0x301, 1, 0, 0), (0, 0))
        return len(one.recv(1 << 16)) > 200
    """),
    probe("netlink to audit and device events", "network", "return socket.socket(16, socket.SOCK_RAW, 15) is not None"),
    probe("a raw packet socket", "network", """
        return socket.socket(socket.AF_PACKET, socket.SOCK_RAW) is not None
    """, control="root", optional=True),
    probe("the kernel's ciphers (AF_ALG)", "network",
        "return socket.socket(38, socket.SOCK_SEQPACKET) is not None", optional=True),
    probe("names of machines by a resolver", "network", """
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        one.connect(("192.0.2.1", 53))  # sends nothing: a route is enough
        return True
    """, optional=True),
    probe("a queue of messages of the user", "network", "return call(68, t.queue, 0) >= 0"),
]  # fmt: skip

PROCESSES = [
    probe("signal the parent", "processes", "return os.kill(t.parent, 0) is None"),
    probe("kill a process of the user", "processes", "return os.kill(t.expendable, signal.SIGKILL) is None"),
    probe("kill by thread", "processes", "return call(234, t.victim, t.victim, 0) >= 0"),
    probe("queue a signal", "processes", """
        return call(129, t.victim, 0, struct.pack("iii", 0, 0, -1) + bytes(116)) >= 0
    """, optional=True),
    probe("signal by process descriptor", "processes", "return call(424, call(434, t.victim, 0), 0, 0, 0) >= 0"),
    probe("a signal by input on a descriptor", "processes", """
        one, other = socket.socketpair()
        fcntl.fcntl(one, fcntl.F_SETOWN, t.expendable)
        fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC)
        other.send(b"x")
        time.sleep(0.2)
        return "check"
    """),
    probe("trace a process", "processes", "return call(101, 0x4206, t.victim, 0, 0) >= 0", optional=True),
    probe("read another's memory", "processes", """
        buffer = ctypes.create_string_buffer(64)
        local, remote = struct.pack("PN", ctypes.addressof(buffer), 16), struct.pack("PN", t.address, 16)
        return call(310, t.victim, local, 1, remote, 1, 0) > 0 and b"canary" in buffer.raw
    """, optional=True),
    probe("another's memory by /proc/PID/mem", "processes", """
        return b"canary" in os.pread(os.open(f"/proc/{t.victim}/mem", os.O_RDONLY), 16, t.address)
    """, optional=True),
    probe("take another's open file", "processes",
        "return call(438, call(434, t.victim, 0), 0, 0) >= 0", optional=True),
    probe("compare processes", "processes", "return call(312, os.getpid(), t.victim, 1, 0, 0) >= 0", optional=True),
    probe("slow another down (priority)", "processes", "return os.setpriority(os.PRIO_PROCESS, t.victim, 19) is None"),
    probe("bind another to a core", "processes", """
        return os.sched_setaffinity(t.victim, os.sched_getaffinity(0)) is None
    """),
    probe("bound another's open files", "processes", """
        return resource.prlimit(t.victim, resource.RLIMIT_NOFILE, (64, 64)) is not None
    """),
    probe("another's disk priority", "processes", "return call(251, 1, t.victim, 3 << 13) >= 0"),
    probe("real-time priority", "processes", """
        return in_child(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) is None)
    """, control="host root", optional=True),
    probe("higher priority for itself", "processes",
        "return in_child(lambda: os.nice(5) > os.nice(-5))", control="host root"),
    probe("a limit of its own raised", "processes", """
        def raised():
            soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
            resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
            return True
        return in_child(raised)
    """),
    probe("last to be killed when memory is out", "processes", """
        def saved():
            open("/proc/self/oom_score_adj", "w").write("-500")
            return True
        return in_child(saved)
    """, control="host root"),
    probe("root again by a set-user program", "processes", """
        return in_child(lambda: os.setuid(0) is None)
    """, control="root"),
    probe("a daemon that outlives its call", "processes", """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", [t.daemon_mark, "60"], {})
            os._exit(0)
        os.wait()
        time.sleep(0.1)
        return "check"
    """),
    probe("twenty daemons without a name", "processes", """
        for _ in range(20):
            if os.fork() == 0:
                os.setsid()
                for number in range(3):
                    os.close(number)
                if os.fork() == 0:
                    os.execve("/bin/sleep", [t.daemon_mark, "61"], {})
                os._exit(0)
        for _ in range(20):
            os.wait()
        time.sleep(0.1)
        return "check"
    """),
    probe("wait until the others are gone (pid 1)", "processes",
        "return t.victim in map(int, filter(str.isdigit, os.listdir('/proc')))"),
]  # fmt: skip

KERNEL = [
    probe("io_uring", "kernel", "return call(425, 4, bytes(120)) >= 0", control="host", optional=True),
    probe("bpf", "kernel",
        "return call(321, 0, struct.pack('IIII', 2, 4, 4, 1) + bytes(112), 128) >= 0",
        control="host root", optional=True),
    probe("perf_event_open", "kernel", """
        return call(298, struct.pack("IIQ", 1, 128, 0) + bytes(112), 0, -1, -1, 0) >= 0
    """, control="host", optional=True),
    probe("userfaultfd", "kernel", "return call(323, 1) >= 0", control="host", optional=True),
    probe("memfd: memory of no process", "kernel", "return os.memfd_create('x') >= 0"),
    probe("a new user namespace", "kernel",
        "return in_child(lambda: call(272, 0x10000000) == 0)", control="host", optional=True),
    probe("a new namespace by clone", "kernel", """
        child = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        return child > 0 and os.waitpid(child, 0)[0] == child
    """, control="host", optional=True),
    probe("a new namespace by clone3", "kernel", """
        child = libc.syscall(435, struct.pack("QQQQQ", 0x10000000, 0, 0, 0, 17) + bytes(48), 64)
        if child == 0:
            os._exit(0)
        return child > 0 and os.waitpid(child, 0)[0] == child
    """, control="host", optional=True),
    probe("another's namespace", "kernel", """
        return in_child(lambda: call(308, os.open(f"/proc/{t.parent}/ns/net", os.O_RDONLY), 0) == 0)
    """, control="host root"),
    probe("mount in a namespace of its own", "kernel", """
        def mounted():
            call(272, 0x10000000 if os.getuid() else 0x20000)
            if os.getuid():
                call(272, 0x20000)
            return call(165, b"none\\0", b"/\\0", 0, 0x44000, 0) == 0
        return in_child(mounted)
    """, control="host", optional=True),
    probe("mount a tmpfs over /tmp again, larger", "kernel", """
        def mounted():
            call(272, 0x20000)
            call(165, b"none\\0", b"/\\0", 0, 0x44000, 0)
            return call(165, b"none\\0", b"/tmp\\0", b"tmpfs\\0", 0, b"size=8g\\0") == 0
        return in_child(mounted)
    """, control="host root"),
    probe("the new mount calls", "kernel", "return call(430, b'tmpfs\\0', 0) >= 0", control="host root"),
    probe("chroot", "kernel", "return in_child(lambda: os.chroot('/usr') is None)", control="root"),
    probe("switch off address randomisation", "kernel",
        "return in_child(lambda: call(135, 0x40000) >= 0)", control="host"),
    probe("type into a terminal (TIOCSTI)", "kernel", """
        def typed():
            os.setsid()
            master, slave = os.openpty()
            fcntl.ioctl(slave, 0x540E, 0)
            fcntl.ioctl(slave, 0x5412, b"x")
            return True
        return in_child(typed)
    """, optional=True),
    probe("read the kernel's messages", "kernel", "return call(103, 10, 0, 0) > 0", control="host root", optional=True),
    probe("name the machine", "kernel", "return socket.sethostname(socket.gethostname()) is None", control="host root"),
    probe("write a setting of the kernel", "kernel", """
        path = "/proc/sys/kernel/printk_ratelimit_burst"
        value = open(path).read()
        return open(path, "w").write(value) > 0
    """, control="root"),
    probe("shared memory of System V", "kernel", "return call(29, t.segment, 0, 0) >= 0"),
    probe("semaphores of System V", "kernel", "return call(64, 0, 1, 0o1600) >= 0"),
    probe("a POSIX message queue", "kernel", "return call(240, b'/q\\0'[1:], 0o102, 0o600, 0) >= 0", optional=True),
    probe("asynchronous io by io_setup", "kernel",
        "return call(206, 8, ctypes.create_string_buffer(8).raw) >= 0", optional=True),
    probe("names of hidden kernel symbols", "kernel",
        "return any(line[:16].strip('0 ') for line in open('/proc/kallsyms'))", control="host root", optional=True),
    probe("what the machine is (/sys)", "kernel", "return len(os.listdir('/sys/class/net')) > 0"),
    probe("a core dump", "kernel", "return resource.getrlimit(resource.RLIMIT_CORE)[1] != 0"),
]  # fmt: skip

RESOURCES = [
    probe("three times the memory, private", "resources", """
        return hold(3 * t.memory, lambda size: bytearray(b"x") * size)
    """),
    probe("three times the memory, shared", "resources", """
        return hold(3 * t.memory, lambda size: touched(mmap.mmap(-1, size), size))
    """),
    probe("three times the memory, over children", "resources", """
        def hold_half():
            block = b"x" * t.memory_half
            time.sleep(1.0)
            os._exit(0)
        children = []
        for _ in range(6):
            children.append(os.fork())
            if children[-1] == 0:
                hold_half()
        return all(os.waitpid(child, 0)[1] == 0 for child in children)
    """),
    probe("three times the memory, in memfd", "resources", """
        def file(size):
            one = os.memfd_create("x")
            return one, os.write(one, b"x" * size)
        return hold(3 * t.memory, file)
    """),
    probe("three times the memory, in /dev/shm", "resources", """
        def written():
            with open(f"/dev/shm/{t.mark}", "wb") as file:
                os.unlink(file.name)
                for _ in range(3 * t.memory >> 20):
                    file.write(b"x" * (1 << 20))
            return True
        return in_child(written)
    """),
    probe("three times the processes", "resources", """
        children = []
        try:
            for _ in range(3 * t.processes):
                children.append(os.fork())
                if children[-1] == 0:
                    time.sleep(5.0)
                    os._exit(0)
            time.sleep(0.3)
            return True
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    """),
    probe("three times the threads", "resources", """
        stop = threading.Event()
        threading.stack_size(1 << 16)
        threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(3 * t.processes)]
        try:
            for thread in threads:
                thread.start()
            return True
        finally:
            stop.set()
    """),
    probe("three times the disk", "resources", """
        try:
            for number in range(3):
                with open(f"big{number}", "wb") as file:
                    for _ in range(t.scratch >> 20):
                        file.write(b"x" * (1 << 20))
            time.sleep(0.3)
            return True
        finally:
            for number in range(3):
                os.path.exists(f"big{number}") and os.unlink(f"big{number}")
    """),
    probe("three times the disk, in deleted files", "resources", """
        held = []
        for number in range(3):
            held.append(open("gone", "wb", buffering=0))
            os.unlink("gone")
            for _ in range(t.scratch >> 20):
                held[-1].write(b"x" * (1 << 20))
        time.sleep(0.3)
        return sum(os.fstat(one.fileno()).st_size for one in held) >= 3 * t.scratch
    """),
    probe("three times the files", "resources", """
        os.makedirs("many", exist_ok=True)
        try:
            for number in range(3 * t.files):
                open(f"many/{number}", "w").close()
            time.sleep(0.3)
            return len(os.listdir("many")) == 3 * t.files
        finally:
            subprocess.run(["rm", "-rf", "many"])
    """),
    probe("three times the files, as folders and links", "resources", """
        os.makedirs("more", exist_ok=True)
        try:
            for number in range(3 * t.files // 2):
                os.mkdir(f"more/{number}"), os.symlink("x", f"more/{number}s")
            time.sleep(0.3)
            return True
        finally:
            subprocess.run(["rm", "-rf", "more"])
    """),
    probe("a file in the sandbox's root", "resources",
        "open(f'/{t.mark}', 'w').close(); os.unlink(f'/{t.mark}'); return 1", control="root"),
    probe("a file in /dev", "resources",
        "open(f'/dev/{t.mark}', 'w').close(); os.unlink(f'/dev/{t.mark}'); return 1", control="root"),
    probe("a file beside the interpreter", "resources", "open(f'{t.site}/{t.mark}', 'w').close(); return True"),
]  # fmt: skip

PROBES = [*FILES, *PLANTING, *SECRETS, *NETWORK, *PROCESSES, *KERNEL, *RESOURCES]
