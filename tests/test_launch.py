# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The files in examples/launch start the processes they say, with a command that the trainer takes."""

import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from qarl_jax import train
from qarl_jax.rollout.vllm.config import Config
from qarl_jax.run import config

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "launch"


def arguments_of(words):
    """The words behind `qarl train` or `python -m qarl_jax.train` in a command."""
    start = words.index("train") if "train" in words else words.index("qarl_jax.train")
    return list(words[start + 1 :])


def filled(text, values):
    """Text with $NAME, ${NAME} and $(NAME) replaced; a name that has no value fails."""
    return re.sub(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))", lambda m: values[next(filter(None, m.groups()))], text)


def slurm():
    text = (FOLDER / "slurm.sbatch").read_text()
    wanted = {
        key: int(n) for key, n in re.findall(r"^#SBATCH --(nodes|ntasks-per-node|gpus-per-node)=(\d+)$", text, re.M)
    }
    count = wanted["nodes"] * wanted["ntasks-per-node"]
    command = re.search(r"qarl train.*?(?= && break)", text, re.S)[0].replace("\\\n", " ")
    return arguments_of(shlex.split(filled(command, {"SLURM_NTASKS": str(count)}))), count, wanted["gpus-per-node"] * 2


def pod_of(template):
    """(container, GPUs) of a pod template with one container."""
    (container,) = template["spec"]["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in template["spec"]["volumes"]}
    return container, int(container["resources"]["limits"]["nvidia.com/gpu"])


def job_set(number=1):
    manifest = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    of_job = job["template"]["spec"]
    assert of_job["completionMode"] == "Indexed"  # each pod has a number
    assert of_job["completions"] == of_job["parallelism"]  # all at once
    assert of_job["backoffLimit"] == 0  # a pod that fails ends its job, and JobSet starts all of them again
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] > 0
    container, gpus = pod_of(of_job["template"])
    (variable,) = container["env"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    words = [filled(word, {variable["name"]: str(number)}) for word in [*container["command"], *container["args"]]]
    name = manifest["metadata"]["name"]
    assert f"distributed.coordinator={name}-{job['name']}-0-0.{name}:7777" in words
    return arguments_of(words), of_job["completions"], of_job["completions"] * gpus


def leader_worker_set(number=1):
    manifest = yaml.safe_load((FOLDER / "leaderworkerset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    group = manifest["spec"]["leaderWorkerTemplate"]
    assert manifest["spec"]["replicas"] == 1
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    container, gpus = pod_of(group["workerTemplate"])
    assert container["command"] == ["bash", "-c"]
    values = {
        "LWS_LEADER_ADDRESS": "qarl-0.qarl",
        "LWS_GROUP_SIZE": str(group["size"]),
        "LWS_WORKER_INDEX": str(number),
    }
    command = filled(container["args"][0], values).partition(" && ")[0]
    return arguments_of(shlex.split(command)), group["size"], group["size"] * gpus


def ray(number=1):
    spec = importlib.util.spec_from_file_location("ray_hosts", FOLDER / "ray_hosts.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    called = shlex.split(re.search(r"python examples.*?(?=\n\n)", script.__doc__, re.S)[0].replace("\\\n", " "))
    hosts, gpus = (int(called[called.index(name) + 1]) for name in ("--hosts", "--gpus"))
    words = script.command(number, hosts, "10.0.0.1:7777", called[called.index("--") + 1 :])
    assert words[:3] == [sys.executable, "-m", "qarl_jax.train"]
    return arguments_of(words), hosts, hosts * gpus


LAUNCHERS = [slurm, job_set, leader_worker_set, ray]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_starts_the_processes_of_one_run_over_all_gpus(launcher):
    arguments, processes, gpus = launcher()
    assert arguments[0] == "--config"
    cfg = config.load(arguments[1], arguments[2:])
    assert cfg.distributed.is_on
    assert cfg.distributed.num_processes == processes
    assert cfg.distributed.process_id == (-1 if launcher is slurm else 1)
    assert cfg.mesh.size == gpus
    assert isinstance(cfg.rollout.engine, Config)
    assert cfg.run_dir == "runs/qwen3_8b"


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [slurm, job_set])
def test_a_dry_run_plans_a_launchers_command_with_an_engine_on_each_gpu(launcher, capsys):
    arguments, processes, gpus = launcher()
    assert train.main([*arguments, "--dry-run", "--gpus", str(gpus), "--gpu-gb", "80"]) == 0
    told = capsys.readouterr().out
    assert f"{gpus} such devices, an engine on each" in told
    assert f"{gpus // processes} of each of {processes} processes, which draws {4096 // processes} responses" in told


def test_scripts_are_whole():
    subprocess.run(["bash", "-n", FOLDER / "slurm.sbatch"], check=True)
    assert (FOLDER / "slurm.sbatch").read_text().startswith("#!/bin/bash\n")
