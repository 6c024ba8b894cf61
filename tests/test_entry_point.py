# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What a command tells its user: mistakes and warnings as sentences on stderr, without a library's decoration."""

import logging

import pytest

from qarl_jax.types import UserError, entry_point


@pytest.fixture
def decorated():
    """A root logger that some library has set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


def test_a_warning_is_a_plain_sentence(decorated, capsys, caplog):
    log = logging.getLogger("qarl_jax.run.checkpoint")

    @entry_point
    def main(argv):
        log.warning("Step %d is damaged.", 3)
        log.info("not for everybody")
        return 0

    assert main() == 0
    assert capsys.readouterr().err == "warning: Step 3 is damaged.\n"
    log.warning("afterwards")  # a library's user gets it by logging's own ways
    assert "afterwards" in caplog.text


def test_a_mistake_is_one_sentence_and_exit_code_2(capsys):
    @entry_point
    def main(argv):
        raise UserError("train.steps: expected an integer")

    assert main() == 2
    assert capsys.readouterr().err == "error: train.steps: expected an integer\n"
