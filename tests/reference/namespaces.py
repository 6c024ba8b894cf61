# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces of this machine in place of two hosts: each has a name, an address and one end of a cable."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.reference import tiny

NAMES = "127.0.0.1 localhost\n10.7.0.1 first\n10.7.0.2 second\n"  # each host's /etc/hosts
UNSHARED = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts"]
TRIED = "mount --bind /dev/null /etc/hosts && ip link add cable0 type veth peer name cable1"
SCRIPT = """
mount --bind hosts /etc/hosts
hostname first
unshare --net --uts sleep 1000 & other=$!
there="nsenter --target $other --net --uts"
until [ "$(readlink /proc/$other/ns/uts)" != "$(readlink /proc/$$/ns/uts)" ]; do sleep 0.1; done
$there hostname second
ip link add cable0 type veth peer name cable1
ip link set cable1 netns $other
ip link set lo up && ip address add 10.7.0.1/24 dev cable0 && ip link set cable0 up
$there ip link set lo up && $there ip address add 10.7.0.2/24 dev cable1 && $there ip link set cable1 up
until [ -e pulled ]; do sleep 0.2; done && ip link set cable0 down &
cd "$ROOT"
NUMBER=1 $there "$@" >"$OLDPWD/said1" 2>&1 & second=$!
NUMBER=0 "$@" >"$OLDPWD/said0" 2>&1; echo $? >"$OLDPWD/code0"
wait $second; echo $? >"$OLDPWD/code1"
"""

needed = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*UNSHARED, "sh", "-c", TRIED], capture_output=True).returncode != 0,
    reason="this machine makes no network namespaces",
)


def launch(folder, code, *arguments, names=NAMES, programs=None, patience_s=400):
    """Runs Python code on both hosts, which has its host's number as $NUMBER; (exit codes, outputs).

    Args:
      folder: an empty one, for outputs. A file `pulled` in it pulls the cable.
      programs: a folder for compiled ones; None: none are kept.
    """
    (folder / "hosts").write_text(names)
    path = os.pathsep.join([str(tiny.ROOT), f"{tiny.ROOT}/bridge", os.environ.get("PYTHONPATH", "")])
    environment = tiny.environment(programs) | {"ROOT": str(tiny.ROOT), "PYTHONPATH": path}
    environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "").replace("device_count=8", "device_count=1")
    command = [*UNSHARED, "bash", "-c", SCRIPT, "bash", sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True) as started:
        try:
            started.wait(patience_s)
        finally:
            os.killpg(started.pid, signal.SIGKILL)
    codes, said = ([(folder / f"{kind}{number}").read_text() for number in range(2)] for kind in ("code", "said"))
    return [int(code) for code in codes], said
