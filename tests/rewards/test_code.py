# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A program gets 1 if it passes its tests and 0 whatever else it tries; the battery harms and fools nobody."""

import base64
import json
import os
import pathlib
import pickle
import sys
import time
import zlib

import pytest

from qarl_jax.rewards import Sample, code
from qarl_jax.types import Prompt, UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="Linux on x86-64")

DOUBLE = {
    "prompt": 'import math\n\ndef double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate((1, 'a')) == (1, 'a', 1, 'a')\n",
}
RIGHT = "```python\ndef double(x):\n    return 2 * x\n```"


@pytest.fixture(scope="module")
def reward():
    made = code.Reward(code.Config(workers=1, timeout_s=4.0), max_response_len=512)
    yield made
    made.close()


def score(reward, text, meta=DOUBLE):
    prompt = Prompt(uid="p", tokens=(1,), text="", answer="", meta=meta)
    return float(reward.score([Sample(prompt=prompt, text=text, num_tokens=1)])[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RIGHT, 1.0),
        ("```python\ndef double(x):\n    return x\n```\nNo:\n" + RIGHT, 1.0),  # the last that defines it
        (RIGHT + "\nTry it:\n```python\nprint(double(2))\n```", 1.0),
        ("    return x + x\n", 1.0),  # a continuation, as a base model writes it
        ("def double(x):\n    return x * 2", 1.0),
        # A fence with something beside it, and other ways to define a function.
        (RIGHT + "<|im_end|>", 1.0),
        (RIGHT + " That's it", 1.0),
        ("\ufeff" + RIGHT, 1.0),
        ("```python\ndouble = lambda x: 2 * x\n```", 1.0),
        ("```python\ndouble: object = lambda x: 2 * x\n```\nSo:\n```python\nprint(double(2))\n```", 1.0),
        ("```python\nclass Twice:\n    def __call__(self, x): return 2 * x\ndouble = Twice()\n```", 1.0),
        ("```python\n    def double(x):\n        return 2 * x\n```", 1.0),
        ("```python\nreturn 2 * x\n```", 1.0),
        ("```python\n        y = x\n        return x + y\n```", 1.0),
        ("        return x + x\n", 1.0),
        ("y = x\n    return x + y<|im_end|>", 1.0),  # stripped
        ("Here is the function:\n\ndef double(x):\n    return x * 2\n\nIt doubles x.\n- a number\n", 1.0),
        ("<think>\nTwice?\n</think>\n<answer>def double(x):\n    return x * 2</answer>", 1.0),
        ("[PYTHON]\ndef double(x):\n    return x * 2\n[/PYTHON]", 1.0),
        # What the other blocks define.
        ("```python\ndef twice(x):\n    return 2 * x\n```\n```python\ndef double(x):\n    return twice(x)\n```", 1.0),
        ("```python\ndef double(x):\n    return N * x\n```\nwith\n```\nN = 2\n```", 1.0),
        ("```python\nx = [double(1)]\nwhile True: pass\nno = (\n```\n" + RIGHT, 1.0),
        ("```python\nwhile True: pass\nN = 3\n```\n```python\ndef double(x):\n    return N * x\n```", 0.0),
        ("```python\nimport numpy_is_not_here\n```", 0.0),
        ("```python\ndef double(x):\n    return 3\n```", 0.0),
        ("```python\ndef double(x) return\n```", 0.0),
        ("", 0.0),
    ],
)
def test_a_program_is_found_and_run(reward, text, expected):
    assert score(reward, text) == expected


def hostile(body):
    return f"```python\nimport os, sys\n{body}\ndef double(x):\n    return 2 * x\n```"


# What they try in vain; each then defines the right function, so that 1 means: refused, and nothing else happened.
BATTERY = {
    "kills the grader": "os.kill(os.getppid(), 9)",
    "kills the group": "os.killpg(0, 9)",
    "forks": "os.fork()",
    "starts a program": "import subprocess; subprocess.run(['true'])",
    "opens a socket": "import socket; socket.socket()",
    "writes a file": "open('written_by_a_program', 'w').write('x')",
    "removes a file": "os.remove(TARGET)",
    "renames a file": "os.rename(TARGET, TARGET + '2')",
    "truncates a file": "os.truncate(TARGET, 0)",
    "changes a file's mode": "os.chmod(TARGET, 0)",
    "makes a folder": "os.mkdir('made_by_a_program')",
    "reads the grader's memory": "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "reads the grader's environment": "print(open(f'/proc/{os.getppid()}/environ').read()[0])",
    "raises its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 60, 1 << 60))",
    "becomes another user": "os.setuid(1)",
    "traces the grader": "import ctypes\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise PermissionError",
}


