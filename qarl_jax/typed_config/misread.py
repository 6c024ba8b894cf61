# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Values that YAML 1.1 takes for others than were meant, without a word."""

from __future__ import annotations

import re

import yaml


def misread(node: yaml.Node) -> str:
    """Says which number YAML 1.1 takes for another one: 010 for 8, and 1:30 for 90."""
    if not isinstance(node, yaml.ScalarNode) or node.tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
        return ""
    if ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value):
        number = yaml.SafeLoader("").construct_object(node)
        return f"YAML reads {node.value} as {number}: write {number}, or quote it."
    return ""


def mistake_of(node: yaml.Node) -> str:
    """Says what is wrong with the value of an override that YAML reads without a word."""
    if not isinstance(node, yaml.CollectionNode):
        return misread(node)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((key for i, key in enumerate(keys) if key in keys[:i]), ""):
            return f"key {twice!r} is given twice; keep one."
    parts = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
    return next(filter(None, map(mistake_of, parts)), "")
