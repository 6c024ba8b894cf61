# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A run over the hosts of a Ray cluster: a process per host, with all its GPUs, and an engine on each of them.

    python examples/launch/ray_hosts.py --hosts 2 --gpus 8 -- \\
        --config papers/qwen3_8b_base arm=tbpo run_dir=runs/qwen3_8b mesh.data=2 mesh.fsdp=8

Ray places the processes; they find each other through `distributed`. The folder that this is started in, the model, the
data and run_dir lie in a file system that all hosts share. If a process dies, the others end, all are started again,
and the run resumes.
"""

import argparse
import os
import socket
import subprocess
import sys

WAIT_S = 600  # for free hosts


def command(number: int, hosts: int, coordinator: str, arguments: list[str]) -> list[str]:
    """The command of one host's process."""
    who = [f"coordinator={coordinator}", f"num_processes={hosts}", f"process_id={number}"]
    return [sys.executable, "-m", "qarl_jax.train", *arguments, *(f"distributed.{one}" for one in who)]


class Host:
    """Ray's actor on a host."""

    def address(self) -> str:
        """host:port that the other processes reach, if this is the first one's host."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as holder:
            return f"{host}:{holder.getsockname()[1]}"

    def run(self, line: list[str], folder: str) -> int:
        """Runs a command to its end; returns its exit code."""
        return subprocess.run(line, cwd=folder, check=False).returncode


def main() -> int:
    """Starts the run until every process has ended with 0, or a mistake in the input ends it with 2."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="of a host; 0: a run on CPUs")
    parser.add_argument("--strategy", default="STRICT_SPREAD", help="of Ray's placement group; PACK: also on one host")
    parser.add_argument("--attempts", type=int, default=10)
    parser.add_argument("arguments", nargs="+", help="of `qarl train`, after --")
    args = parser.parse_args()

    ray.init(address="auto")
    group = ray.util.placement_group([{"CPU": 1, "GPU": args.gpus}] * args.hosts, strategy=args.strategy)
    if not group.wait(WAIT_S):
        print(
            f"no {args.hosts} hosts with {args.gpus} free GPUs each after {WAIT_S} s; see `ray status`", file=sys.stderr
        )
        return 2
    codes: list[int] = []
    for _ in range(args.attempts):
        hosts = [
            ray.remote(Host)
            .options(
                num_cpus=1,
                num_gpus=args.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            )
            .remote()
            for number in range(args.hosts)
        ]
        coordinator = ray.get(hosts[0].address.remote())
        lines = [command(number, args.hosts, coordinator, args.arguments) for number in range(args.hosts)]
        try:
            codes = ray.get([host.run.remote(line, os.getcwd()) for host, line in zip(hosts, lines, strict=True)])
        except ray.exceptions.RayActorError as lost:
            print(f"a host was lost: {lost}", file=sys.stderr)
            codes = [1]
        if not any(codes) or 2 in codes:
            break
        for host in hosts:
            ray.kill(host)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