@pytest.mark.parametrize("name", BATTERY)
def test_what_a_program_may_not_do_is_refused(reward, name, tmp_path):
    target = tmp_path / "target"
    target.write_text("whole")
    attempt = BATTERY[name].replace("TARGET", repr(str(target)))
    lines = "\n".join(f"    {line}" for line in attempt.splitlines())
    caught = f"try:\n{lines}\nexcept (OSError, ValueError, IndexError):\n    pass\nelse:\n    os._exit(1)"
    assert score(reward, hostile(caught)) == 1.0, "not refused"
    assert target.read_text() == "whole"
    assert target.stat().st_mode & 0o600 == 0o600
    assert reward.pool.restarts == 0
    for left in ("written_by_a_program", "made_by_a_program"):
        assert not pathlib.Path(left).exists()


FOOLING = {
    "says that it passed": "print('{\"value\": true}'); os.write(1, b'passed'); os._exit(0)",
    "leaves with code 0": "sys.exit(0)",
    "returns what equals everything": (
        "class Same:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef double(x): return Same()"
    ),
    "returns a subclass that equals everything": (
        "class Same(int):\n    def __eq__(self, other): return True\ndef double(x): return Same(4)"
    ),
    "changes what equality means": "import builtins; builtins.assertTrue = True; int_eq = lambda *_: True",
    "finds the tests in its frames": (
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'candidate' in o]\n"
        "def double(x): return found[0]['expected']"
    ),
    "writes answers itself": (
        'for fd in range(3, 32):\n    try: os.write(fd, b\'{"value": {"int": "0x4"}}\\n\' * 3)\n'
        "    except OSError: pass"
    ),
}


@pytest.mark.parametrize("name", FOOLING)
def test_a_program_cannot_announce_its_own_success(reward, name):
    assert score(reward, f"```python\nimport os, sys\ndef double(x):\n    return 3\n{FOOLING[name]}\n```") == 0.0


GREEDY = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(60)",
    "takes memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "prints without end": "while True: print('x' * 100_000)",
    "answers without end": "while True: os.write(3, b'x' * 65_536)\n",
    "recurses": "def f(): return f()\nf()",
    "allocates a giant": "x = 10 ** 10 ** 9",
    "starts threads": (
        "import threading\nwhile True: threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()"
    ),
    "answers with a giant": "def double(x): return 'x' * (1 << 28)",
    "answers too deep": "def double(x):\n    for _ in range(10_000): x = [x]\n    return x",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "sleeps")) for name in GREEDY]
)
def test_a_program_that_takes_too_much_is_stopped_in_time(reward, name):
    start = time.monotonic()
    assert score(reward, f"```python\nimport os\ndef double(x):\n    return 2 * x\n{GREEDY[name]}\n```") == 0.0
    assert time.monotonic() - start < 30
    assert score(reward, RIGHT) == 1.0


def test_a_test_may_call_the_function_by_its_name_and_what_the_prompt_defines(reward):
    prompt = 'def half(x):\n    return x // 2\n\ndef double(x):\n    """Twice x."""\n'
    meta = DOUBLE | {"prompt": prompt, "test": "def check(f):\n    assert half(f(6)) == double(3) == 6"}
    assert score(reward, RIGHT, meta) == 1.0
    assert score(reward, "```python\ndef double(x):\n    return x + half(2 * x)\n```", meta) == 1.0
    assert score(reward, "```python\ndef double(x):\n    return x\n```", meta) == 0.0


