# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The records that flow through a training step.

Dimension legend, used in every signature and suffix of the project:

    B batch rows   T time (token positions)   D model width   F ffn width   V vocabulary
    N q-heads      K kv-heads                 H head width    E experts     G quantization groups
    S segments (responses) per packed row

(In `quant/`, weights are [N, K] = [out, in], as on disk and in vLLM.)

Off-by-ones, written once:

  * `logprobs[b, t]` scores `tokens[b, t]`, given everything before it in its segment. The first token of a segment is
    scored by nothing and is never in `loss_mask`. No other file shifts by one: `logprobs.py` does it.
  * `values[b, t]` is a critic's value of the state in which `tokens[b, t]` is drawn: of everything before it.
  * Step n consumes completions drawn under version n-1-lag and publishes version n; version 0 is the initial policy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """A span of response tokens, [start, end), that were drawn under policy `version`.

    Example: VersionSpan(version=3, start=0, end=17).
    """

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of an episode: the policy drew response tokens [start, end). The environment wrote those between turns.

    `reward`: the environment's reward for the turn; in a graded group the turn's share of the response's reward.
    """

    start: int
    end: int
    reward: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response.

    Example: prompt "2+2=" and response "4<eos>" under version 3:
    Completion(prompt_tokens=(12, 10, 12, 5), tokens=(14, 1), logprobs=array([-0.2, -0.01]), finish_reason="stop",
    versions=(VersionSpan(version=3, start=0, end=2),))

    Attributes:
      prompt_tokens: token ids of the prompt.
      tokens: token ids of the response, the end-of-sequence token included when it was drawn. Between
        turns: the environment's text.
      logprobs: [len(tokens)] float32, log-probability of each response token under the sampler's distribution, after
        temperature, and at top_p = 1 exactly the distribution drawn from. 0 for what was not drawn.
      finish_reason: "stop" (an end token was drawn; of several turns: the environment was done), "length" (a limit was
        hit) or "abort" (unfinished, or its environment failed: there is nothing to grade or to train on).
      versions: policy versions the tokens were drawn under, in order, covering all that were drawn.
      routed_experts: optional [len(prompt)+len(tokens)-1, layers, top_k] expert ids (MoE engines that record them).
      turns: with an environment (`rollout.environment`), the spans that the policy drew; empty: it drew all tokens.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: np.ndarray
    finish_reason: str
    versions: tuple[VersionSpan, ...]
    routed_experts: np.ndarray | None = None
    turns: tuple[Turn, ...] = ()

    @property
    def drawn(self) -> np.ndarray:
        """The mask, [len(tokens)] bool, of the tokens that the policy drew; only these are trained on."""
        mask = np.full(len(self.tokens), not self.turns)
        for turn in self.turns:
            mask[turn.start : turn.end] = True
        return mask

    @property
    def policy_version(self) -> int:
        """The oldest policy version under which a token was drawn."""
        return min((span.version for span in self.versions), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task to answer. Example: Prompt(uid="chain_sum/17", tokens=(12, 10), text="1+2=", answer="3", meta={}).

    `messages`: the prompt as chat messages, before the chat template renders them to `text`; empty: not known.
    """

    uid: str
    tokens: tuple[int, ...]
    text: str
    answer: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def whole_answer(self) -> str:
        """The answer as the data has it: with GSM8K's solution before "#### 42", of which `answer` is 42."""
        return self.meta.get("whole_answer", self.answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """The responses to one prompt, the unit over which advantages are normalized.

    Attributes:
      prompt: the prompt.
      completions: the sampled responses.
      rewards: [len(completions)] float32.
      texts: decoded responses. graded: the parts of them that rewards see, of a response with turns the last turn.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: np.ndarray
    texts: tuple[str, ...] = ()
    graded: tuple[str, ...] = ()

    @property
    def valid(self) -> np.ndarray:
        """The responses whose environment did not fail, [len(completions)] bool."""
        return np.array([completion.finish_reason != "abort" for completion in self.completions])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Packed rows, ready for the learner. Several responses (each with its prompt) may share a row.

    Example, one row holding two segments of prompt+response and one padding position, T = 8:
      tokens       [[5, 6, 7, 1,  8, 9, 1,  0]]
      positions    [[0, 1, 2, 3,  0, 1, 2,  0]]
      segment_ids  [[1, 1, 1, 1,  2, 2, 2,  0]]
      loss_mask    [[0, 0, 1, 1,  0, 1, 1,  0]]   (responses: "7 1" and "9 1")

    Attributes (B rows, T positions):
      tokens: [B, T] int32.
      positions: [B, T] int32, position within the segment (RoPE).
      segment_ids: [B, T] int32, 1.. per row, 0 = padding.
      loss_mask: [B, T] bool, response tokens that the policy drew (`Completion.drawn`), so there may be holes.
      rollout_logprobs: [B, T] float32, what the sampler reported; 0 elsewhere.
      advantages: [B, T] float32, broadcast over each response, or each turn of it; 0 elsewhere. With a critic:
        the response's reward, until `critic.Critic.judge` replaces it by an advantage per token.
      routed_experts: [B, T, L, k] int16, the experts the sampler sent each position to in each of the L layers; -1: not
        recorded, the model's own choice is taken. None where no choice is replayed.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    loss_mask: Any
    rollout_logprobs: Any
    advantages: Any
    routed_experts: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The inputs of every objective.

    Values outside `loss_mask` may be anything, NaN included; they never reach a sum or a gradient.

    Attributes (B rows, T positions):
      logprobs: [B, T] float32, learner now. The only differentiated field.
      old_logprobs: [B, T] float32, learner at the start of the update (proximal policy).
      rollout_logprobs: [B, T] float32, what the sampler reported (behaviour policy).
      advantages: [B, T] float32, broadcast per response; a critic's differ from token to token.
      loss_mask: [B, T] bool, response tokens; holes allowed.
      segment_ids: [B, T] int32, which response of the row a token belongs to; 0 = padding.
      num_tokens: float32 scalar, response tokens of the whole optimizer mini-batch; None: this batch is the whole.
      num_sequences: float32 scalar, non-empty responses of the whole mini-batch; None: this batch is the whole.
      ref_logprobs: [B, T] float32, reference policy, where a KL term is used.
      values, old_values, returns: [B, T] float32, where a critic is used.
      max_segments: static upper bound on segment_ids; None: T.
    """

    logprobs: Any
    old_logprobs: Any
    rollout_logprobs: Any
    advantages: Any
    loss_mask: Any
    segment_ids: Any
    num_tokens: Any = None
    num_sequences: Any = None
    ref_logprobs: Any = None
    values: Any = None
    old_values: Any = None
    returns: Any = None
    max_segments: int | None = dataclasses.field(default=None, metadata={"static": True})


class UserError(Exception):
    """Something the user can fix: bad config, file, shape or environment.

    Entry points print its message and exit with code 2; nothing on disk is lost.

    Args:
      fault: what is wrong. remedy: what to do; empty: none is told. The attributes have no full stop.
      between: joins the two in the message.
    """

    def __init__(self, fault: object = "", remedy: str = "", between: str = "; "):
        super().__init__(f"{fault}{between}{remedy}" if remedy else fault)
        self.fault, self.remedy = str(fault).rstrip("."), remedy.rstrip(".")


class AbsentError(UserError):
    """A file, folder or package that is not on this machine. A dry run makes its plan without it."""


def check_seed(seed: int) -> None:
    """Refuses a seed that a generator of random numbers would not take."""
    if not 0 <= seed < 2**31:
        raise UserError(f"seed must lie in [0, 2^31), got {seed}.")


def at_least(config: Any, least: float, *fields: str, note: str = "") -> None:
    """Raises `UserError` if a field of `config` is below `least` or NaN; None passes. `note` ends the message."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not value >= least:
            raise UserError(f"{field} must be at least {least:g}, got {value}{note}.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean X?" for the known word that contains `word`, else the closest; "" if none is close."""
    known = list(known)
    near = [k for k in known if len(word) > 2 and word.lower() in k] or difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def check_model_folder(folder: str | os.PathLike[str]) -> None:
    """Raises `UserError` if `folder` is no folder; for a Hugging Face Hub name the message says how to download it."""
    folder = os.fspath(folder)
    if os.path.isdir(folder):
        return
    if os.path.exists(folder):
        raise UserError(f"{folder}: a file, but a Hugging Face model folder is needed.")
    said = f"{folder}: no such folder; give a Hugging Face model folder."
    if folder.startswith("models/"):
        said += f" Nothing is downloaded here: `make data` or `hf download ORG/NAME --local-dir {folder}` does it."
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", folder):
        said += (
            f" Nothing is downloaded here: if this is a name on the Hugging Face Hub, `hf download {folder} --local-dir"
            " DIR` fetches it, and DIR is the folder to give."
        )
    raise AbsentError(said)


class DivergedError(RuntimeError):
    """The run diverged: its loss or gradient is not finite."""


class _Warnings(logging.Handler):
    """Warnings of the project as sentences on stderr, whatever libraries make of the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


def command(verb: str) -> str:
    """Returns the command that runs a verb, as the user types it: "qarl train" or "python -m qarl_jax.train"."""
    if os.path.basename(sys.argv[0]) == "qarl":
        return f"qarl {verb}"
    return f"python -m qarl_jax{'.' if importlib.util.find_spec(f'qarl_jax.{verb}') else ' '}{verb}"


class Parser(argparse.ArgumentParser):
    """A parser of command lines with a config file and overrides (section.field=value), in any order among options.

    Args:
      verb: the command's name: "train" is called as `qarl train` or `python -m qarl_jax.train`.
      config: help text of `[--config] FILE`.
      needed: refuse a command line without a config.
    """

    def __init__(self, verb: str, *, config: str, needed: bool = False, **options: Any):
        super().__init__(prog=command(verb), **options)
        self._needed, self._example = needed, "quickstart" if verb == "train" else "FILE"
        self.add_argument("--config", metavar="FILE", help=config)
        self.add_argument("overrides", nargs="*", metavar="[FILE] section.field=value", help="the config, and settings")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found = self.parse_intermixed_args(args, namespace)
        if found.config is None and found.overrides and "=" not in found.overrides[0]:
            found.config = found.overrides.pop(0)
        if found.config is None and self._needed:
            self.error(f"which config? For example: {self.prog} {self._example}")
        return found

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: -"):
            message += "; settings of the run are written without dashes, as section.field=value (train.steps=10)"
        super().error(message)


@contextlib.contextmanager
def _warnings_told() -> Iterator[None]:
    log, handler = logging.getLogger("qarl_jax"), _Warnings(logging.WARNING)
    before, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before


at_error: list[Callable[[int], None]] = []
"""Called with the exit code after an error was printed, before the process ends."""


def entry_point(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Decorates `main(argv) -> exit code`: a `UserError` is printed to stderr, with exit code 2.

    A `DivergedError` is printed with exit code 1. Warnings of the project's loggers go to stderr, too.
    """

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            with _warnings_told():
                return main(argv)
        except (UserError, DivergedError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = 2 if isinstance(error, UserError) else 1
            for act in at_error:
                act(code)
            return code

    return run
