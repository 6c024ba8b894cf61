# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules that give each weight a scheme: an ordered list of (regex, scheme), first match wins.

    quant:
      rules:
        - {match: "layers\\.(0|27)\\.", scheme: bf16}     # first and last layer stay high precision
        - {match: "self_attn", scheme: w8a8}
        - {match: "embed|head", scheme: "w4a16:g64"}      # the embedding and the head
        - {match: ".*", scheme: "w4a16:g128"}

A pattern is searched for anywhere in the path. A path no rule matches stays in bf16. The tables (`model.embed_tokens`
and `lm_head`) are given a scheme by name only: by a pattern in which "embed", or "head", is written. The same rules
write the engine's `quantization_config` (qarl_bridge.protocol.formats).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from qarl_bridge.protocol import formats

from qarl_jax.quant.scheme import Scheme
from qarl_jax.quant.schemes import at_width, parse_scheme
from qarl_jax.types import UserError


@dataclasses.dataclass(frozen=True)
class Rules:
    """Pairs (regex, scheme or None for bf16). Hashable, so they can be a static field of a model's config.

    Example: Rules.parse([{"match": "mlp", "scheme": "w4a16:g64"}]).scheme_for("layers.mlp.up_proj") ==
    w4a16.Config(64).
    """

    rules: tuple[tuple[str, Scheme | None], ...] = ()

    def at_width(self, bits: int) -> Rules:
        """Returns the rules with every scheme at another bit width of its grid; errors as `schemes.at_width`. The
        schemes of rules that name the embedding or the head have one width, and stay."""

        def own(match: str, scheme: Scheme | None) -> Scheme | None:
            return scheme if any(table in match for table in formats.TABLES.values()) else at_width(scheme, bits)

        return Rules(tuple((match, own(match, scheme)) for match, scheme in self.rules))

    @classmethod
    def parse(cls, rules: Iterable[Any], group_size: int | None = None) -> Rules:
        """Reads {match, scheme} mappings, e.g. from YAML.

        Args:
          rules: in order of precedence.
          group_size: the group size for schemes written without one.

        Raises:
          UserError: a key is missing or unknown, or a regex or scheme is bad; the message names the rule.
        """
        parsed = []
        for i, rule in enumerate(rules):
            where = f"quant.rules[{i}]"
            if not isinstance(rule, Mapping) or set(rule) != {"match", "scheme"}:
                raise UserError(f"{where}: needs exactly the keys 'match' and 'scheme', got {rule!r}")
            try:
                re.compile(rule["match"])
            except (re.error, TypeError) as error:
                raise UserError(f"{where}: {rule['match']!r} is not a regular expression: {error}") from None
            try:
                parsed.append((rule["match"], parse_scheme(str(rule["scheme"]), group_size)))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        return cls(tuple(parsed))

    @classmethod
    def uniform(cls, scheme: Scheme | None) -> Rules:
        """Makes rules that give every path one scheme."""
        return cls((("", scheme),))

    def scheme_for(self, path: str) -> Scheme | None:
        """Returns the scheme of the first rule whose regex is found in `path`; None (bf16) if no rule matches. A rule
        for the embedding or the head must name it."""
        named = formats.TABLES.get(path.rpartition(".")[2], "")
        for pattern, scheme in self.rules:
            if named in pattern and re.search(pattern, path):
                return scheme
        return None