SUM = "a, b = map(int, input().split())\nprint(a + b)\n"
SUMS = {"input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})}


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{SUM}```\nIt prints\n```\n3\n```",
        f"```\n{SUM}```\nRun it:\n```bash\npython sum.py\n```",
        f"```python\nprint(0)\n```\nNo:\n```python\n{SUM}```",
        f"<answer>```python\n{SUM}```</answer>",
        f"```python\n{SUM}exit()\n```",
        f"```python\nimport sys\n{SUM}sys.exit(0)\n```",
        f"```python\ndef twice(a): return 2 * a\n```\n```python\n{SUM.replace('a + b', 'twice(a) + b - a')}```",
        f"```python\nn = int(input())\n```\nNo:\n```python\n{SUM}```<|im_end|>",
        "```python\ndef main(): print(sum(map(int, input().split())))\nif __name__ == '__main__': main()\n```",
    ],
)
def test_a_program_is_told_from_what_stands_beside_it(reward, text):
    assert score(reward, text, SUMS) == 1.0


def test_programs_that_read_and_print_are_compared_word_by_word(reward):
    meta = {"input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]})}
    for reading in ("a, b = map(int, input().split())", "import sys; a, b = map(int, sys.stdin.read().split())"):
        assert score(reward, f"```python\n{reading}\nprint(a + b)\n```", meta) == 1.0
    assert score(reward, "```python\nprint(3)\n```", meta) == 0.0
    assert score(reward, "```python\nprint(3); import os; os._exit(0)\n```", meta) == 0.0


def test_livecodebench_tests_are_read_and_pickles_of_anything_else_are_not(reward):
    cases = [{"input": '[1, 2]\n"a"', "output": '[[1, 2], "a"]', "testtype": "functional"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()
    meta = {"public_test_cases": json.dumps(cases), "private_test_cases": packed, "metadata": '{"func_name": "pair"}'}
    assert score(reward, "```python\nclass Solution:\n    def pair(self, x, y):\n        return x, y\n```", meta) == 1.0
    both = "```python\nclass Solution:\n    pass\ndef pair(x, y):\n    return x, y\n```"
    assert score(reward, both, meta) == 1.0
    assert score(reward, "```python\ndef pair(x, y):\n    return y\n```", meta) == 0.0
    evil = base64.b64encode(zlib.compress(pickle.dumps(os.system))).decode()
    with pytest.raises(UserError, match="private_test_cases asks for"):
        score(reward, RIGHT, meta | {"private_test_cases": evil})


LEFT_OUT = """class Solution:
    def best(self, words: List[str]) -> Optional[int]:
        seen = defaultdict(int)
        for word in words:
            seen[word] += 1
        return max(accumulate(sorted(seen.values()), add), default=inf) + pow(2, 3, 5) + abs(floor(-0.5))
"""


@pytest.mark.parametrize("layout", ["livecodebench", "apps"])
def test_a_solution_may_leave_out_the_imports_that_the_judges_of_its_data_set_supply(reward, layout):
    cases = [{"input": '["a", "b", "a"]', "output": "7", "testtype": "functional"}]
    meta = {"public_test_cases": json.dumps(cases), "metadata": '{"func_name": "best"}'}
    if layout == "apps":
        meta = {"input_output": json.dumps({"fn_name": "best", "inputs": [[["a", "b", "a"]]], "outputs": [[7]]})}
    assert score(reward, f"```python\n{LEFT_OUT}```", meta) == 1.0
    assert score(reward, f"```python\n{LEFT_OUT.replace('defaultdict', 'unknown')}```", meta) == 0.0
    reading = {"input_output": json.dumps({"inputs": ["3 4\n"], "outputs": ["4"]})}
    assert score(reward, "```python\nprint(max(map(int, stdin.readline().split())))\n```", reading) == 1.0


def test_a_program_has_numpy_and_no_other_package(reward):
    text = (
        "```python\nimport numpy as np\ndef double(x):\n    return 2 * x if np.linalg.det(np.eye(2)) == 1 else x\n```"
    )
    assert score(reward, text) == 1.0
    meta = {"input_output": json.dumps({"fn_name": "total", "inputs": [[[1, 2]]], "outputs": [[[3, [1, 2]]]]})}
    total = "```python\ndef total(x):\n    return np.sum(x), np.array(x)\n```"
    assert score(reward, total, meta) == 1.0
    for package in ("scipy", "jax", "qarl_jax"):
        assert score(reward, text.replace("import numpy as np", f"import {package}, numpy as np")) == 0.0


def test_a_program_may_start_threads(reward):
    body = "with ThreadPoolExecutor(2) as pool:\n        return sum(pool.map(lambda y: y, (x, x)))"
    text = f"```python\nfrom concurrent.futures import ThreadPoolExecutor\ndef f(x):\n    {body}\n```"
    assert score(reward, text, {"entry_point": "f", "test": "def check(f):\n    assert f(2) == 4"}) == 1.0


def test_a_prompt_without_tests_is_an_error_that_names_the_columns(reward):
    with pytest.raises(UserError, match="prompt, entry_point, test"):
        score(reward, RIGHT, {})


def test_plain_data_comes_back_as_it_is(reward):
    values = "[1, -2.5, 'é', None, True, (1, [2]), {1: 'a', (2, 3): {4}}, b'x', 10**400, 1e400, 1j, frozenset([1])]"
    meta = {"entry_point": "f", "test": f"def check(f):\n    assert f({values}) == {values}"}
    assert score(reward, "```python\ndef f(x):\n    return x\n```", meta) == 1.0
